//! Cases for RoPE, which is applied to rows in place.

use std::sync::Arc;

use kvcore::{ApplyRope, Error, Pairing, Rope, RopeConfig, RopeScaling};

use crate::bench::{Bench, Outcome, ensure, equal, numbers, rounded, rounded_once};
use crate::oracle;

const POSITIONS: [i64; 4] = [0, 1, 1500, 37];

fn check(b: &Bench, config: RopeConfig, dim: usize) -> Outcome {
    let rope = Arc::new(Rope::new(config, 2048)?);
    let values = rounded(b.dtype, &numbers(30, 4 * 3 * dim));
    let rows = b.upload(b.dtype, &[4, 3, dim], &values)?;
    b.stream.rope(&ApplyRope { rows: rows.clone(), positions: POSITIONS.into(), rope: Arc::clone(&rope) })?;
    let factor = f64::from(rope.attention_factor());
    let expected: Vec<f32> = values
        .chunks(dim)
        .enumerate()
        .flat_map(|(i, row)| oracle::rotate(row, &rope, POSITIONS[i / 3], factor))
        .map(|x| x as f32)
        .collect();
    let actual = b.download(&rows)?;
    rounded_once("rotated rows", b.dtype, &actual, &expected)?;
    for (new, old) in actual.chunks(dim).zip(values.chunks(dim)) {
        equal(
            "elements past the rotary dimension",
            &new[rope.config().rotary_dim..],
            &old[rope.config().rotary_dim..],
        )?;
    }
    Ok(())
}

pub(super) fn rows_are_rotated_in_both_pairings(b: &Bench) -> Outcome {
    for pairing in [Pairing::HalfSplit, Pairing::Interleaved] {
        check(b, RopeConfig { pairing, ..RopeConfig::new(16, 10_000.0) }, 16)?;
    }
    Ok(())
}

pub(super) fn a_part_of_a_row_can_be_rotated(b: &Bench) -> Outcome {
    for pairing in [Pairing::HalfSplit, Pairing::Interleaved] {
        check(b, RopeConfig { pairing, ..RopeConfig::new(6, 500.0) }, 11)?;
    }
    Ok(())
}

pub(super) fn the_attention_factor_enters_once(b: &Bench) -> Outcome {
    let scaling = RopeScaling::Yarn {
        factor: 8.0,
        attention_factor: 1.2079,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position: 128,
        truncate: true,
    };
    check(b, RopeConfig { scaling, ..RopeConfig::new(12, 10_000.0) }, 12)
}

pub(super) fn positions_past_the_limit_are_refused(b: &Bench) -> Outcome {
    let rope = Arc::new(Rope::new(RopeConfig::new(8, 10_000.0), 100)?);
    let rows = b.tensor(b.dtype, &[1, 1, 8])?;
    let past = b.stream.rope(&ApplyRope { rows, positions: [100].into(), rope });
    ensure(matches!(past, Err(Error::OutOfRange { value: 100, limit: 100, .. })), || format!("gave {past:?}"))
}
