//! A count-min sketch of four-bit counters that ages by halving. It estimates how often a key was seen
//! recently.
//!
//! The design follows `TinyLFU` (Einziger, Friedman, Manes 2017): four rows, and saturation at 15. After an
//! average of ten increments per counter, all counters are halved, so that keys that used to be popular fade.

#[derive(Debug)]
pub(super) struct Sketch {
    /// Counters, sixteen per word.
    words: Vec<u64>,
    mask: u64,
    seen: usize,
    period: usize,
}

const ROWS: u32 = 4;
const HALVES: u64 = 0x7777_7777_7777_7777;

impl Sketch {
    pub(super) fn new(blocks: usize) -> Self {
        let counters = blocks.next_power_of_two().max(64);
        Self { words: vec![0; counters / 4], mask: (counters * 4 - 1) as u64, seen: 0, period: counters * 10 }
    }

    fn places(&self, word: u64) -> impl Iterator<Item = (usize, u32)> + use<> {
        let mask = self.mask;
        // The word is part of a digest, so rotated words serve as independent hashes.
        (0..ROWS).map(move |row| {
            let place = word.rotate_left(row * 16) & mask;
            ((place / 16) as usize, (place % 16) as u32 * 4)
        })
    }

    /// Records one observation of a key, given by its first word.
    pub(super) fn observe(&mut self, key: u64) {
        for (word, shift) in self.places(key) {
            if (self.words[word] >> shift) & 15 < 15 {
                self.words[word] += 1 << shift;
            }
        }
        self.seen += 1;
        if self.seen >= self.period {
            self.seen /= 2;
            self.words.iter_mut().for_each(|word| *word = (*word >> 1) & HALVES);
        }
    }

    /// Estimates how often a key was seen. The estimate is never too low (before ageing), and at most 15.
    pub(super) fn estimate(&self, key: u64) -> u8 {
        self.places(key).map(|(word, shift)| ((self.words[word] >> shift) & 15) as u8).min().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_are_never_low_mostly_exact_and_age() {
        let key = |i: u64| (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17);
        let keys: Vec<u64> = (0..200).map(key).collect();
        let mut sketch = Sketch::new(1024);
        for (i, &key) in keys.iter().enumerate() {
            (0..i % 5).for_each(|_| sketch.observe(key));
        }
        let estimate: Vec<usize> = keys.iter().map(|&key| usize::from(sketch.estimate(key))).collect();
        assert!(estimate.iter().enumerate().all(|(i, &e)| e >= i % 5));
        let exact = estimate.iter().enumerate().filter(|(i, e)| **e == i % 5).count();
        assert!(exact > 190, "{exact} of 200");
        (0..30).for_each(|_| sketch.observe(keys[0]));
        assert_eq!(sketch.estimate(keys[0]), 15);
        for i in 0..10 * 1024 {
            sketch.observe(keys[1 + i % 199]);
        }
        assert!(sketch.estimate(keys[0]) < 15);
    }
}
