//! Measurements of other software on the same card, printed by `proof/peers/gpu.py`, and their comparison
//! with ours.

use std::fmt::Write as _;

use kvbench::rows::LargestRow;
use kvbench::table::duration;
use serde::Deserialize;

/// A row that the peers' script printed.
#[derive(Debug, Deserialize)]
pub(super) struct Peer {
    what: String,
    /// The name of our row for the same work, if we have one.
    ours: Option<String>,
    pub(super) seconds: Option<f64>,
    bytes: Option<f64>,
    /// The reason that there is no measurement.
    pub(super) skipped: Option<String>,
}

/// Parses the rows in the script's output.
pub(super) fn rows(output: &str) -> Vec<Peer> {
    output.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Returns the table that compares the peers' rows with ours.
pub(super) fn table(rows: &[Peer], ours: &[LargestRow]) -> String {
    let mut text =
        "| peer | size | its time | bytes/s | ours | our time | times as fast |\n|---|---|---|---|---|---|---|\n".to_owned();
    for Peer { what, ours: name, seconds, bytes, skipped } in rows {
        // Writing to a string cannot fail.
        let Some(seconds) = seconds else {
            let why = skipped.as_deref().unwrap_or("no reason");
            let _ = writeln!(text, "| {what} | – | SKIPPED: {why} | – | – | – | – |");
            continue;
        };
        let bytes = bytes.unwrap_or(0.0);
        let (mib, rate) = (bytes / f64::from(1 << 20), bytes / seconds * 1e-9);
        // On a card with less memory, our row may have a different size. Then the rows are not compared.
        let same_size = |us: &&LargestRow| us.bytes.is_none_or(|of_us| (of_us / bytes - 1.0).abs() < 0.02);
        let known = name.as_ref().and_then(|name| ours.iter().find(|known| known.what == *name));
        let (name, time, faster) = match known.filter(same_size) {
            Some(us) => (us.what.as_str(), duration(us.seconds), format!("{:.2}", seconds / us.seconds)),
            None => ("–", "–".to_owned(), "–".to_owned()),
        };
        let _ = writeln!(
            text,
            "| {what} | {mib:.0} MiB | {} | {rate:.0} GB/s | {name} | {time} | {faster} |",
            duration(*seconds)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_compared_with_our_rows_or_give_a_reason() {
        let output = "{\"what\":\"torch\",\"ours\":\"cuda: x\",\"seconds\":0.002,\"bytes\":4e9}\n\
             {\"what\":\"triton\",\"skipped\":\"not installed\"}\nelse\n";
        let us = |bytes| [LargestRow { what: "cuda: x".to_owned(), bytes: Some(bytes), seconds: 0.001 }];
        let shown = table(&rows(output), &us(4e9));
        let lines: Vec<&str> = shown.lines().skip(2).collect();
        assert_eq!(lines[0], "| torch | 3815 MiB | 2.00 ms | 2000 GB/s | cuda: x | 1.00 ms | 2.00 |");
        assert_eq!(lines[1], "| triton | – | SKIPPED: not installed | – | – | – | – |");
        assert_eq!(lines.len(), 2);
        assert!(table(&rows(output), &us(2e9)).contains("| 2000 GB/s | – | – | – |"));
    }
}
