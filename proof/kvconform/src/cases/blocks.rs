//! Cases for copies of whole blocks, plain and rotated.

use std::sync::Arc;

use kvcore::{
    BlockId, BlockOrder, CopyBlocks, KvArena, KvShape, Rope, RopeConfig, RopeScaling, RotateKeys, Rotation,
    SwapBlocks, WritePairs,
};

use crate::bench::{Bench, Failure, Outcome, close, ensure, equal, half_spacing, rounded_once};
use crate::oracle;

pub(super) fn pairs(list: &[(u32, u32)]) -> WritePairs {
    let pairs = list.iter().map(|&(from, to)| (BlockId(from), BlockId(to)));
    WritePairs::unchecked(pairs.collect::<Arc<[_]>>())
}

/// Calls `check` for each token of block `from` of `src`, with the token at the same place in block `to` of
/// `dst`.
pub(super) fn for_tokens(
    src: (&KvArena, &[f32]),
    dst: (&KvArena, &[f32]),
    block: (u32, u32),
    keys: bool,
    mut check: impl FnMut(usize, &[f32], &[f32]) -> Outcome,
) -> Outcome {
    let s = src.0.layout().shape();
    for layer in 0..s.num_layers {
        for offset in 0..s.block_size {
            let row = |(arena, values): (&KvArena, &'_ [f32]), block: u32, head| {
                let plane = if keys { arena.k_plane() } else { arena.v_plane() };
                let slot = block as usize * s.block_size + offset;
                let at = oracle::index(arena.layout(), plane.strides, layer, slot, head);
                values[at..at + plane.dim].to_vec()
            };
            for head in 0..if keys { s.k_heads } else { s.v_heads } {
                check(layer, &row(src, block.0, head), &row(dst, block.1, head))?;
            }
        }
    }
    Ok(())
}

pub(super) fn copy_moves_all_layers_and_nothing_else(b: &Bench) -> Outcome {
    for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
        let arena = b.arena(order)?;
        let (k0, v0) = b.fill(&arena, 20)?;
        b.stream
            .copy_blocks(&CopyBlocks { arena: arena.clone(), pairs: pairs(&[(2, 8), (2, 0), (5, 1)]) })?;
        let (k1, v1) = b.contents(&arena)?;
        let moved = [(2, 8), (2, 0), (5, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7)];
        for block in moved {
            let what = format!("block {} after copies, once {}", block.1, block.0);
            for_tokens((&arena, &k0), (&arena, &k1), block, true, |_, old, new| equal(&what, new, old))?;
            for_tokens((&arena, &v0), (&arena, &v1), block, false, |_, old, new| equal(&what, new, old))?;
        }
    }
    Ok(())
}

pub(super) fn swap_goes_between_layouts(b: &Bench) -> Outcome {
    let src = b.arena(BlockOrder::TokenMajor)?;
    let shape = KvShape { num_blocks: 3, order: BlockOrder::HeadMajor, ..src.layout().shape().clone() };
    let dst = b.arena_of(shape)?;
    let (k0, v0) = b.fill(&src, 21)?;
    b.stream.swap_blocks(&SwapBlocks {
        src: src.clone(),
        dst: dst.clone(),
        pairs: pairs(&[(8, 0), (1, 2)]),
    })?;
    let (k1, v1) = b.contents(&dst)?;
    for block in [(8, 0), (1, 2)] {
        for_tokens((&src, &k0), (&dst, &k1), block, true, |_, old, new| equal("K", new, old))?;
        for_tokens((&src, &v0), (&dst, &v1), block, false, |_, old, new| equal("V", new, old))?;
    }
    for_tokens((&dst, &k1), (&dst, &k1), (1, 1), true, |_, _, new| {
        equal("an untouched block", new, &[0.0; 10])
    })
}

