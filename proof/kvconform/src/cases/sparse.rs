//! Cases for attention to selected tokens or blocks.

use kvcore::{Attend, AttendRows, BlockOrder, KvShape, Selection, SelectionUnit};

use super::attend::{AttendTrial, HEADS, entry, reused, rows, segment};
use super::quant::each;
use crate::bench::{Bench, Outcome, ensure, equal};

/// Returns a selection with the given indices, one list per row.
pub(super) fn select(unit: SelectionUnit, rows: &[&[u32]]) -> Selection {
    let ends = rows.iter().scan(0, |end, row| {
        *end += row.len() as u32;
        Some(*end)
    });
    Selection { unit, offsets: std::iter::once(0).chain(ends).collect(), indices: rows.concat().into() }
}

/// Returns a prefill and a decode that reuse a chunk at an offset, and a row without a selection.
fn mixed(b: &Bench, order: BlockOrder, prefill: Selection, decode: Selection) -> Outcome<AttendTrial> {
    let at = rows(&[(9, 46), (10, 47), (30, 507), (4, 4)]);
    let batch = vec![
        entry(0..2, reused(40, &[0, 2])).selecting(prefill),
        entry(2..3, reused(500, &[7, 1])).selecting(decode),
        entry(3..4, vec![segment(&[3, 5], 5, 0, 0)]),
    ];
    AttendTrial::over(b, b.arena(order)?, &at, batch)
}

pub(super) fn rows_see_selected_tokens_only(b: &Bench) -> Outcome {
    for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
        // There are 3 tokens of a system prompt, 6 of a chunk and 2 of a question.
        let prefill = select(SelectionUnit::Tokens, &[&[0, 2, 3, 8, 9], &[1, 4, 5, 10]]);
        let decode = select(SelectionUnit::Tokens, &[&[2, 3, 6, 7, 10]]);
        mixed(b, order, prefill, decode)?.check(b, "selected tokens")?;
    }
    Ok(())
}

pub(super) fn rows_see_selected_blocks_only(b: &Bench) -> Outcome {
    for order in [BlockOrder::HeadMajor, BlockOrder::TokenMajor] {
        // There are four blocks, with 3, 4, 2 and 2 tokens. The second and the third are in the same segment.
        let prefill = select(SelectionUnit::Blocks, &[&[0, 2], &[1, 2, 3]]);
        let decode = select(SelectionUnit::Blocks, &[&[1, 3]]);
        mixed(b, order, prefill, decode)?.check(b, "selected blocks")?;
    }
    Ok(())
}

pub(super) fn what_is_selected_must_be_visible_too(b: &Bench) -> Outcome {
    let all: Vec<u32> = (0..11).collect();
    for (unit, indices) in [(SelectionUnit::Tokens, &all[..]), (SelectionUnit::Blocks, &[0, 1, 2, 3])] {
        let at = rows(&[(9, 46), (5, 42)]);
        let selection = select(unit, &[indices, indices]);
        let batch = vec![entry(0..2, reused(40, &[0, 2])).selecting(selection)];
        let mut trial = AttendTrial::over(b, b.arena(BlockOrder::TokenMajor)?, &at, batch)?;
        trial.check(b, "everything selected")?;
        trial.op.window = Some(4);
        trial.check(b, "everything selected, inside a window")?;
    }
    Ok(())
}

pub(super) fn an_empty_selection_sees_nothing(b: &Bench) -> Outcome {
    for unit in [SelectionUnit::Tokens, SelectionUnit::Blocks] {
        // The second row selects a token or block that it may not see yet.
        let future: &[u32] = if unit == SelectionUnit::Tokens { &[10] } else { &[3] };
        let batch = vec![entry(0..2, reused(40, &[0, 2])).selecting(select(unit, &[&[], future]))];
        let trial =
            AttendTrial::over(b, b.arena(BlockOrder::HeadMajor)?, &rows(&[(10, 47), (3, 40)]), batch)?;
        trial.check(b, "an empty selection")?;
        equal("output", &b.download(&trial.op.out)?, &[0.0; 2 * HEADS * 6])?;
        if let Some(lse) = &trial.op.lse {
            equal("log-sum-exp", &b.download(lse)?, &[f32::NEG_INFINITY; 2 * HEADS])?;
        }
    }
    Ok(())
}

pub(super) fn selections_of_quantised_blocks(b: &Bench) -> Outcome {
    each(b, |format| {
        let shape = b.arena(BlockOrder::TokenMajor)?.layout().shape().clone();
        let arena = b.arena_of(KvShape { format, k_dim: 16, v_dim: 8, ..shape })?;
        let selections = [
            select(SelectionUnit::Tokens, &[&[0, 3, 8, 9], &[4, 10]]),
            select(SelectionUnit::Blocks, &[&[0, 2], &[1]]),
        ];
        for selection in selections {
            let batch = vec![entry(0..2, reused(40, &[0, 2])).selecting(selection)];
            AttendTrial::over(b, arena.clone(), &rows(&[(9, 46), (10, 47)]), batch)?
                .check(b, "selected tokens of quantised blocks")?;
        }
        Ok(())
    })
}

pub(super) fn wrong_selections_are_refused(b: &Bench) -> Outcome {
    let tokens = SelectionUnit::Tokens;
    let trial = |selection| -> Outcome<Attend> {
        let batch: Vec<AttendRows> = vec![entry(0..2, reused(40, &[0, 2])).selecting(selection)];
        Ok(AttendTrial::over(b, b.arena(BlockOrder::TokenMajor)?, &rows(&[(9, 46), (10, 47)]), batch)?.op)
    };
    b.stream.attend(&trial(select(tokens, &[&[0, 10], &[10]]))?)?;
    let raw = |offsets: &[u32], indices: &[u32]| Selection {
        unit: tokens,
        offsets: offsets.into(),
        indices: indices.into(),
    };
    for (what, selection) in [
        ("a token past the end", select(tokens, &[&[0], &[11]])),
        ("a block past the end", select(SelectionUnit::Blocks, &[&[4], &[]])),
        ("indices out of order", select(tokens, &[&[3, 2], &[]])),
        ("an index twice", select(tokens, &[&[], &[2, 2]])),
        ("offsets for another number of rows", select(tokens, &[&[0]])),
        ("no offsets", raw(&[], &[])),
        ("offsets that go back", raw(&[0, 2, 1], &[1])),
        ("indices past the last offset", raw(&[0, 1, 1], &[1, 2])),
        ("a first offset that is not 0", raw(&[1, 1, 2], &[1, 2])),
        ("offsets past the indices", raw(&[0, 1, 5], &[1, 2])),
    ] {
        let result = b.stream.attend(&trial(selection)?);
        ensure(result.is_err(), || format!("{what} was accepted"))?;
    }
    Ok(())
}
