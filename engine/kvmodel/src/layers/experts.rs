//! Routed and shared experts of DeepSeek-V3.

use super::feed_forward::Gated;
use super::{Linear, Loader};
use crate::config::ExpertsConfig;
use crate::dense::{Activation, Dense, GateActivation};
use crate::error::Result;

#[derive(Debug)]
pub(super) struct Experts {
    router: Router,
    /// The projection that scores experts. It stays f32 in every weight format, because rounding could
    /// change which experts are chosen.
    gate: Linear,
    routed: Vec<Gated>,
    shared: Option<Gated>,
}

impl Experts {
    pub(super) fn load(loader: &mut Loader, config: ExpertsConfig, hidden: usize, at: &str) -> Result<Self> {
        let inner = config.intermediate_size;
        // Decision: docs/decisions/models.md#deepseeks-router-stays-f32
        let gate = loader.exact_linear(&format!("{at}.gate"), config.routed, hidden)?;
        let bias = loader.numbers(&format!("{at}.gate.e_score_correction_bias"), config.routed)?;
        let mut gated =
            |name: String, inner| Gated::load(loader, &name, hidden, inner, false, GateActivation::Silu);
        let routed =
            (0..config.routed).map(|i| gated(format!("{at}.experts.{i}"), inner)).collect::<Result<_>>()?;
        let shared = match config.shared {
            0 => None,
            n => Some(gated(format!("{at}.shared_experts"), n * inner)?),
        };
        Ok(Self { router: Router { config, bias }, gate, routed, shared })
    }

    /// Runs the shared experts over all rows, and each routed expert once, over the rows that it was chosen
    /// for. The experts are chosen on the host.
    pub(super) fn forward(&self, dense: &dyn Dense, x: &Activation) -> Result<Activation> {
        let mut logits = Vec::new();
        dense.read(&self.gate.forward(dense, x)?, &mut logits)?;
        let mut rows = vec![Vec::new(); self.routed.len()];
        let mut weights = vec![Vec::new(); self.routed.len()];
        for (row, logits) in logits.chunks_exact(self.routed.len()).enumerate() {
            for (expert, weight) in self.router.route(logits) {
                rows[expert].push(row as u32);
                weights[expert].push(weight);
            }
        }
        let mut sum = match &self.shared {
            Some(shared) => shared.forward(dense, x)?,
            None => dense.zeros_like(x)?,
        };
        for ((expert, rows), weights) in self.routed.iter().zip(rows).zip(weights) {
            if !rows.is_empty() {
                let rows = dense.index(rows)?;
                let y = expert.forward(dense, &dense.select(x, &rows)?)?;
                sum = dense.add_rows(&sum, &rows, weights, &y)?;
            }
        }
        Ok(sum)
    }
}

/// A router, which chooses each row's experts and their weights.
#[derive(Debug)]
struct Router {
    config: ExpertsConfig,
    /// The correction bias, which affects which experts are chosen, but not their weights.
    bias: Vec<f32>,
}

impl Router {
    /// Returns the experts chosen for a row, each with its weight. `logits` contains one logit per expert.
    fn route(&self, logits: &[f32]) -> Vec<(usize, f32)> {
        let c = &self.config;
        let scores: Vec<f32> = logits.iter().map(|&x| 1.0 / (1.0 + (-x).exp())).collect();
        let biased: Vec<f32> = scores.iter().zip(&self.bias).map(|(score, bias)| score + bias).collect();
        let size = c.routed / c.groups;
        // A group's score is the sum of its two best experts' biased scores.
        let of_group = |group: usize| -> f32 {
            let members = &biased[group * size..(group + 1) * size];
            best(0..size, members, 2).into_iter().map(|i| members[i]).sum()
        };
        let groups: Vec<f32> = (0..c.groups).map(of_group).collect();
        let chosen = best(0..c.groups, &groups, c.groups_per_token);
        let experts = chosen.into_iter().flat_map(|group| group * size..(group + 1) * size);
        let experts = best(experts, &biased, c.per_token);
        let sum: f32 = experts.iter().map(|&i| scores[i]).sum();
        let whole = if c.normalise { sum + 1e-20 } else { 1.0 };
        experts.into_iter().map(|i| (i, scores[i] / whole * c.scale as f32)).collect()
    }
}

/// Returns the `n` candidates with the largest values. If values are equal, earlier candidates are
/// preferred.
fn best(candidates: impl Iterator<Item = usize>, values: &[f32], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = candidates.collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    order.truncate(n);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: ExpertsConfig = ExpertsConfig {
        dense_layers: 0,
        routed: 6,
        per_token: 2,
        shared: 0,
        intermediate_size: 1,
        groups: 3,
        groups_per_token: 1,
        normalise: true,
        scale: 2.5,
    };

    fn route(config: ExpertsConfig, bias: [f32; 6], logits: [f32; 6]) -> Vec<(usize, f32)> {
        Router { config, bias: bias.to_vec() }.route(&logits)
    }

    #[test]
    fn the_group_is_chosen_by_its_two_best_and_limits_the_experts() {
        // The best single expert is 0; the best pair is 2 and 3.
        let logits = [3.0, -3.0, 1.0, 2.0, 0.0, 0.0];
        let chosen = route(CONFIG, [0.0; 6], logits);
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [3, 2]);
        assert!((chosen.iter().map(|c| c.1).sum::<f32>() - 2.5).abs() < 1e-6);
        let anywhere = route(ExpertsConfig { groups_per_token: 3, ..CONFIG }, [0.0; 6], logits);
        assert_eq!(anywhere.iter().map(|c| c.0).collect::<Vec<_>>(), [0, 3]);
    }

    #[test]
    fn the_correction_bias_chooses_and_does_not_weigh() {
        let config = ExpertsConfig { normalise: false, ..CONFIG };
        let chosen = route(config, [0.0, 0.0, 0.0, 0.0, 5.0, 5.0], [4.0, 4.0, 0.0, 0.0, 0.0, -1.0]);
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [4, 5]);
        assert!((chosen[0].1 - 0.5 * 2.5).abs() < 1e-6);
    }
}
