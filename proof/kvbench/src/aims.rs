//! The benchmarks' targets: the minimum speed that a row should reach, as a multiple of its limit's speed.

use crate::rows::BenchRow;

/// The target for all rows with a certain measurement and limit.
struct Aim {
    /// The prefix of the `what` of matching rows. The remainder of `what` names an element type, thread
    /// counts or sizes.
    what: &'static str,
    /// The prefix of the limit's name in matching rows.
    limit: &'static str,
    /// The size that the target applies to; `None` for any size.
    size: Option<f64>,
    /// The minimum ratio of the limit's time to the row's time.
    least: f64,
    /// True if a run fails when it misses the target. Such a target leaves room for noise on any machine.
    required: bool,
}

/// Targets for rows on the CPU. Reusing a chunk of 4096 tokens may take at most three times as long as
/// hashing its tokens into a chain of keys, and a prompt with cached documents at most 1.1 times as long as
/// its question alone. Decoys may make a new document 1.3 times and a prompt with cached documents 1.02 times
/// as slow.
const AIMS: [Aim; 23] = [
    Aim { what: "scatter ", limit: "memcpy", size: None, least: 0.9, required: false },
    Aim { what: "gather ", limit: "memcpy", size: None, least: 0.9, required: false },
    Aim { what: "copy_blocks ", limit: "memcpy", size: None, least: 0.9, required: false },
    Aim { what: "rows of 1024 B:", limit: "memcpy", size: None, least: 0.9, required: false },
    Aim { what: "rope ", limit: "memcpy", size: None, least: 0.8, required: false },
    Aim { what: "rotate_keys ", limit: "memcpy", size: None, least: 0.8, required: false },
    Aim { what: "attend, decode,", limit: "streaming read", size: None, least: 0.7, required: false },
    Aim { what: "attend, decode,", limit: "the same in bf16", size: None, least: 1.0, required: false },
    Aim { what: "attend, prefill,", limit: "GEMM", size: None, least: 0.6, required: false },
    Aim {
        what: "reuse of a stored chunk,",
        limit: "BLAKE3 chain",
        size: Some(4096.0),
        least: 1.0 / 3.0,
        required: true,
    },
    Aim {
        what: "TTFT, all chunks hit;",
        limit: "the question alone",
        size: None,
        least: 1.0 / 1.1,
        required: false,
    },
    Aim { what: "TTFT, all chunks hit;", limit: "full prefill", size: None, least: 10.0, required: false },
    Aim {
        what: "TTFT, one new document behind decoys;",
        limit: "the same without decoys",
        size: None,
        least: 1.0 / 1.3,
        required: false,
    },
    Aim {
        what: "TTFT, all chunks hit, behind decoys;",
        limit: "the same without decoys",
        size: None,
        least: 1.0 / 1.02,
        required: false,
    },
    Aim {
        what: "block pool: alloc + free of 128,",
        limit: "kvbm-logical",
        size: Some(65_536.0),
        least: 5.0,
        required: false,
    },
    Aim {
        what: "block pool: prefix hit of 128",
        limit: "kvbm-logical",
        size: Some(65_536.0),
        least: 2.0,
        required: false,
    },
    Aim {
        what: "block pool: churn of 128",
        limit: "kvbm-logical",
        size: Some(65_536.0),
        least: 8.0,
        required: false,
    },
    Aim { what: "256-bit chained keys", limit: "SHA-256", size: None, least: 1.4, required: false },
    Aim { what: "disk tier: write ", limit: "direct writes", size: None, least: 0.85, required: false },
    Aim { what: "disk tier: restart ", limit: "one second", size: None, least: 1.0, required: false },
    Aim { what: "disk tier: read, 4 ", limit: "direct reads", size: None, least: 0.85, required: false },
    Aim {
        what: "disk tier in an engine: save ",
        limit: "direct writes",
        size: None,
        least: 0.85,
        required: false,
    },
    Aim {
        what: "disk tier in an engine: load ",
        limit: "direct reads",
        size: None,
        least: 0.85,
        required: false,
    },
];

/// Targets for kernels on a card. The limit of a decode step is a copy of half as many bytes as the step
/// reads. The copy then reads and writes as many bytes in total as the step reads.
const ON_A_CARD: [Aim; 5] = [
    Aim { what: "cuda: scatter ", limit: "cuMemcpyDtoD", size: None, least: 0.9, required: false },
    Aim { what: "cuda: gather ", limit: "cuMemcpyDtoD", size: None, least: 0.9, required: false },
    Aim { what: "cuda: copy_blocks ", limit: "cuMemcpyDtoD", size: None, least: 0.9, required: false },
    Aim { what: "cuda: rotate_keys ", limit: "cuMemcpyDtoD", size: None, least: 0.9, required: false },
    Aim {
        what: "cuda: attend, decode,",
        limit: "cuMemcpyDtoD of half",
        size: None,
        least: 0.8,
        required: false,
    },
];

/// Returns a row's target, if any. A row measured on a test double has no target.
fn find(row: &BenchRow) -> Option<&'static Aim> {
    if row.double {
        return None;
    }
    let about = |aim: &&Aim| {
        row.what.starts_with(aim.what)
            && row.limit.starts_with(aim.limit)
            && aim.size.is_none_or(|size| row.size == size)
    };
    AIMS.iter().chain(&ON_A_CARD).find(about)
}

