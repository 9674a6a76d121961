//! Memory for lists that are uploaded to the device, reused for later lists.

use std::sync::Arc;

use crate::base::Result;

/// The minimum size of a list's memory, in bytes.
const LEAST: usize = 4096;

/// Returns a memory block of at least `bytes` bytes: a block that nothing except `pool` holds, or otherwise a
/// new block from `make`. The pool keeps at most `most` blocks, each with its size in bytes.
///
/// # Errors
/// Returns the errors of `make`, whose argument is the number of bytes.
pub fn room<U>(
    pool: &mut Vec<(usize, Arc<U>)>,
    bytes: usize,
    most: usize,
    make: impl FnOnce(usize) -> Result<U>,
) -> Result<Arc<U>> {
    let fits = |(len, known): &&(usize, Arc<U>)| *len >= bytes && Arc::strong_count(known) == 1;
    if let Some((_, known)) = pool.iter().find(fits) {
        return Ok(Arc::clone(known));
    }
    let len = bytes.next_power_of_two().max(LEAST);
    let made = Arc::new(make(len)?);
    if pool.len() >= most {
        // The smallest block fits the fewest lists. Work that still uses the block keeps it alive.
        let smallest = (0..pool.len()).min_by_key(|&i| pool[i].0).unwrap_or_default();
        pool.swap_remove(smallest);
    }
    pool.push((len, Arc::clone(&made)));
    Ok(made)
}
