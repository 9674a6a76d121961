//! The table: one line per case for each variant of a backend, with all of the variant's element types.

use kvconform::Case;
use kvcore::Error;

use crate::{Column, ColumnReport};

/// The reports so far, and the progress of printing them.
pub(crate) struct CaseTable<'a> {
    columns: &'a [Column],
    cases: &'a [&'static Case],
    /// Outcomes by column and case.
    outcomes: Vec<Vec<Option<Result<(), String>>>>,
    unopened: Vec<Option<Unopened>>,
    /// The first column of the variant that is being printed, and its next case; none if the variant's name
    /// is not printed yet.
    turn: (usize, Option<usize>),
    passed: usize,
    failed: usize,
    skipped: usize,
}

/// The reason that a column cannot be opened.
struct Unopened {
    reason: String,
    /// True if no installation helps: the processor lacks instructions, or the machine has no second card.
    is_lasting: bool,
}

impl<'a> CaseTable<'a> {
    pub(crate) fn new(columns: &'a [Column], cases: &'a [&'static Case]) -> Self {
        let outcomes = columns.iter().map(|_| cases.iter().map(|_| None).collect()).collect();
        let unopened = columns.iter().map(|_| None).collect();
        Self { columns, cases, outcomes, unopened, turn: (0, None), passed: 0, failed: 0, skipped: 0 }
    }

    /// Adds a report, and prints every complete line in order.
    pub(crate) fn add(&mut self, column: usize, report: ColumnReport) {
        match report {
            ColumnReport::Unopened(error) => {
                let backend = self.columns[column].backend;
                let is_lasting = match (backend.name, backend.variant) {
                    ("cpu", _) => matches!(error, Error::Unsupported { .. }),
                    // Without any card, only the first card's variant fails.
                    ("cuda", "device 1") => matches!(error, Error::NoDevice { .. }),
                    _ => false,
                };
                self.unopened[column] = Some(Unopened { reason: error.to_string(), is_lasting });
            }
            ColumnReport::Case(case, outcome) => self.outcomes[column][case] = Some(outcome),
        }
        while self.print_next() {}
    }

    /// Returns the numbers of passed, failed and skipped cases among the printed ones.
    pub(crate) fn counts(&self) -> (usize, usize, usize) {
        (self.passed, self.failed, self.skipped)
    }

    fn print_next(&mut self) -> bool {
        let (first, case) = self.turn;
        let Some(column) = self.columns.get(first) else { return false };
        let (backend, dtypes) = (column.backend, column.dtypes);
        let columns = first..first + dtypes.len();
        let Some(case) = case else {
            println!("{} ({})", backend.name, backend.variant);
            self.turn = (first, Some(0));
            return true;
        };
        if let Some(Unopened { reason, is_lasting }) = &self.unopened[first]
            && columns.clone().all(|column| self.unopened[column].is_some())
        {
            println!("  {}: {reason}", if *is_lasting { "SKIPPED" } else { "FAILED" });
            let cases = if *is_lasting { &mut self.skipped } else { &mut self.failed };
            *cases += columns.len() * self.cases.len();
            self.turn = (columns.end, None);
            return true;
        }
        let Some(row) = self.cases.get(case) else {
            self.turn = (columns.end, None);
            return true;
        };
        // If only some of a variant's columns open, every case of the other columns has failed.
        let outcome = |column: usize| match (&self.outcomes[column][case], &self.unopened[column]) {
            (Some(Ok(())), _) => Some(Ok(())),
            (Some(Err(failure)), _) | (None, Some(Unopened { reason: failure, .. })) => Some(Err(failure)),
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
