//! `kvc doctor --url`: what a running server's numbers say about the symptoms of docs/troubleshooting.md.

use std::collections::BTreeMap;
use std::io::Write;

use kvload::ServerUrl;
use serde::{Deserialize, Serialize};

use crate::args::DoctorArgs;
use crate::error::{Error, Result};
use crate::report::{json, table};

/// The number of lookups, and of answers, from which shares mean something.
const ENOUGH: u64 = 20;
/// The hit rate below which few documents are found.
const FEW: f64 = 0.5;
/// The share of a pool's blocks from which it is full.
const FULL: f64 = 0.95;
/// The share of lookups without room, or of preemptions per answer, from which memory is short.
const OFTEN: f64 = 0.05;

/// The fields of `/overview` that are needed.
#[derive(Debug, Default, Deserialize)]
struct Overview {
    way: String,
    waiting: u64,
    totals: Totals,
    documents: Lookups,
    pools: Vec<Pool>,
    recent: Vec<Recent>,
}

#[derive(Debug, Default, Deserialize)]
struct Totals {
    ended: u64,
}

#[derive(Debug, Default, Deserialize)]
struct Lookups {
    lookups: u64,
    hits: u64,
}

#[derive(Debug, Default, Deserialize)]
struct Pool {
    name: String,
    total: u64,
    mutable: u64,
    shared: u64,
}

#[derive(Debug, Default, Deserialize)]
struct Recent {
    ttft_ms: f64,
    queue_ms: f64,
    segments: Vec<Part>,
}

#[derive(Debug, Default, Deserialize)]
struct Part {
    kind: String,
    tokens: u64,
    found: u64,
    reason: Option<String>,
}

/// A symptom, the numbers that show it, and what helps.
#[derive(Debug, Serialize, PartialEq, Eq)]
struct Finding {
    symptom: &'static str,
    numbers: String,
    remedy: &'static str,
}

pub(super) fn examine(url: &ServerUrl, args: &DoctorArgs) -> Result<()> {
    let texts = kvload::get_all(url, args.api_key.as_deref(), &["/overview", "/metrics"])?;
    let [overview, metrics] = &texts[..] else { return Err(Error::NoOverview(url.clone())) };
    let overview: Overview = serde_json::from_str(overview).map_err(|_| Error::NoOverview(url.clone()))?;
    let findings = findings(&overview, metrics);
    let out = &mut std::io::stdout().lock();
    if args.json {
        return json(out, &findings);
    }
    if findings.is_empty() {
        writeln!(out, "Nothing unusual after {} answers.", overview.totals.ended)?;
        return Ok(());
    }
    let mut table = table(&["symptom", "numbers", "what helps"]);
    for Finding { symptom, numbers, remedy } in &findings {
        table.add_row([symptom, &**numbers, remedy]);
    }
    writeln!(out, "{table}\n\nFor more, see docs/troubleshooting.md.")?;
    Ok(())
}

fn findings(overview: &Overview, metrics: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    let Overview { way, waiting, totals, documents, pools, recent } = overview;
    if way.starts_with("full attention") {
        found.push(Finding {
            symptom: "documents are not reused",
            numbers: way.clone(),
            remedy: "start the server with --reuse FILE of kvc tune, or with --reuse-anyway",
        });
    } else if documents.lookups >= ENOUGH && share(documents.hits, documents.lookups) < FEW {
        let rate = 100.0 * share(documents.hits, documents.lookups);
        let reasons = reasons(recent);
        let (reason, tokens) =
            reasons.first().map_or(("unknown", 0), |(reason, tokens)| (&**reason, *tokens));
        found.push(Finding {
            symptom: "few documents are found",
            numbers: format!(
                "{rate:.0} % of {} lookups; of the last requests, most tokens were `{reason}` ({tokens})",
                documents.lookups
            ),
            remedy: remedy(reason),
        });
    }
    let uncached = metric(metrics, "kvchunk_uncached_total");
    if documents.lookups >= ENOUGH && share(uncached, documents.lookups) > OFTEN {
        found.push(Finding {
            symptom: "documents find no room",
            numbers: format!("{uncached} of {} lookups", documents.lookups),
            remedy: "a larger share of the memory for documents, more --kv-memory, --chunk-sleep or --disk",
        });
    }
    let preempted = metric(metrics, "vllm:num_preemptions_total");
    if totals.ended >= ENOUGH && share(preempted, totals.ended) > OFTEN {
        found.push(Finding {
            symptom: "requests are preempted",
            numbers: format!("{preempted} preemptions for {} answers", totals.ended),
            remedy: "fewer answers at once (--max-running), more --kv-memory, or a smaller --dtype",
        });
    }
    let sequences = pools.iter().find(|pool| pool.name == "sequences");
    let held = sequences.map_or(0.0, |pool| share(pool.mutable + pool.shared, pool.total));
    if *waiting > 0 && held > FULL {
        found.push(Finding {
            symptom: "requests wait for memory",
            numbers: format!("{waiting} wait, and {:.0} % of the blocks are in use", 100.0 * held),
            remedy: "more --kv-memory, a smaller --dtype, or shorter answers (--max-answer-tokens)",
        });
    }
    let queued = median(recent.iter().map(|request| request.queue_ms));
    let first = median(recent.iter().map(|request| request.ttft_ms));
    if recent.len() as u64 >= ENOUGH && queued > first / 2.0 && queued > 100.0 {
        found.push(Finding {
            symptom: "requests wait for others",
            numbers: format!("half of them {queued:.0} ms of {first:.0} ms to the first token"),
            remedy: "a faster machine or a second server; kvc bench serve shows what this one does",
        });
    }
    found
}

