//! Byte planes: plane `i` contains byte `i` of every element. The planes are compressed separately, because
//! signs and exponents repeat and mantissas do not.

use zstd::bulk::{Compressor, Decompressor};

use crate::error::{Error, Result};

/// The compression level: the fastest of zstd's ordinary levels. Mantissas do not shrink at any level.
const LEVEL: i32 = 1;

// Decision: docs/decisions/chunks.md#a-compressed-chunk-has-one-zstd-frame-per-element-byte
/// A compressed buffer: one frame for each byte of an element, with a checksum of the frame's contents.
#[derive(Debug)]
pub(super) struct BytePlanes {
    pub(super) frames: Vec<Box<[u8]>>,
}

impl BytePlanes {
    /// Compresses a buffer of `element`-byte elements.
    ///
    /// # Errors
    /// Returns [`kvcore::Error::Allocation`] if zstd runs out of memory.
    pub(super) fn compress(bytes: &[u8], element: usize) -> Result<Self> {
        let refused = |error: std::io::Error| kvcore::Error::Allocation {
            bytes: bytes.len(),
            kind: kvcore::MemoryKind::System,
            reason: format!("zstd: {error}"),
        };
        let mut compressor = Compressor::new(LEVEL).map_err(refused)?;
        compressor.include_checksum(true).map_err(refused)?;
        let mut frame = |plane: usize| {
            let plane: Vec<u8> = bytes.iter().skip(plane).step_by(element).copied().collect();
            // The frame is boxed, because a vector would keep its worst-case capacity.
            compressor.compress(&plane).map(Vec::into_boxed_slice).map_err(refused)
        };
        let frames = (0..element).map(&mut frame).collect::<Result<_, _>>()?;
        Ok(Self { frames })
    }

    /// Decompresses the buffer, whose original size was `len` bytes.
    ///
    /// # Errors
    /// Returns [`Error::Damaged`] if a frame cannot be decompressed, or if its checksum or length does not
    /// match.
    pub(super) fn decompress(&self, len: usize) -> Result<Vec<u8>> {
        let damaged = |plane: usize, why: &str| Error::Damaged(format!("byte plane {plane}: {why}"));
        let element = self.frames.len();
        let mut bytes = vec![0; len];
        let mut decompressor = Decompressor::new().map_err(|error| damaged(0, &error.to_string()))?;
        for (plane, frame) in self.frames.iter().enumerate() {
            let to = bytes.iter_mut().skip(plane).step_by(element);
            let expected = to.len();
            let content = decompressor.decompress(frame, expected);
            let content = content.map_err(|error| damaged(plane, &error.to_string()))?;
            if content.len() != expected {
                return Err(damaged(plane, &format!("{} bytes, not {expected}", content.len())));
            }
            to.zip(content).for_each(|(to, byte)| *to = byte);
        }
        Ok(bytes)
    }

    /// Returns the total size of all frames, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.frames.iter().map(|frame| frame.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes of `n` values of similar magnitude, as in a model.
    fn values(n: usize) -> Vec<u8> {
        let value = |i: usize| ((i as f32 * 0.37).sin() * 2.0).to_bits().to_le_bytes();
        (0..n).flat_map(value).collect()
    }

    #[test]
    fn buffers_of_any_length_and_element_come_back() {
        for element in [1, 2, 4] {
            for len in [0, element, 7 * element, 4096 * element] {
                let bytes = &values(len / 4 + 1)[..len];
                let planes = BytePlanes::compress(bytes, element).unwrap();
                assert_eq!(planes.frames.len(), element);
                assert_eq!(planes.decompress(len).unwrap(), bytes);
            }
        }
    }

    #[test]
    fn planes_shrink_where_whole_elements_do_not() {
        let bytes = values(1 << 14);
        let (whole, planes) = (
            BytePlanes::compress(&bytes, 1).unwrap().bytes(),
            BytePlanes::compress(&bytes, 4).unwrap().bytes(),
        );
        assert!(
            planes < whole && planes * 10 < bytes.len() * 9,
            "{planes} of {}, {whole} whole",
            bytes.len()
        );
    }

    #[test]
    fn every_damaged_byte_and_every_cut_is_found() {
        let bytes = values(64);
        let good = BytePlanes::compress(&bytes, 2).unwrap();
        let altered = |plane: usize, change: &dyn Fn(&mut Vec<u8>)| {
            let mut frames = good.frames.clone();
            let mut frame = frames[plane].to_vec();
            change(&mut frame);
            frames[plane] = frame.into();
            BytePlanes { frames }.decompress(bytes.len())
        };
        for plane in 0..2 {
            for at in 0..good.frames[plane].len() {
                for bit in 0..8 {
                    let result = altered(plane, &|frame| frame[at] ^= 1 << bit);
                    // An unused bit may change, as long as the contents do not.
                    match result {
                        Err(Error::Damaged(_)) => {}
                        other => assert_eq!(other.unwrap(), bytes, "bit {bit} of byte {at}"),
                    }
                }
                assert!(matches!(altered(plane, &|frame| frame.truncate(at)), Err(Error::Damaged(_))));
            }
            assert!(matches!(altered(plane, &|frame| frame.push(0)), Err(Error::Damaged(_))));
        }
        assert!(matches!(good.decompress(bytes.len() + 2), Err(Error::Damaged(_))), "another length");
        assert!(matches!(good.decompress(bytes.len() - 2), Err(Error::Damaged(_))), "another length");
    }
}
