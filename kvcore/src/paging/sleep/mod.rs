//! Sleep: blocks whose memory is released while their IDs and addresses stay.

mod arena;
mod blocks;

pub use arena::ReservedArena;
pub use blocks::SleepingBlocks;