/// Returns the names of the rows that missed a required target.
pub fn broken(rows: &[BenchRow]) -> Vec<&str> {
    let broken = |row: &&BenchRow| find(row).is_some_and(|aim| aim.required && row.ratio < aim.least);
    rows.iter().filter(broken).map(|row| row.what.as_str()).collect()
}

/// Formats a row's target and whether the row reaches it. Returns a dash if the row has no target.
pub fn verdict(row: &BenchRow) -> String {
    match find(row).map(|aim| aim.least) {
        Some(least) if row.ratio >= least => format!("{least:.2}, reached"),
        Some(least) => format!("{least:.2}, **missed**"),
        None => "–".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::tests::row;

    fn row_of(what: &str, limit: &str, size: f64, ratio: f64) -> BenchRow {
        BenchRow { what: what.to_owned(), limit: limit.to_owned(), ratio, ..row(size, 1.0) }
    }

    fn verdict_of(what: &str, limit: &str, size: f64, ratio: f64) -> String {
        verdict(&row_of(what, limit, size, ratio))
    }

    #[test]
    fn reuse_of_a_chunk_may_take_three_times_its_chain_and_no_more() {
        let reuse = |ratio| {
            verdict_of("reuse of a stored chunk, sha256", "BLAKE3 chain of its tokens", 4096.0, ratio)
        };
        assert_eq!(reuse(1.0 / 2.99), "0.33, reached");
        assert_eq!(reuse(1.0 / 3.01), "0.33, **missed**");
    }

    #[test]
    fn a_run_fails_when_reuse_takes_too_long_and_not_for_a_slow_copy() {
        let rows = [
            row_of("reuse of a stored chunk, sha256", "BLAKE3 chain of its tokens", 4096.0, 0.4),
            row_of("reuse of a stored chunk, sha256", "BLAKE3 chain of its tokens", 1024.0, 0.3),
            row_of("reuse of a stored chunk, blake3", "BLAKE3 chain of its tokens", 4096.0, 0.3),
            row_of("scatter bf16, 1 thread", "memcpy", 1.0, 0.1),
        ];
        assert_eq!(broken(&rows), ["reuse of a stored chunk, blake3"]);
        assert!(broken(&rows[..2]).is_empty());
    }

    #[test]
    fn an_aim_is_about_one_limit_and_one_size() {
        let alloc =
            |size, limit| verdict_of("block pool: alloc + free of 128, 65536 blocks", limit, size, 4.9);
        assert_eq!(alloc(65_536.0, "kvbm-logical 1.6.1"), "5.00, **missed**");
        assert_eq!(alloc(8192.0, "kvbm-logical 1.6.1"), "–");
        assert_eq!(alloc(65_536.0, "one thread"), "–");
        let decode = |limit| verdict_of("attend, decode, GQA 4, f32", limit, 1.0, 0.7);
        assert_eq!(
            (decode("streaming read"), decode("the same in f32")),
            ("0.70, reached".into(), "–".into())
        );
        assert_eq!(verdict_of("TTFT, all chunks hit; 5", "full prefill", 1.0, 9.0), "10.00, **missed**");
        assert_eq!(verdict_of("TTFT, cold, chunks stored; 5", "full prefill", 1.0, 9.0), "–");
    }

    #[test]
    fn a_test_double_has_no_aim() {
        let row = row_of("cuda: scatter bf16", "cuMemcpyDtoD", 1.0, 0.95);
        assert_eq!(verdict(&row), "0.90, reached");
        assert_eq!(verdict(&BenchRow { ratio: 0.1, ..row.clone() }), "0.90, **missed**");
        assert_eq!(verdict(&BenchRow { double: true, ..row }), "–");
        assert_eq!(
            verdict_of("cuda: attend, decode, GQA 8, int8:32", "cuMemcpyDtoD of half", 1.0, 0.8),
            "0.80, reached"
        );
    }

    #[test]
    fn every_aim_of_a_card_is_of_a_row_that_the_benchmark_prints() {
        let source = concat!(
            include_str!("../benches/kernels_on_cuda/attention.rs"),
            include_str!("../benches/kernels_on_cuda/card.rs"),
            include_str!("../benches/kernels_on_cuda/pool.rs"),
        );
        for aim in &ON_A_CARD {
            let what = aim.what.strip_prefix("cuda: ").unwrap_or_default();
            assert!(source.contains(&format!("\"{what}")), "no row is {:?}", aim.what);
            assert!(source.contains(&format!("\"{}\"", aim.limit)), "no limit is {:?}", aim.limit);
        }
    }

    #[test]
    fn every_aim_is_of_a_row_of_the_committed_table() {
        let page = include_str!("../../../docs/benchmarks.md");
        for aim in &AIMS {
            let row = page.lines().filter_map(|line| line.strip_prefix("| ")).find(|line| {
                let columns: Vec<&str> = line.split(" | ").collect();
                line.starts_with(aim.what) && columns.get(4).is_some_and(|limit| limit.starts_with(aim.limit))
            });
            assert!(row.is_some(), "no row is {:?} against {:?}", aim.what, aim.limit);
        }
    }
}
