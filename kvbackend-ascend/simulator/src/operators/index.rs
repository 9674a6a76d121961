//! Operators that read and write rows by index.

use std::collections::HashMap;
use std::sync::Arc;

use super::{TensorArgument, check_apart, operator, place};
use crate::clock::TaskMoment;
use crate::executor::{First, wrong};
use crate::state::{CallResult, SimState};
use crate::task::Action;
use crate::tensor::{View, size_of_type};
use crate::types as sys;

/// A matrix, the indices of some of its rows, and the rows themselves.
struct RowArguments {
    matrix: View,
    index: View,
    moved: View,
}

impl RowArguments {
    fn new(matrix: View, axis: i64, index: View, rows: View) -> CallResult<Self> {
        if axis != 0 || !matrix.is_dense() || !rows.is_dense() || !index.is_dense() {
            // In this case, a device would copy the whole matrix.
            return wrong("rows of a matrix that is not dense, or of another axis than the first");
        }
        if index.dims.len() != 1 || ![sys::ACL_INT32, sys::ACL_INT64].contains(&index.dtype) {
            return wrong(format!("an index of type {} and extents {:?}", index.dtype, index.dims));
        }
        let fits = matrix.dtype == rows.dtype
            && matrix.dims.len() == rows.dims.len()
            && rows.dims[0] == index.dims[0]
            && matrix.dims[1..] == rows.dims[1..];
        if !fits {
            return wrong(format!("{:?} rows of {:?} by {:?}", rows.dims, matrix.dims, index.dims));
        }
        check_apart(&rows, &[&matrix, &index])?;
        Ok(Self { matrix, index, moved: rows })
    }

    fn row_bytes(&self) -> usize {
        self.moved.dims[1..].iter().product::<usize>() * size_of_type(self.moved.dtype)
    }

    /// Reads the row indices.
    fn numbers(&self, state: &mut SimState, moment: &TaskMoment) -> Result<Vec<usize>, String> {
        let at = place(state, &self.index, moment, false)?;
        let number = |i: usize| {
            // SAFETY: the index is alive and has this element.
            let n = unsafe {
                if self.index.dtype == sys::ACL_INT32 {
                    i64::from(at.cast::<i32>().add(i).read_unaligned())
                } else {
                    at.cast::<i64>().add(i).read_unaligned()
                }
            };
            let inside = usize::try_from(n).ok().filter(|&n| n < self.matrix.dims[0]);
            inside.ok_or_else(|| format!("row {n} of a matrix of {}", self.matrix.dims[0]))
        };
        (0..self.index.dims[0]).map(number).collect()
    }

    /// Returns the host pointer to consecutive rows in the matrix.
    fn run(
        &self,
        state: &mut SimState,
        moment: &TaskMoment,
        first: usize,
        count: usize,
        writes: bool,
    ) -> Result<*mut u8, String> {
        let bytes = self.row_bytes() as u64;
        let start = self.matrix.at + first as u64 * bytes;
        state.touch(&(start..start + count as u64 * bytes), moment, writes)
    }
}

/// Splits indices into runs of consecutive indices. Returns for each run its offset in the list, its first
/// index, and its length.
fn runs(numbers: &[usize]) -> Vec<(usize, usize, usize)> {
    let mut runs: Vec<(usize, usize, usize)> = Vec::new();
    for (i, &n) in numbers.iter().enumerate() {
        match runs.last_mut() {
            Some((_, first, count)) if *first + *count == n => *count += 1,
            _ => runs.push((i, n, 1)),
        }
    }
    runs
}

fn select(
    first: &mut First<'_>,
    x: TensorArgument,
    axis: i64,
    index: TensorArgument,
    out: TensorArgument,
) -> CallResult<Action> {
    let rows = RowArguments::new(first.tensor(x)?, axis, first.tensor(index)?, first.output(out)?)?;
    Ok(Arc::new(move |state, moment| {
        let bytes = rows.row_bytes();
        let numbers = rows.numbers(state, moment)?;
        let to = place(state, &rows.moved, moment, true)?;
        for (i, number, count) in runs(&numbers) {
            let from = rows.run(state, moment, number, count, false)?;
            // SAFETY: both ranges are alive and do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from, to.add(i * bytes), count * bytes) };
        }
        Ok(())
    }))
}

fn put(
    first: &mut First<'_>,
    x: TensorArgument,
    axis: i64,
    index: TensorArgument,
    source: TensorArgument,
) -> CallResult<Action> {
    let rows = RowArguments::new(first.output(x)?, axis, first.tensor(index)?, first.tensor(source)?)?;
    Ok(Arc::new(move |state, moment| {
        let bytes = rows.row_bytes();
        let numbers = rows.numbers(state, moment)?;
        let from = place(state, &rows.moved, moment, false)?;
        // SAFETY: each row is in the view, which is alive.
        let row = |i: usize| unsafe { std::slice::from_raw_parts(from.add(i * bytes), bytes) };
        let mut first = HashMap::new();
        for (i, number) in numbers.iter().enumerate() {
            if row(*first.entry(number).or_insert(i)) != row(i) {
                return Err("a row is put twice with other contents, in no order".to_owned());
            }
        }
        for (i, number, count) in runs(&numbers) {
            let to = rows.run(state, moment, number, count, true)?;
            // SAFETY: both ranges are alive and do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(from.add(i * bytes), to, count * bytes) };
        }
        Ok(())
    }))
}

operator!(aclnnIndexSelect, aclnnIndexSelectGetWorkspaceSize, (x: TensorArgument, axis: i64, index: TensorArgument, out: TensorArgument), select);
operator!(aclnnInplaceIndexCopy, aclnnInplaceIndexCopyGetWorkspaceSize, (x: TensorArgument, axis: i64, index: TensorArgument, source: TensorArgument), put);
