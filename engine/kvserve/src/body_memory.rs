//! The memory that the bodies of requests take, from their first bytes until their prompts are tokens.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::refusal::{Kind, Refusal};

/// The bytes of a body that every request may have, whatever others have. Small requests are answered beside large ones.
pub(crate) const FREE: usize = 64 << 10;

/// The maximum number of values in the JSON of a body. A value of two bytes takes many times as much memory.
const MAX_VALUES: usize = 1 << 20;

/// The memory of a value, roughly.
const VALUE: usize = 64;

/// The memory for the bodies of all requests.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    most: usize,
    taken: AtomicUsize,
}

/// The memory of one body.
///
/// # Drop behaviour
/// Gives the memory back.
#[derive(Debug)]
pub(crate) struct BodyShare {
    memory: Arc<BodyMemory>,
    /// The bytes of the body and of its values so far.
    bytes: usize,
}

impl BodyMemory {
    /// Creates memory for bodies of up to `body` bytes each: for eight of the largest, and for one of the most values.
    pub(crate) fn new(body: usize) -> Self {
        Self { most: body.saturating_mul(8).saturating_add(MAX_VALUES * VALUE), taken: AtomicUsize::new(0) }
    }

    /// Returns the share of a body without bytes.
    pub(crate) fn share(self: &Arc<Self>) -> BodyShare {
        BodyShare { memory: Arc::clone(self), bytes: 0 }
    }
}

impl BodyShare {
    /// Takes memory for more bytes.
    ///
    /// # Errors
    /// Refuses if the bodies of other requests have all of it.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), Refusal> {
        let more = counted(self.bytes.saturating_add(bytes)) - counted(self.bytes);
        if self.memory.taken.fetch_add(more, Ordering::Relaxed).saturating_add(more) > self.memory.most {
            self.memory.taken.fetch_sub(more, Ordering::Relaxed);
            let reason = "the server has no memory for another large request; try again later";
            return Err(Refusal {
                code: Some("rate_limit_exceeded"),
                ..Refusal::new(Kind::Overloaded, reason)
            });
        }
        self.bytes = self.bytes.saturating_add(bytes);
        Ok(())
    }

    /// Takes memory for the values of a body's JSON.
    ///
    /// # Errors
    /// Refuses too many values, and what [`grow`](Self::grow) refuses.
    pub(crate) fn grow_by_values(&mut self, json: &[u8]) -> Result<(), Refusal> {
        let values = values(json);
        if values > MAX_VALUES {
            let reason = format!(
                "the body has {values} values, and the limit is {MAX_VALUES}; send fewer in each request"
            );
            return Err(Refusal::new(Kind::TooLarge, reason));
        }
        self.grow(values * VALUE)
    }
}

impl Drop for BodyShare {
    fn drop(&mut self) {
        self.memory.taken.fetch_sub(counted(self.bytes), Ordering::Relaxed);
    }
}

/// Returns the bytes that count for a body.
fn counted(bytes: usize) -> usize {
    bytes.saturating_sub(FREE)
}

/// Returns the number of values in a JSON text, or a few more.
fn values(json: &[u8]) -> usize {
    let (mut values, mut in_text, mut escaped) = (1, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            b',' | b'[' | b'{' | b':' if !in_text => values += 1,
            _ => {}
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_outside_of_texts() {
        assert_eq!(values(br#"{"a": [1, 2, "[,{:\", ["], "b": {}}"#), 9);
        assert_eq!(values(b"5"), 1);
        let memory = Arc::new(BodyMemory::new(1 << 20));
        let many = b"[0".iter().copied().chain(b",0".repeat(MAX_VALUES)).collect::<Vec<u8>>();
        let refusal = memory.share().grow_by_values(&many).unwrap_err();
        assert_eq!(refusal.kind, Kind::TooLarge, "{refusal:?}");
    }

    #[test]
    fn large_bodies_share_memory_and_small_ones_need_none() {
        let memory = Arc::new(BodyMemory::new(1 << 20));
        let mut large: Vec<BodyShare> = Vec::new();
        let refused = loop {
            let mut share = memory.share();
            match share.grow(1 << 20) {
                Ok(()) => large.push(share),
                Err(refusal) => break refusal,
            }
        };
        assert_eq!(refused.kind, Kind::Overloaded);
        assert!(large.len() >= 8);
        memory.share().grow(FREE).unwrap();
        drop(large);
        assert_eq!(memory.taken.load(Ordering::Relaxed), 0);
        // A body of the maximum size with the maximum number of values is not refused for its own sake.
        let mut alone = memory.share();
        alone.grow(1 << 20).unwrap();
        alone.grow(MAX_VALUES * VALUE).unwrap();
    }
}
