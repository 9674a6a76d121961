//! Random operations on a pool, with small numbers that select keys, guards and blocks.

use proptest::prelude::*;

use crate::{KEYS, TTL};

#[derive(Debug, Clone)]
pub(crate) enum Op {
    Allocate(usize),
    Admit(usize),
    AllocateMore(usize, usize),
    Split(usize, usize),
    Register(usize, u32),
    RegisterAfter(usize, u32),
    RegisterWrong(usize),
    Share(usize),
    AdmitPrefix(u32, usize, usize, usize),
    AppendShared(usize, usize),
    SplitShared(usize, usize),
    Reclaim(usize),
    RegisterShared(usize, u32),
    Lookup(u32, usize),
    Clone(usize),
    Truncate(usize, usize),
    Pin(usize),
    SharePinned(usize),
    Retain(usize, u8),
    DropMutable(usize),
    DropShared(usize),
    DropPinned(usize),
    ClearCached,
    Wait(u64),
    Expire,
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let i = 0..5usize;
    let n = 0..5usize;
    prop_oneof![
        4 => n.clone().prop_map(Op::Allocate),
        1 => n.clone().prop_map(Op::Admit),
        1 => (i.clone(), n.clone()).prop_map(|(i, n)| Op::AllocateMore(i, n)),
        1 => (i.clone(), n.clone()).prop_map(|(i, n)| Op::Split(i, n)),
        4 => (i.clone(), 0..KEYS).prop_map(|(i, k)| Op::Register(i, k)),
        2 => (i.clone(), 0..KEYS).prop_map(|(i, k)| Op::RegisterAfter(i, k)),
        1 => i.clone().prop_map(Op::RegisterWrong),
        1 => i.clone().prop_map(Op::Share),
        3 => (0..KEYS, n.clone(), 0..7usize, 0..9usize).prop_map(|(k, n, b, r)| Op::AdmitPrefix(k, n, b, r)),
        1 => (i.clone(), i.clone()).prop_map(|(a, b)| Op::AppendShared(a, b)),
        1 => (i.clone(), n.clone()).prop_map(|(i, n)| Op::SplitShared(i, n)),
        1 => i.clone().prop_map(Op::Reclaim),
        1 => (i.clone(), 0..KEYS).prop_map(|(i, k)| Op::RegisterShared(i, k)),
        4 => (0..KEYS, n.clone()).prop_map(|(k, n)| Op::Lookup(k, n)),
        2 => i.clone().prop_map(Op::Clone),
        1 => (i.clone(), n).prop_map(|(i, n)| Op::Truncate(i, n)),
        1 => i.clone().prop_map(Op::Pin),
        1 => i.clone().prop_map(Op::SharePinned),
        1 => (i.clone(), 0..110u8).prop_map(|(i, p)| Op::Retain(i, p)),
        1 => i.clone().prop_map(Op::DropMutable),
        5 => i.clone().prop_map(Op::DropShared),
        1 => i.prop_map(Op::DropPinned),
        1 => Just(Op::ClearCached),
        1 => (0..TTL).prop_map(Op::Wait),
        1 => Just(Op::Expire),
    ]
}
