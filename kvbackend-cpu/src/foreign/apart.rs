//! Checks that the planes of another engine's cache do not share elements. Planes may alternate in memory, such
//! as the keys and values of one block, so comparing first and last bytes is not enough.

use kvcore::{Error, Result};
use smallvec::SmallVec;

use super::{ForeignOrder, ForeignPlane, ForeignShape};

/// The bytes of a plane: runs of adjacent bytes at the points of a grid.
#[derive(Debug, Clone)]
struct Grid {
    /// The address of the first byte.
    start: i128,
    /// The distance between neighbouring points and the number of points on each axis, from the largest distance
    /// to the smallest. A point's runs end before the next point on the same axis.
    axes: SmallVec<[(i128, i128); 3]>,
    /// The number of bytes in a run.
    run: i128,
}

impl Grid {
    fn of(plane: &ForeignPlane, shape: &ForeignShape) -> Self {
        let bytes = |elements: usize| elements as i128 * (shape.dtype.bits() / 8) as i128;
        let (rows, run) = match plane.order {
            ForeignOrder::Rows { token } if token != shape.dim => ((token, shape.block_size), shape.dim),
            _ => ((0, 1), shape.block_size * shape.dim),
        };
        let mut axes: SmallVec<[(i128, i128); 3]> =
            [rows, (plane.head, shape.heads), (plane.block, shape.num_blocks)]
                .into_iter()
                .filter(|axis| axis.1 > 1)
                .map(|(stride, count)| (bytes(stride), count as i128))
                .collect();
        axes.sort_unstable_by(|a, b| b.cmp(a));
        Self { start: i128::from(plane.storage.address()) + bytes(plane.start), axes, run: bytes(run) }
    }

    /// Returns true if the grids share a byte, or if that cannot be excluded because their distances differ.
    fn meets(&self, other: &Self) -> bool {
        meet((&self.axes, self.run), (&other.axes, other.run), other.start - self.start)
    }
}

/// The axes of a grid, and the number of bytes in a run.
type Axes<'a> = (&'a [(i128, i128)], i128);

/// Returns true if two grids share a byte. The second one begins `shift` bytes after the first one.
fn meet((a, run_a): Axes<'_>, (b, run_b): Axes<'_>, shift: i128) -> bool {
    let span =
        |axes: &[(i128, i128)], run| axes.iter().map(|(stride, n)| stride * (n - 1)).sum::<i128>() + run;
    if shift >= span(a, run_a) || -shift >= span(b, run_b) {
        return false;
    }
    let (Some((&(stride, n), inner_a)), Some((&(other, m), inner_b))) = (a.split_first(), b.split_first())
    else {
        return true;
    };
    if stride != other {
        return true;
    }
    // Point j of the second grid lies `shift + (j - i) * stride` bytes after point i of the first one. What
    // belongs to a point is shorter than the stride, so that only the two nearest points can meet.
    let nearest = shift.rem_euclid(stride);
    [nearest, nearest - stride].into_iter().any(|apart| {
        let points = (apart - shift) / stride;
        (1 - n..m).contains(&points) && meet((inner_a, run_a), (inner_b, run_b), apart)
    })
}

/// Checks that no two planes share an element, so that each can be written by a thread of its own.
pub(super) fn check(shape: &ForeignShape, layers: &[[ForeignPlane; 2]]) -> Result<()> {
    let grids: Vec<Grid> = layers.iter().flatten().map(|plane| Grid::of(plane, shape)).collect();
    let shared =
        grids.iter().enumerate().any(|(i, grid)| grids[i + 1..].iter().any(|other| grid.meets(other)));
    if shared { Err(Error::Aliased { what: "keys and values of another engine's layers" }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Returns all bytes of a grid.
    fn bytes(grid: &Grid) -> BTreeSet<i128> {
        let mut starts = vec![grid.start];
        for &(stride, n) in &grid.axes {
            starts = starts.iter().flat_map(|start| (0..n).map(move |i| start + i * stride)).collect();
        }
        starts.iter().flat_map(|start| *start..start + grid.run).collect()
    }

    proptest! {
        #[test]
        fn grids_with_the_same_distances_meet_if_they_share_a_byte(
            counts in [1..4i128, 1..4i128, 1..4i128],
            gaps in [0..5i128, 0..5i128, 0..5i128],
            runs in [1..5i128, 1..5i128],
            start in -60..60i128,
        ) {
            let mut covered = runs[0].max(runs[1]);
            let mut axes: SmallVec<[(i128, i128); 3]> = SmallVec::new();
            for (n, gap) in counts.into_iter().zip(gaps).filter(|(n, _)| *n > 1) {
                axes.insert(0, (covered + gap, n));
                covered += (covered + gap) * (n - 1);
            }
            let [a, b] = [(0, runs[0]), (start, runs[1])].map(|(start, run)| Grid { start, axes: axes.clone(), run });
            let shared = bytes(&a).intersection(&bytes(&b)).next().is_some();
            prop_assert_eq!((a.meets(&b), b.meets(&a)), (shared, shared));
        }
    }
}
