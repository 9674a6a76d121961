//! Weights as a file stores them: a name, an element type, a shape and bytes.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::blocks;
use crate::error::{Error, Result, WeightProblem};

/// The element type of a stored weight. Blocks are those of ggml, and lie along the last axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoredType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// bfloat16: the upper half of an f32.
    BF16,
    /// ggml's `Q8_0`: 32 elements in 34 bytes, an f16 scale and 32 signed bytes. An element is the scale times its
    /// byte.
    Q8_0,
    /// ggml's `Q4_K`: 256 elements in 144 bytes. Two f16 factors, for scales and for minima; 12 bytes with a scale
    /// and a minimum of six bits for each of the eight groups of 32 elements; 128 bytes with two elements of four
    /// bits each. An element is `factor · scale · q − factor · minimum`.
    Q4K,
    /// ggml's `Q4_0`: 32 elements in 18 bytes.
    Q4_0,
    /// ggml's `Q4_1`: 32 elements in 20 bytes.
    Q4_1,
    /// ggml's `Q5_0`: 32 elements in 22 bytes.
    Q5_0,
    /// ggml's `Q5_1`: 32 elements in 24 bytes.
    Q5_1,
    /// ggml's `Q2_K`: 256 elements in 84 bytes.
    Q2K,
    /// ggml's `Q3_K`: 256 elements in 110 bytes.
    Q3K,
    /// ggml's `Q5_K`: 256 elements in 176 bytes.
    Q5K,
    /// ggml's `Q6_K`: 256 elements in 210 bytes.
    Q6K,
}

impl StoredType {
    /// All element types.
    pub const ALL: [Self; 13] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Returns the type with ggml's number, as GGUF files have it.
    pub(crate) fn of_ggml(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            10 => Self::Q2K,
            11 => Self::Q3K,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            30 => Self::BF16,
            _ => return None,
        })
    }

    /// Returns the number of elements of a block: 1 for types without blocks.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Returns the number of bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Returns the bytes of a weight of this type and shape.
    pub(crate) fn bytes_of(self, shape: &[usize]) -> Result<usize, WeightProblem> {
        let (width, block) = (shape.last().copied().unwrap_or(1), self.block_elements());
        if !width.is_multiple_of(block) {
            return Err(WeightProblem::Blocks { width, block });
        }
        let elements = shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n));
        let bytes = elements.and_then(|n| (n / block).checked_mul(self.block_bytes()));
        bytes.ok_or(WeightProblem::Length { expected: usize::MAX, got: 0 })
    }

    /// Returns true if several elements share a scale.
    pub const fn is_blocks(self) -> bool {
        self.block_elements() > 1
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        })
    }
}

/// A weight as it is stored: dense and row-major, in little-endian bytes.
///
/// ```
/// use kvmodel::dense::{StoredType, StoredWeight};
///
/// let ones = [1.0f32; 6].iter().flat_map(|x| x.to_le_bytes()).collect();
/// let weight = StoredWeight::new("model.norm.weight", StoredType::F32, &[6], ones)?;
/// assert_eq!((weight.shape(), weight.bytes().len()), (&[6][..], 24));
/// let short = StoredWeight::new("model.norm.weight", StoredType::F32, &[6], vec![0; 23]);
/// assert!(short.unwrap_err().to_string().contains("model.norm.weight"));
/// # Ok::<(), kvmodel::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct StoredWeight {
    name: String,
    dtype: StoredType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl fmt::Debug for StoredWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoredWeight({} {:?} {})", self.name, self.shape, self.dtype)
    }
}

impl StoredWeight {
    /// Describes the bytes of a weight.
    ///
    /// # Errors
    /// Returns [`Error::Weight`], with the name, if the rows do not consist of whole blocks, or if there are more or
    /// fewer bytes than the shape asks for.
    pub fn new(name: impl Into<String>, dtype: StoredType, shape: &[usize], bytes: Vec<u8>) -> Result<Self> {
        let name = name.into();
        match problem(dtype, shape, bytes.len()) {
            None => Ok(Self { name, dtype, shape: shape.to_vec(), bytes }),
            Some(problem) => Err(Error::Weight { name, problem }),
        }
    }

    /// Describes numbers in f32.
    ///
    /// # Errors
    /// Returns [`Error::Weight`] if there are more or fewer numbers than the shape asks for.
    pub fn of_f32(name: impl Into<String>, shape: &[usize], values: &[f32]) -> Result<Self> {
        Self::new(name, StoredType::F32, shape, bytemuck::cast_slice(values).to_vec())
    }

    /// Returns the name of the tensor.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the element type.
    pub fn dtype(&self) -> StoredType {
        self.dtype
    }

