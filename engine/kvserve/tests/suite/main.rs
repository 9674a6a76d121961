//! Tests of the server with raw HTTP.

mod chat;
mod client;
mod common;
