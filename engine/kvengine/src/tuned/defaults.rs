//! The default reuse settings of a model, for callers who have not tuned any.

use kvchunk::{ComputeMode, Reuse, ReuseCell};
use kvmodel::ModelConfig;

/// The reuse settings to use unless the user chooses others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DefaultReuse {
    /// The settings.
    pub reuse: Reuse,
    /// The published model of the same size whose answers were measured. `None` if no such model was measured;
    /// the settings are then those that lost least on other models.
    pub measured_on: Option<&'static str>,
}

/// A published model, identified by its size, and the number of decoys behind which prompts with four
/// documents kept the answers of full attention.
struct MeasuredModel {
    name: &'static str,
    layers: usize,
    hidden_size: usize,
    vocab_size: usize,
    decoys: u32,
}

/// The measured models. The measurements are in docs/quality.md.
const MEASURED: [MeasuredModel; 3] = [
    MeasuredModel {
        name: "SmolLM2-135M-Instruct",
        layers: 30,
        hidden_size: 576,
        vocab_size: 49_152,
        decoys: 3,
    },
    MeasuredModel {
        name: "Qwen2.5-Coder-0.5B-Instruct",
        layers: 24,
        hidden_size: 896,
        vocab_size: 151_936,
        decoys: 3,
    },
    MeasuredModel {
        name: "Qwen2.5-Coder-1.5B-Instruct",
        layers: 28,
        hidden_size: 1536,
        vocab_size: 151_936,
        decoys: 3,
    },
];

/// The number of decoys for a model that was not measured. More decoys did not keep more answers of any
/// measured model.
const USUAL_DECOYS: u32 = 3;

impl DefaultReuse {
    /// Returns the default settings for a model. `decoys` is the number of decoys that the user has given, which
    /// are assumed to be of the same kind as the documents.
    ///
    /// With decoys, as many of them are used as the model needs, and nothing is recomputed. Without decoys, half
    /// of the document tokens are recomputed ([`Reuse::default`]).
    ///
    /// Decision: docs/decisions/chunks.md#the-default-without-decoys-of-the-users-own-is-recomputation
    pub fn of(config: &ModelConfig, decoys: usize) -> Self {
        let size = (config.num_layers(), config.hidden_size, config.vocab_size);
        let measured = MEASURED.iter().find(|m| (m.layers, m.hidden_size, m.vocab_size) == size);
        let needed = measured.map_or(USUAL_DECOYS, |model| model.decoys);
        let mode = ComputeMode::Behind(needed.min(u32::try_from(decoys).unwrap_or(u32::MAX)));
        let reuse = match decoys {
            0 => Reuse::default(),
            _ => Reuse::plain(ReuseCell { mode, ..ReuseCell::SEQUENTIAL_WITH_SYSTEM }),
        };
        Self { reuse, measured_on: measured.map(|model| model.name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoys_of_the_user_take_the_place_of_recomputation() {
        for (layers, hidden_size, vocab_size, name) in
            [(4, 256, 512, None), (28, 1536, 151_936, Some("Qwen2.5-Coder-1.5B-Instruct"))]
        {
            let config = ModelConfig::benchmark(layers, hidden_size).unwrap();
            let config = ModelConfig { hidden_size, vocab_size, ..config };
            let without = DefaultReuse::of(&config, 0);
            assert_eq!((without.reuse, without.measured_on), (Reuse::default(), name));
            for (given, used) in [(1, 1), (3, 3), (9, 3)] {
                let found = DefaultReuse::of(&config, given);
                let behind =
                    ReuseCell { mode: ComputeMode::Behind(used), ..ReuseCell::SEQUENTIAL_WITH_SYSTEM };
                assert_eq!((found.reuse, found.measured_on), (Reuse::plain(behind), name));
            }
        }
    }
}
