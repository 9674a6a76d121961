//! The default reuse settings of a model, for callers who have not tuned any.

use kvchunk::{ComputeMode, Reuse, ReuseCell};
use kvmodel::ModelConfig;

/// The reuse settings to use unless the user chooses others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DefaultReuse {
    /// The settings.
    pub reuse: Reuse,
    /// The published model of the same size on which these settings were measured. `None` if there is no such
    /// model; the settings are then those that lost least on other models.
    pub measured_on: Option<&'static str>,
}

/// A published model whose answers behind decoys were measured, identified by its size.
struct MeasuredModel {
    name: &'static str,
    layers: usize,
    hidden_size: usize,
    vocab_size: usize,
    /// True if its answers with half of the tokens recomputed were measured, too.
    recomputed: bool,
}

/// The measured models. The measurements are in docs/quality.md.
const MEASURED: [MeasuredModel; 3] = [
    MeasuredModel {
        name: "SmolLM2-135M-Instruct",
        layers: 30,
        hidden_size: 576,
        vocab_size: 49_152,
        recomputed: true,
    },
    MeasuredModel {
        name: "Qwen2.5-Coder-0.5B-Instruct",
        layers: 24,
        hidden_size: 896,
        vocab_size: 151_936,
        recomputed: false,
    },
    MeasuredModel {
        name: "Qwen2.5-Coder-1.5B-Instruct",
        layers: 28,
        hidden_size: 1536,
        vocab_size: 151_936,
        recomputed: false,
    },
];

/// The number of decoys. With fewer, models lost answers; with more, they kept no more of them.
const DECOYS: u32 = 3;

impl DefaultReuse {
    /// Returns the default settings for a model. `decoys` is the number of decoys that the user has given, which
    /// are assumed to be of the same kind as the documents.
    ///
    /// With three decoys or more, documents are computed behind the first three, and nothing is recomputed.
    /// Otherwise, half of the document tokens are recomputed ([`Reuse::default`]).
    ///
    /// Decision: docs/decisions/chunks.md#without-three-decoys-of-the-users-own-tokens-are-recomputed
    pub fn of(config: &ModelConfig, decoys: usize) -> Self {
        let size = (config.num_layers(), config.hidden_size, config.vocab_size);
        let model = MEASURED.iter().find(|m| (m.layers, m.hidden_size, m.vocab_size) == size);
        let enough = decoys >= DECOYS as usize;
        let reuse = if enough {
            let mode = ComputeMode::Behind(DECOYS);
            Reuse::plain(ReuseCell { mode, ..ReuseCell::SEQUENTIAL_WITH_SYSTEM })
        } else {
            Reuse::default()
        };
        let measured = model.filter(|model| enough || model.recomputed);
        Self { reuse, measured_on: measured.map(|model| model.name) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_decoys_of_the_user_take_the_place_of_recomputation() {
        let behind = ReuseCell { mode: ComputeMode::Behind(3), ..ReuseCell::SEQUENTIAL_WITH_SYSTEM };
        let (small, large) = ("SmolLM2-135M-Instruct", "Qwen2.5-Coder-1.5B-Instruct");
        for (layers, hidden_size, vocab_size, without, with) in [
            (4, 256, 512, None, None),
            (30, 576, 49_152, Some(small), Some(small)),
            (28, 1536, 151_936, None, Some(large)),
        ] {
            let config = ModelConfig::benchmark(layers, 256).unwrap();
            let config = ModelConfig { hidden_size, vocab_size, ..config };
            for (decoys, reuse, measured_on) in [
                (0, Reuse::default(), without),
                (2, Reuse::default(), without),
                (3, Reuse::plain(behind), with),
                (9, Reuse::plain(behind), with),
            ] {
                assert_eq!(DefaultReuse::of(&config, decoys), DefaultReuse { reuse, measured_on });
            }
        }
    }
}