    /// Returns the extents, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the number of elements of a row: the last extent.
    pub fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Returns all elements in f32. Widening from f16 and bf16 is exact.
    ///
    /// # Errors
    /// Returns [`Error::Dense`] if the library that knows the blocks cannot read them.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let elements = self.shape.iter().product();
        Ok(match self.dtype {
            StoredType::F32 => bytemuck::pod_collect_to_vec(&self.bytes),
            StoredType::F16 => {
                let mut values = vec![0.0; elements];
                numbers::<f16>(&self.bytes).convert_to_f32_slice(&mut values);
                values
            }
            StoredType::BF16 => {
                let mut values = vec![0.0; elements];
                numbers::<bf16>(&self.bytes).convert_to_f32_slice(&mut values);
                values
            }
            _ => blocks::widened(self)?,
        })
    }

    /// Checks that the weight has `shape`.
    ///
    /// # Errors
    /// Returns [`Error::Weight`], with the name and both shapes.
    pub fn check_shape(&self, shape: &[usize]) -> Result<()> {
        if self.shape == shape {
            return Ok(());
        }
        let problem = WeightProblem::Shape { expected: shape.to_vec(), got: self.shape.clone() };
        Err(Error::Weight { name: self.name.clone(), problem })
    }

    /// Returns the rows `rows` of each head of a matrix `[heads · height, width]`, as `[heads, rows, width]`.
    ///
    /// # Errors
    /// Returns [`Error::Weight`] if the weight is no such matrix, or a head has fewer rows.
    pub fn rows_of_heads(&self, heads: usize, rows: Range<usize>) -> Result<Self> {
        let width = self.width();
        let height = match self.shape[..] {
            [all, _] if heads > 0 && all.is_multiple_of(heads) => all / heads,
            _ => 0,
        };
        if rows.end > height {
            self.check_shape(&[heads * rows.end, width])?;
        }
        let row = width / self.dtype.block_elements() * self.dtype.block_bytes();
        let mut bytes = Vec::with_capacity(heads * rows.len() * row);
        for head in 0..heads {
            let at = |i: usize| (head * height + i) * row;
            bytes.extend_from_slice(&self.bytes[at(rows.start)..at(rows.end)]);
        }
        Self::new(self.name.clone(), self.dtype, &[heads, rows.len(), width], bytes)
    }
}

/// Returns bytes as numbers, which are copied only if the bytes are not aligned.
fn numbers<T: bytemuck::Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    let aligned = bytemuck::try_cast_slice(bytes);
    aligned.map_or_else(|_| Cow::Owned(bytemuck::pod_collect_to_vec(bytes)), Cow::Borrowed)
}

/// Returns the reason why so many bytes are no weight of this type and shape.
fn problem(dtype: StoredType, shape: &[usize], got: usize) -> Option<WeightProblem> {
    match dtype.bytes_of(shape) {
        Ok(expected) if expected == got => None,
        Ok(expected) | Err(WeightProblem::Length { expected, .. }) => {
            Some(WeightProblem::Length { expected, got })
        }
        Err(problem) => Some(problem),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem_of(dtype: StoredType, shape: &[usize], bytes: usize) -> WeightProblem {
        match StoredWeight::new("a.weight", dtype, shape, vec![0; bytes]) {
            Err(Error::Weight { name, problem }) if name == "a.weight" => problem,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn truncated_and_overlong_bytes_name_the_tensor() {
        for dtype in StoredType::ALL {
            let expected = 2 * 256 / dtype.block_elements() * dtype.block_bytes();
            assert!(StoredWeight::new("a", dtype, &[2, 256], vec![0; expected]).is_ok());
            for got in [0, expected - 1, expected + 1] {
                let problem = WeightProblem::Length { expected, got };
                assert_eq!(problem_of(dtype, &[2, 256], got), problem, "{dtype}");
            }
        }
        let endless = problem_of(StoredType::F32, &[usize::MAX, 2], 8);
        assert_eq!(endless, WeightProblem::Length { expected: usize::MAX, got: 8 });
    }

    #[test]
    fn rows_consist_of_whole_blocks() {
        let expected = WeightProblem::Blocks { width: 48, block: 32 };
        assert_eq!(problem_of(StoredType::Q8_0, &[2, 48], 102), expected);
        assert_eq!(problem_of(StoredType::Q4K, &[128], 72), WeightProblem::Blocks { width: 128, block: 256 });
    }

    #[test]
    fn rows_of_heads_are_cut_out_of_each_head() {
        let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
        // Two heads of three rows.
        let weight = StoredWeight::of_f32("a", &[6, 2], &values).unwrap();
        let cut = weight.rows_of_heads(2, 1..3).unwrap();
        let expected = [2.0f32, 3.0, 4.0, 5.0, 8.0, 9.0, 10.0, 11.0];
        assert_eq!(cut, StoredWeight::of_f32("a", &[2, 2, 2], &expected).unwrap());
        assert!(weight.rows_of_heads(2, 1..4).unwrap_err().to_string().contains("[8, 2]"));
        // Blocks lie along rows, so that rows of blocks are cut in the same way.
        let blocks = StoredWeight::new("a", StoredType::Q8_0, &[4, 32], (0..136).collect()).unwrap();
        let cut = blocks.rows_of_heads(2, 0..1).unwrap();
        assert_eq!(cut.bytes(), [(0..34).collect::<Vec<u8>>(), (68..102).collect()].concat());
    }
}
