//! Numbers by `prompt_cache_key`: a client's own label for its requests, such as one of its users or one of its features.
//!
//! Clients choose labels, so their number and their length are bounded, and those of one tenant take no place from others.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvchunk::metrics::{Exposition, MetricKind};
use kvengine::Generation;
use parking_lot::Mutex;

/// The number of labels of a tenant that have numbers of their own.
const MOST: usize = 64;

/// The number of bytes of a label that has numbers of its own.
const LONGEST: usize = 64;

/// The label of all requests whose labels have no numbers of their own.
const OTHER: &str = "other";

/// The requests of each tenant with a label.
#[derive(Debug, Default)]
pub(crate) struct LabelMetrics(Mutex<BTreeMap<Tenant, BTreeMap<Arc<str>, Counts>>>);

/// The tenant, or `None` without keys.
type Tenant = Option<Arc<str>>;

/// The numbers of requests with a label.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    requests: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
}

impl LabelMetrics {
    /// Counts a request whose first sample has ended.
    pub(crate) fn count(&self, tenant: Option<&Arc<str>>, label: &Arc<str>, generation: &Generation) {
        self.add(
            tenant,
            label,
            Counts {
                requests: 1,
                prompt_tokens: generation.prompt_tokens as u64,
                cached_tokens: generation.cached_tokens as u64,
            },
        );
    }

    fn add(&self, tenant: Option<&Arc<str>>, label: &Arc<str>, more: Counts) {
        let mut all = self.0.lock();
        let own = all.entry(tenant.cloned()).or_default();
        let is_kept = own.contains_key(label) || own.len() < MOST && label.len() <= LONGEST;
        let label = if is_kept { Arc::clone(label) } else { OTHER.into() };
        let counts = own.entry(label).or_default();
        counts.requests += more.requests;
        counts.prompt_tokens += more.prompt_tokens;
        counts.cached_tokens += more.cached_tokens;
    }

    /// Adds the numbers to the text for Prometheus.
    pub(crate) fn describe(&self, text: &mut Exposition) {
        type Column = (&'static str, &'static str, fn(&Counts) -> u64);
        let columns: [Column; 3] = [
            ("kvserve:label_requests", "Requests, by the prompt_cache_key of clients", |counts| {
                counts.requests
            }),
            ("kvserve:label_prompt_tokens", "Prompt tokens, by the prompt_cache_key of clients", |counts| {
                counts.prompt_tokens
            }),
            (
                "kvserve:label_prompt_tokens_cached",
                "Prompt tokens that were found in the caches, by the prompt_cache_key of clients",
                |counts| counts.cached_tokens,
            ),
        ];
        let all = self.0.lock();
        for (name, help, value) in columns.into_iter().filter(|_| !all.is_empty()) {
            let family = text.family(name, MetricKind::Counter, help);
            for (tenant, labels) in &*all {
                for (label, counts) in labels {
                    let labels = [("label", &**label), ("tenant", tenant.as_deref().unwrap_or_default())];
                    let labels = if tenant.is_some() { &labels[..] } else { &labels[..1] };
                    family.sample(labels, value(counts) as f64);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(labels: &LabelMetrics) -> String {
        let mut text = Exposition::default();
        labels.describe(&mut text);
        text.to_string()
    }

    fn add(labels: &LabelMetrics, tenant: Option<&str>, label: &str) {
        let more = Counts { requests: 1, prompt_tokens: 10, cached_tokens: 4 };
        labels.add(tenant.map(Arc::from).as_ref(), &label.into(), more);
    }

    #[test]
    fn a_tenant_has_a_limited_number_of_labels_and_takes_none_from_others() {
        let labels = LabelMetrics::default();
        assert_eq!(text(&labels), "# EOF\n", "no family without labels");
        for turn in 0..2 {
            for i in 0..1000 {
                add(&labels, Some("alice"), &format!("{:08}", i * 7919 % 1000));
            }
            add(&labels, Some("bob"), &"x".repeat(LONGEST));
            add(&labels, Some("bob"), &"x".repeat(LONGEST + 1));
            let text = text(&labels);
            let of = |name: &str, tenant: &str| {
                let end = format!("tenant=\"{tenant}\"}}");
                text.lines().filter(|line| line.starts_with(name) && line.contains(&end)).count()
            };
            for name in ["label_requests", "label_prompt_tokens_total", "label_prompt_tokens_cached"] {
                let name = format!("kvserve:{name}");
                assert_eq!((of(&name, "alice"), of(&name, "bob")), (MOST + 1, 2), "{turn}: {text}");
            }
            assert_eq!(
                of(&format!("kvserve:label_requests_total{{label=\"{}\"", "x".repeat(LONGEST)), "bob"),
                1
            );
            assert_eq!(of("kvserve:label_requests_total{label=\"other\"", "bob"), 1, "one is too long");
            // Nothing is lost.
            let rest =
                format!("label=\"other\",tenant=\"alice\"}} {:.1}\n", f64::from((turn + 1) * (1000 - 64)));
            assert!(text.contains(&format!("kvserve:label_requests_total{{{rest}")), "{rest}: {text}");
        }
    }

    #[test]
    fn a_label_cannot_write_lines_of_its_own() {
        let labels = LabelMetrics::default();
        add(&labels, None, "a\"} 1\nkvserve:label_requests_total{label=\"b\\");
        let text = text(&labels);
        let requests: Vec<&str> =
            text.lines().filter(|line| line.starts_with("kvserve:label_requests_")).collect();
        let escaped =
            r#"kvserve:label_requests_total{label="a\"} 1\nkvserve:label_requests_total{label=\"b\\"} 1.0"#;
        assert_eq!(requests, [escaped]);
    }
}
