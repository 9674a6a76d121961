//! The table: for each variant of a backend, one line per case, with all element types of the variant.

use kvconform::CASES;

use crate::{Column, Report};

/// The reports so far, and the part of them that is printed.
pub(crate) struct Table<'a> {
    columns: &'a [Column],
    /// Outcomes by column and case.
    outcomes: Vec<Vec<Option<Result<(), String>>>>,
    skipped: Vec<Option<String>>,
    /// The first column of the variant to print next, and its next case; none before the name of the variant
    /// is printed.
    turn: (usize, Option<usize>),
    passed: usize,
    failed: usize,
}

impl<'a> Table<'a> {
    pub(crate) fn new(columns: &'a [Column]) -> Self {
        let outcomes = columns.iter().map(|_| CASES.iter().map(|_| None).collect()).collect();
        let skipped = columns.iter().map(|_| None).collect();
        Self { columns, outcomes, skipped, turn: (0, None), passed: 0, failed: 0 }
    }

    /// Takes a report, and prints every complete line in order.
    pub(crate) fn add(&mut self, column: usize, report: Report) {
        match report {
            Report::Skipped(reason) => self.skipped[column] = Some(reason),
            Report::Case(case, outcome) => self.outcomes[column][case] = Some(outcome),
        }
        while self.print_next() {}
    }

    /// Returns the numbers of passed and of failed cases in printed lines.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.passed, self.failed)
    }

    fn print_next(&mut self) -> bool {
        let (first, case) = self.turn;
        let Some(column) = self.columns.get(first) else { return false };
        let (backend, dtypes) = (column.backend, column.backend.dtypes);
        let columns = first..first + dtypes.len();
        let Some(case) = case else {
            println!("{} ({})", backend.name, backend.variant);
            self.turn = (first, Some(0));
            return true;
        };
        if let Some(reason) = &self.skipped[first]
            && columns.clone().all(|column| self.skipped[column].is_some())
        {
            println!("  SKIPPED: {reason}");
            self.turn = (columns.end, None);
            return true;
        }
        let Some(row) = CASES.get(case) else {
            self.turn = (columns.end, None);
            return true;
        };
        // If a device opens for other columns but not for this one, every case of this column fails.
        let outcome = |column: usize| match (&self.outcomes[column][case], &self.skipped[column]) {
            (Some(Ok(())), _) => Some(Ok(())),
            (Some(Err(failure)), _) | (None, Some(failure)) => Some(Err(failure)),
            (None, None) => None,
        };
        let outcomes: Option<Vec<_>> = columns.map(outcome).collect();
        let Some(outcomes) = outcomes else { return false };
        let mut line = format!("  {:<55}", row.name);
        let mut failures = Vec::new();
        for (dtype, outcome) in dtypes.iter().zip(outcomes) {
            line.extend([" ", dtype.name(), if outcome.is_ok() { " ok  " } else { " FAIL" }]);
            match outcome {
                Ok(()) => self.passed += 1,
                Err(failure) => failures.push(format!("    {dtype}: {failure}")),
            }
        }
        println!("{line}");
        self.failed += failures.len();
        for failure in &failures {
            println!("{failure}");
        }
        self.turn = (first, Some(case + 1));
        true
    }
}
