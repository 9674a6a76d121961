//! Weights as stored in a file: a name, an element type, a shape and bytes.

use std::fmt;
use std::ops::Range;

use half::f16;
use kvbackend_cpu::dense::{SharedBytes, StoredType};

use crate::error::{Error, Result, WeightProblem};

/// A weight as stored in a file: row-major and without gaps, in little-endian bytes.
///
/// ```
/// use kvmodel::dense::{StoredType, StoredWeight};
///
/// let ones: Vec<u8> = [1.0f32; 6].iter().flat_map(|x| x.to_le_bytes()).collect();
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
    bytes: SharedBytes,
}

impl fmt::Debug for StoredWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoredWeight({} {:?} {})", self.name, self.shape, self.dtype)
    }
}

impl StoredWeight {
    /// Creates a weight from its bytes.
    ///
    /// # Errors
    /// Returns [`Error::Weight`], with the name, if a row does not consist of whole blocks, or if the number
    /// of bytes does not match the shape.
    pub fn new(
        name: impl Into<String>,
        dtype: StoredType,
        shape: &[usize],
        bytes: impl Into<SharedBytes>,
    ) -> Result<Self> {
        let (name, bytes) = (name.into(), bytes.into());
        match problem(dtype, shape, bytes.len()) {
            None => Ok(Self { name, dtype, shape: shape.to_vec(), bytes }),
            Some(problem) => Err(Error::Weight { name, problem }),
        }
    }

    /// Creates a weight from f32 values.
    ///
    /// # Errors
    /// Returns [`Error::Weight`] if the number of values does not match the shape.
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

    /// Returns the shape, outermost axis first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the bytes. Several weights may share them.
    pub fn bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    /// Returns the number of elements per row: the size of the last axis.
    pub fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Returns all elements in f32. Widening from f16 and bf16 is exact.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.shape.iter().product()];
        self.dtype.decode(&self.bytes, &mut values);
        values
    }

    /// Returns true if both weights have the same shape and the same elements, in whichever types they are stored.
    pub fn has_elements_of(&self, other: &Self) -> bool {
        if self.shape != other.shape || self.dtype == other.dtype {
            return self.shape == other.shape && self.bytes == other.bytes;
        }
        // Row by row, because all elements of a vocabulary take gigabytes in f32.
        let rows = |weight: &Self| {
            let row = weight.dtype.row_bytes(weight.width()).unwrap_or(usize::MAX).max(1);
            let (dtype, bytes, width) = (weight.dtype, weight.bytes.clone(), weight.width());
            (0..bytes.len() / row).map(move |at| {
                let mut values = vec![0.0; width];
                dtype.decode(&bytes[at * row..(at + 1) * row], &mut values);
                values
            })
        };
        rows(self).eq(rows(other))
    }

    /// Returns all elements in `Q8_0` blocks, rounded as in ggml, or `None` if a row does not consist of
    /// whole blocks.
    pub fn to_q8_0(&self) -> Option<Vec<u8>> {
        const BLOCK: usize = StoredType::Q8_0.block_elements();
        if !self.width().is_multiple_of(BLOCK) {
            return None;
        }
        let mut bytes = Vec::with_capacity(self.bytes.len());
        for block in self.to_f32().as_chunks::<BLOCK>().0 {
            let most = block.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let step = most / 127.0;
            let inverse = if step == 0.0 { 0.0 } else { 1.0 / step };
            bytes.extend_from_slice(&f16::from_f32(step).to_le_bytes());
            bytes.extend(block.iter().map(|x| ((x * inverse).round() as i8).cast_unsigned()));
        }
        Some(bytes)
    }

    /// Checks that the weight has `shape`.
    ///
    /// # Errors
    /// Returns [`Error::Weight`], with the name and both shapes, if it does not.
    pub fn check_shape(&self, shape: &[usize]) -> Result<()> {
        if self.shape == shape {
            return Ok(());
        }
        let problem = WeightProblem::Shape { expected: shape.to_vec(), got: self.shape.clone() };
        Err(Error::Weight { name: self.name.clone(), problem })
    }

    /// Returns the rows in `rows` of each head, as `[heads, rows, width]`. The weight must be a matrix
    /// `[heads · height, width]`.
    ///
    /// # Errors
    /// Returns [`Error::Weight`] if the weight is not such a matrix or a head has fewer rows.
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

/// Returns the number of bytes for a weight of a type and shape.
pub(crate) fn bytes_of(dtype: StoredType, shape: &[usize]) -> Result<usize, WeightProblem> {
    let width = shape.last().copied().unwrap_or(1);
    if !width.is_multiple_of(dtype.block_elements()) {
        return Err(WeightProblem::Blocks { width, block: dtype.block_elements() });
    }
    let rows = shape.iter().rev().skip(1).try_fold(1usize, |all, &n| all.checked_mul(n));
    let bytes = rows.and_then(|rows| rows.checked_mul(dtype.row_bytes(width)?));
    bytes.ok_or(WeightProblem::Length { expected: usize::MAX, got: 0 })
}

/// Returns the reason why `got` bytes cannot be a weight of this type and shape, or `None` if they can.
fn problem(dtype: StoredType, shape: &[usize], got: usize) -> Option<WeightProblem> {
    match bytes_of(dtype, shape) {
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
    fn elements_are_compared_across_types() {
        let of = |dtype, bytes: Vec<u8>| StoredWeight::new("a", dtype, &[2, 2], bytes).unwrap();
        let values = [1.0f32, -0.5, 3.0, 0.25];
        let wide = StoredWeight::of_f32("b", &[2, 2], &values).unwrap();
        let half = of(StoredType::F16, values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect());
        let bf16 = |x: &f32| half::bf16::from_f32(*x).to_le_bytes();
        let brain = of(StoredType::BF16, values.iter().flat_map(bf16).collect());
        for (one, other) in [(&wide, &half), (&half, &brain), (&brain, &wide), (&wide, &wide)] {
            assert!(one.has_elements_of(other) && other.has_elements_of(one));
        }
        let others = [1.0f32, -0.5, 3.0, 0.2];
        for other in [
            StoredWeight::of_f32("a", &[2, 2], &others).unwrap(),
            StoredWeight::of_f32("a", &[4], &values).unwrap(),
            StoredWeight::of_f32("a", &[3, 2], &[values.as_slice(), &[0.0; 2]].concat()).unwrap(),
        ] {
            assert!([&wide, &half, &brain].iter().all(|one| !one.has_elements_of(&other)));
        }
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
        // Blocks run along rows, so rows that are stored in blocks can also be selected.
        let blocks =
            StoredWeight::new("a", StoredType::Q8_0, &[4, 32], (0..136).collect::<Vec<u8>>()).unwrap();
        let cut = blocks.rows_of_heads(2, 0..1).unwrap();
        assert_eq!(cut.bytes()[..], [(0..34).collect::<Vec<u8>>(), (68..102).collect()].concat());
    }
}
