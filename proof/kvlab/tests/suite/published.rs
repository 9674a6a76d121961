//! The gate on a published model: its verdicts on the answers kept by `cargo xtask published --answers`.

use std::path::PathBuf;

use kvlab::{Gate, GateCheck, GateLimits, Verdict};
use serde::Deserialize;

use crate::common::trials;

const FULL: &str = "full attention";
const OLD_DEFAULT: &str = "overlapped, with-system, none";

/// The grades kept for answers about a number of documents.
#[derive(Deserialize)]
struct KeptGrades {
    questions: usize,
    ways: Vec<GradedWay>,
}

#[derive(Deserialize)]
struct GradedWay {
    name: String,
    /// One digit per answer: 1 if it is right, 0 if not.
    right: String,
}

fn kept(documents: usize) -> KeptGrades {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/published/smollm2-135m");
    let text = std::fs::read_to_string(folder.join(format!("firms-{documents}.json"))).unwrap();
    serde_json::from_str(&text).unwrap()
}

impl KeptGrades {
    fn rights(&self, way: &str) -> impl Iterator<Item = bool> {
        let way = self.ways.iter().find(|known| known.name == way).unwrap();
        // A strategy may have answered the first draws only.
        assert!((40..=self.questions).contains(&way.right.len()), "{} answers", way.right.len());
        way.right.chars().map(|right| right == '1')
    }

    fn judged(&self, way: &str, limits: &GateLimits) -> GateCheck {
        let pairs = self.rights(FULL).zip(self.rights(way));
        Gate::of_answers(&trials(pairs), limits)
    }
}

#[test]
fn plain_reuse_is_not_fit_for_a_published_model() {
    for documents in [2, 4] {
        let check = kept(documents).judged(OLD_DEFAULT, &GateLimits::default());
        assert_eq!(check.verdict, Verdict::Fails, "{documents} documents: {}", check.what);
        assert!(check.what.contains("points lost compared with full attention"), "{}", check.what);
    }
}

#[test]
fn answers_that_bound_the_loss_are_fit_and_others_report_how_many_more_would_tell() {
    let way = "sequential, with-system, question:0.5";
    let fit = kept(2).judged(way, &GateLimits::default());
    assert_eq!(fit.verdict, Verdict::Holds, "{}", fit.what);
    assert!(fit.measured <= 0.02, "{}", fit.what);
    // With four notes, full attention answers fewer questions correctly than the floor requires.
    let blind = kept(4).judged(way, &GateLimits::default());
    assert_eq!(blind.verdict, Verdict::CannotSay, "{}", blind.what);
    assert!(blind.what.contains("too few to judge a loss"), "{}", blind.what);
    let open = kept(4).judged(way, &GateLimits { floor: 0.2, ..GateLimits::default() });
    assert_eq!(open.verdict, Verdict::CannotSay, "{}", open.what);
    assert!(open.what.contains("more questions"), "{}", open.what);
}

#[test]
fn eight_documents_cannot_be_judged_since_full_attention_answers_too_little() {
    let check = kept(8).judged("sequential, with-system, question:0.5", &GateLimits::default());
    assert_eq!(check.verdict, Verdict::CannotSay, "{}", check.what);
    assert!(check.what.contains("too few to judge a loss"), "{}", check.what);
}
