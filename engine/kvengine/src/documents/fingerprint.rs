//! Fingerprints of strings: polynomial hashes with a secret base, from which the hash of any part of a text follows.

use std::hash::{BuildHasher, Hasher, RandomState};

/// The Mersenne prime `2^61 − 1`, the modulus of the hashes.
const MODULUS: u64 = (1 << 61) - 1;

/// The largest exponent of two among the lengths of strings.
const LEVELS: usize = usize::BITS as usize - 1;

/// The base of the hashes with its powers.
///
/// Two different strings of `n` bytes have the same hash under at most `n` of the `2^61` bases. The base is
/// secret, so nobody can choose texts that collide.
#[derive(Debug)]
pub(super) struct Fingerprints {
    base: u64,
    /// `base` to the power of `2^j`, at index `j`.
    powers: Vec<u64>,
}

/// The hashes of all prefixes of a text.
#[derive(Debug)]
pub(super) struct PrefixHashes(Vec<u64>);

impl Fingerprints {
    /// Creates fingerprints with a random base.
    pub(super) fn random() -> Self {
        // The standard library seeds each state with secret random numbers.
        let random = RandomState::new().build_hasher().finish() % (MODULUS - 512);
        Self::with_base(random + 256)
    }

    pub(super) fn with_base(base: u64) -> Self {
        let mut powers = vec![base];
        while powers.len() < LEVELS {
            let last = powers[powers.len() - 1];
            powers.push(multiply(last, last));
        }
        Self { base, powers }
    }

    /// Returns the power of the base for strings of `2^level` bytes.
    pub(super) fn power(&self, level: usize) -> u64 {
        self.powers[level]
    }

    /// Hashes all prefixes of a text.
    pub(super) fn prefixes(&self, text: &str) -> PrefixHashes {
        let mut hashes = Vec::with_capacity(text.len() + 1);
        let mut hash = 0;
        hashes.push(hash);
        for &byte in text.as_bytes() {
            // A zero byte counts as 1, so that strings of zero bytes differ by their lengths.
            hash = add(multiply(hash, self.base), u64::from(byte) + 1);
            hashes.push(hash);
        }
        PrefixHashes(hashes)
    }
}

impl PrefixHashes {
    /// Returns the number of bytes of the text.
    pub(super) fn len(&self) -> usize {
        self.0.len() - 1
    }

    /// Returns the hash of the `length` bytes from `start` on. `power` must be the base to the power of `length`.
    pub(super) fn of(&self, start: usize, length: usize, power: u64) -> u64 {
        add(self.0[start + length], MODULUS - multiply(self.0[start], power))
    }
}

/// Multiplies two numbers below the modulus.
pub(super) fn multiply(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    add(product as u64 & MODULUS, (product >> 61) as u64)
}

/// Adds two numbers, of which at most one is the modulus itself.
fn add(a: u64, b: u64) -> u64 {
    let sum = a + b;
    if sum >= MODULUS { sum - MODULUS } else { sum }
}

/// Hashes keys that are fingerprints already: their bits are spread, and nobody can choose them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SpreadHasher(u64);

impl Hasher for SpreadHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_of_a_part_does_not_depend_on_its_place() {
        let (fingerprints, text) = (Fingerprints::random(), "xxabcdefgh abcdefgh\0\0");
        let hashes = fingerprints.prefixes(text);
        let eight = fingerprints.power(3);
        assert_eq!(hashes.of(2, 8, eight), hashes.of(11, 8, eight));
        assert_ne!(hashes.of(2, 8, eight), hashes.of(3, 8, eight));
        assert_ne!(hashes.of(19, 1, fingerprints.power(0)), hashes.of(19, 2, fingerprints.power(1)));
        assert_eq!(hashes.len(), text.len());
    }

    #[test]
    fn products_are_reduced() {
        for (a, b) in [(MODULUS - 1, MODULUS - 1), (MODULUS - 1, 2), (1 << 60, 1 << 60), (0, 7), (1, 7)] {
            let right = u128::from(a) * u128::from(b) % u128::from(MODULUS);
            assert_eq!(u128::from(multiply(a, b)), right, "{a} · {b}");
        }
        assert_eq!(add(MODULUS - 1, 1), 0);
        assert_eq!(add(5, MODULUS), 5);
    }
}