fn share(part: u64, of: u64) -> f64 {
    part as f64 / of.max(1) as f64
}

fn median(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut numbers: Vec<f64> = numbers.collect();
    numbers.sort_unstable_by(f64::total_cmp);
    numbers.get(numbers.len() / 2).copied().unwrap_or(0.0)
}

/// Returns why document tokens of the last requests were not found, with their number, the most frequent reason first.
fn reasons(recent: &[Recent]) -> Vec<(String, u64)> {
    let mut tokens = BTreeMap::<String, u64>::new();
    for part in recent.iter().flat_map(|request| &request.segments).filter(|part| part.kind == "document") {
        if let Some(reason) = &part.reason {
            *tokens.entry(reason.clone()).or_default() += part.tokens.saturating_sub(part.found);
        }
    }
    let mut all: Vec<_> = tokens.into_iter().collect();
    all.sort_by_key(|(_, tokens)| std::cmp::Reverse(*tokens));
    all
}

/// Returns what helps where documents are not found for a reason.
fn remedy(reason: &str) -> &'static str {
    match reason {
        "new" => "send the same bytes each time, without dates and numbers of pages; register documents",
        "other_context" => {
            "keep the system prompt constant, or use a mode without it, such as --chunks behind:3"
        }
        "evicted" => "more --kv-memory, --chunk-sleep, --disk, or registered documents with a system prompt",
        "slower" | "deadline" => "a faster disk; kvc doctor FOLDER shows how fast this one is",
        "damaged" | "failed" => "another disk: this one does not return what was written",
        _ => "see docs/troubleshooting.md",
    }
}

/// Returns the sum of a counter over its labels, or 0.
fn metric(text: &str, name: &str) -> u64 {
    let values = text.lines().filter_map(|line| {
        let (key, value) = line.rsplit_once(' ')?;
        let bare = key.split_once('{').map_or(key, |(bare, _)| bare);
        (bare == name).then(|| value.parse::<f64>().ok()).flatten()
    });
    values.sum::<f64>() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn overview() -> Overview {
        let part = |reason: Option<&str>, tokens| Part {
            kind: "document".to_owned(),
            tokens,
            found: 0,
            reason: reason.map(str::to_owned),
        };
        let recent = |reason| Recent {
            ttft_ms: 500.0,
            queue_ms: 400.0,
            segments: vec![part(Some(reason), 10), part(None, 900), part(Some("new"), 4)],
        };
        Overview {
            way: "documents are reused at any position".to_owned(),
            waiting: 3,
            totals: Totals { ended: 100 },
            documents: Lookups { lookups: 200, hits: 40 },
            pools: vec![Pool { name: "sequences".to_owned(), total: 100, mutable: 60, shared: 37 }],
            recent: (0..20).map(|_| recent("other_context")).collect(),
        }
    }

    const METRICS: &str =
        "# HELP x y\nkvchunk_uncached_total 30\nvllm:num_preemptions_total{model_name=\"a b\"} 12\n";

    #[test]
    fn each_symptom_is_found_with_its_numbers() {
        let found = findings(&overview(), METRICS);
        let symptoms: Vec<&str> = found.iter().map(|finding| finding.symptom).collect();
        let expected = [
            "few documents are found",
            "documents find no room",
            "requests are preempted",
            "requests wait for memory",
            "requests wait for others",
        ];
        assert_eq!(symptoms, expected);
        assert!(
            found[0].numbers.contains("20 % of 200") && found[0].numbers.contains("`other_context` (200)")
        );
        assert!(found[0].remedy.contains("system prompt"));
        assert!(found[3].numbers.contains("97 %"), "{found:?}");
    }

    #[test]
    fn a_healthy_or_a_young_server_has_no_symptoms() {
        let healthy = Overview {
            documents: Lookups { lookups: 200, hits: 150 },
            waiting: 0,
            recent: Vec::new(),
            ..overview()
        };
        assert_eq!(findings(&healthy, ""), []);
        let young = Overview {
            documents: Lookups { lookups: 19, hits: 0 },
            totals: Totals { ended: 19 },
            waiting: 0,
            recent: Vec::new(),
            ..overview()
        };
        assert_eq!(findings(&young, METRICS), []);
        let plain = Overview { way: "full attention: only …".to_owned(), ..young };
        assert_eq!(findings(&plain, "")[0].symptom, "documents are not reused");
    }
}
