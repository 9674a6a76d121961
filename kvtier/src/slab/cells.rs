//! The free cells of a slab.
//!
//! A free cell is either *open*, so that a record may be written to it, or *closed* until the next checkpoint,
//! which opens it. After a crash, only the cells that the newest checkpoint lists as open can contain records
//! that it does not list.

use std::collections::BTreeMap;

use crate::record::CellRun;

/// Sets of cells as runs.
#[derive(Debug, Clone, Default)]
pub(super) struct CellSet {
    /// The length of each run, by its first cell. Runs neither touch nor overlap.
    runs: BTreeMap<u32, u32>,
    cells: u32,
}

impl CellSet {
    /// Returns the number of cells.
    pub(super) fn len(&self) -> u32 {
        self.cells
    }

    /// Returns the runs in order.
    pub(super) fn runs(&self) -> impl ExactSizeIterator<Item = CellRun> {
        self.runs.iter().map(|(&start, &count)| CellRun { start, count })
    }

    /// Adds cells, which must not be in the set.
    pub(super) fn add(&mut self, run: CellRun) {
        let CellRun { mut start, mut count } = run;
        self.cells += count;
        if let Some((&before, &len)) = self.runs.range(..start).next_back()
            && before + len == start
        {
            self.runs.remove(&before);
            (start, count) = (before, len + count);
        }
        if let Some(len) = self.runs.remove(&(start + count)) {
            count += len;
        }
        self.runs.insert(start, count);
    }

    /// Removes a run. Returns false and changes nothing unless all of its cells are in the set.
    pub(super) fn remove(&mut self, run: CellRun) -> bool {
        let Some((&start, &count)) = self.runs.range(..=run.start).next_back() else { return false };
        let end = run.start + run.count;
        if end > start + count {
            return false;
        }
        self.runs.remove(&start);
        if run.start > start {
            self.runs.insert(start, run.start - start);
        }
        if end < start + count {
            self.runs.insert(end, start + count - end);
        }
        self.cells -= run.count;
        true
    }

    /// Takes `count` cells, in as few runs as possible and at most `most` of them. Returns `None` and changes
    /// nothing if that is not possible.
    pub(super) fn take(&mut self, count: u32, most: usize) -> Option<Vec<CellRun>> {
        if count > self.cells {
            return None;
        }
        // The shortest run that has room for everything, otherwise the longest ones.
        let fitting = self.runs().filter(|run| run.count >= count).min_by_key(|run| run.count);
        let chosen = if let Some(run) = fitting {
            vec![CellRun { start: run.start, count }]
        } else {
            let mut runs: Vec<CellRun> = self.runs().collect();
            runs.sort_by_key(|run| std::cmp::Reverse(run.count));
            let mut left = count;
            let cut = runs.into_iter().map_while(|run| {
                let taken = run.count.min(left);
                left -= taken;
                (taken > 0).then_some(CellRun { start: run.start, count: taken })
            });
            cut.collect()
        };
        if chosen.len() > most {
            return None;
        }
        for &run in &chosen {
            self.remove(run);
        }
        Some(chosen)
    }
}

/// Returns the number of cells in runs.
pub(super) fn count(runs: &[CellRun]) -> u32 {
    runs.iter().map(|run| run.count).sum()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_set_of_runs_equals_a_set_of_cells(steps in prop::collection::vec((0u32..3, 0u32..40, 1u32..9), 0..60)) {
            let (mut set, mut model) = (CellSet::default(), BTreeSet::new());
            let cells = |run: CellRun| run.start..run.start + run.count;
            for (kind, start, count) in steps {
                let run = CellRun { start, count };
                match kind {
                    0 if cells(run).all(|cell| !model.contains(&cell)) => {
                        set.add(run);
                        model.extend(cells(run));
                    }
                    1 => {
                        let all = cells(run).all(|cell| model.contains(&cell));
                        prop_assert_eq!(set.remove(run), all);
                        if all {
                            model.retain(|cell| !cells(run).contains(cell));
                        }
                    }
                    2 => {
                        let taken = set.take(count, 3);
                        prop_assert!(taken.is_some() || count as usize > model.len() || set.runs().len() > 3);
                        for run in taken.iter().flatten() {
                            for cell in cells(*run) {
                                prop_assert!(model.remove(&cell));
                            }
                        }
                        let sum: u32 = taken.iter().flatten().map(|run| run.count).sum();
                        prop_assert!(taken.is_none() || sum == count);
                    }
                    _ => {}
                }
                prop_assert_eq!(set.len() as usize, model.len());
                let listed: Vec<u32> = set.runs().flat_map(cells).collect();
                prop_assert_eq!(listed, model.iter().copied().collect::<Vec<_>>());
                let apart = set.runs().zip(set.runs().skip(1)).all(|(a, b)| a.start + a.count < b.start);
                prop_assert!(apart);
            }
        }
    }
}