pub(super) fn wrong_copies_are_refused(b: &Bench) -> Outcome {
    let arena = b.arena(BlockOrder::TokenMajor)?;
    let other = b.arena_of(KvShape { block_size: 8, ..arena.layout().shape().clone() })?;
    for (what, list) in [
        ("a source past the end", vec![(9, 0)]),
        ("a destination past the end", vec![(0, 9)]),
        ("a destination twice", vec![(0, 1), (2, 1)]),
        ("a block as source and destination", vec![(0, 1), (1, 2)]),
    ] {
        let result = b.stream.copy_blocks(&CopyBlocks { arena: arena.clone(), pairs: pairs(&list) });
        ensure(result.is_err(), || format!("{what} was accepted"))?;
    }
    for list in [vec![(0, 0)], vec![(0, 1), (1, 2)]] {
        let (src, dst) = (arena.clone(), arena.clone());
        let result = b.stream.swap_blocks(&SwapBlocks { src, dst, pairs: pairs(&list) });
        ensure(result.is_err(), || format!("a swap within an arena over itself was accepted: {list:?}"))?;
    }
    let result = b.stream.swap_blocks(&SwapBlocks { src: arena, dst: other, pairs: pairs(&[(0, 0)]) });
    ensure(result.is_err(), || "blocks of another size were accepted".to_owned())
}

pub(super) fn yarn() -> Result<Arc<Rope>, Failure> {
    let scaling = RopeScaling::Yarn {
        factor: 4.0,
        attention_factor: 1.138_629_4,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position: 64,
        truncate: true,
    };
    Ok(Arc::new(Rope::new(RopeConfig { scaling, ..RopeConfig::new(10, 1000.0) }, 8192)?))
}

pub(super) fn rotated_copies_equal_keys_rotated_there(b: &Bench) -> Outcome {
    let src = b.arena(BlockOrder::HeadMajor)?;
    let (k0, v0) = b.fill(&src, 22)?;
    let rope = yarn()?;
    for delta in [1, 777, -40] {
        let rotation = Rotation { rope: Arc::clone(&rope), delta };
        let op =
            RotateKeys { src: src.clone(), dst: src.clone(), layer: 1, pairs: pairs(&[(0, 7)]), rotation };
        b.stream.rotate_keys(&op)?;
        let (k1, v1) = b.contents(&src)?;
        for_tokens((&src, &k0), (&src, &k1), (0, 7), true, |layer, old, new| {
            let expected: Vec<f32> = match layer {
                1 => oracle::rotate(old, &rope, delta, 1.0).iter().map(|&x| x as f32).collect(),
                _ => return Ok(()),
            };
            rounded_once("keys moved by a distance", b.dtype, new, &expected)
        })?;
        for_tokens((&src, &v0), (&src, &v1), (0, 7), false, |layer, old, new| {
            if layer == 1 { equal("values", new, old) } else { Ok(()) }
        })?;
    }
    let untouched = b.contents(&src)?.0;
    for_tokens((&src, &k0), (&src, &untouched), (7, 7), true, |layer, old, new| {
        if layer == 0 { equal("another layer", new, old) } else { Ok(()) }
    })
}

pub(super) fn rotation_keeps_length_and_the_original(b: &Bench) -> Outcome {
    let (src, dst) = (b.arena(BlockOrder::TokenMajor)?, b.arena(BlockOrder::TokenMajor)?);
    let (k0, _) = b.fill(&src, 23)?;
    let rotation = Rotation { rope: yarn()?, delta: 5000 };
    b.stream.rotate_keys(&RotateKeys {
        src: src.clone(),
        dst: dst.clone(),
        layer: 0,
        pairs: pairs(&[(3, 4)]),
        rotation,
    })?;
    equal("the stored original", &b.contents(&src)?.0, &k0)?;
    let k1 = b.contents(&dst)?.0;
    let length = |row: &[f32]| row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt() as f32;
    for_tokens((&src, &k0), (&dst, &k1), (3, 4), true, |layer, old, new| {
        if layer > 0 {
            return Ok(());
        }
        close("length of a moved key", &[length(new)], &[length(old)], half_spacing(b.dtype) + 1e-5)
    })
}
