//! The recompute strategies that this crate provides.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{
    AttentionCheck, ChunkSpan, DeviationCheck, DeviationOf, Evidence, Findings, RecomputeStrategy,
    TokenScores, TokenSelection,
};
use crate::error::{Error, Result};

/// One of this crate's strategies, parsed from the name that users write.
///
/// ```
/// use kvchunk::{DeviationOf, Recompute, RecomputeStrategy};
/// for text in ["none", "link:8", "blend:0.15@2:both", "question:0.2", "question:0.2@10", "joint:0.2@2:keys", "random:0.15@7", "full"] {
///     assert_eq!(text.parse::<Recompute>()?.name(), text);
/// }
/// let blend = Recompute::Blend { share: 0.15, layer: 1, of: DeviationOf::Values };
/// assert_eq!("blend:0.15".parse::<Recompute>()?, blend);
/// assert!("link".parse::<Recompute>().is_err());
/// # Ok::<(), kvchunk::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Recompute {
    /// Recomputes nothing: chunks are used as stored.
    #[default]
    None,
    /// Recomputes the first tokens of every chunk whose KV does not already match full attention.
    Link {
        /// The number of tokens to recompute per chunk.
        tokens: usize,
    },
    /// Recomputes the tokens whose KV deviates most.
    Blend {
        /// The fraction of all chunk tokens to recompute, from 0 (none) to 1 (all). The token count is
        /// rounded up.
        share: f64,
        /// The zero-based layer at which deviations are measured.
        layer: usize,
        /// The rows to compare at that layer.
        of: DeviationOf,
    },
    /// Recomputes the tokens to which the question attends most.
    Question {
        /// The fraction of all chunk tokens to recompute, from 0 (none) to 1 (all). The token count is
        /// rounded up.
        share: f64,
        /// The first layer (zero-based) whose attention counts. `None` leaves out the first third of the
        /// layers.
        from: Option<usize>,
    },
    // Decision: docs/decisions/chunks.md#a-joint-choice-combines-the-question-and-a-blend
    /// Recomputes the tokens with the largest product of two factors: the question's attention to the token
    /// after the first third of the layers, and the square root of the deviation of the token's KV.
    Joint {
        /// The fraction of all chunk tokens to recompute, from 0 (none) to 1 (all). The token count is
        /// rounded up.
        share: f64,
        /// The zero-based layer at which deviations are measured.
        layer: usize,
        /// The rows to compare at that layer.
        of: DeviationOf,
    },
    /// Recomputes as many tokens as [`Blend`](Self::Blend) with the same share, selected uniformly at random.
    /// This is a baseline.
    Random {
        /// The fraction of all chunk tokens to recompute. The token count is rounded up.
        share: f64,
        /// Random seed.
        seed: u64,
    },
    /// Recomputes all tokens: ordinary full attention at the cell's positions.
    Full,
}

impl RecomputeStrategy for Recompute {
    fn name(&self) -> String {
        self.to_string()
    }

    fn evidence(&self) -> Evidence {
        // With a fraction of 0 or 1 there is nothing to choose.
        let chooses = |share: f64| share > 0.0 && share < 1.0;
        let deviations = |layer, of| Some(DeviationCheck { layer, of });
        match *self {
            Self::Blend { share, layer, of } if chooses(share) => {
                Evidence { deviations: deviations(layer, of), ..Evidence::default() }
            }
            Self::Question { share, from } if chooses(share) => {
                Evidence { attention: Some(AttentionCheck { from }), ..Evidence::default() }
            }
            Self::Joint { share, layer, of } if chooses(share) => {
                Evidence { attention: Some(AttentionCheck::default()), deviations: deviations(layer, of) }
            }
            _ => Evidence::default(),
        }
    }

    fn select(&self, chunks: &[ChunkSpan], found: &Findings) -> TokenSelection {
        let every = |chunk: &ChunkSpan| (0..chunk.tokens as u32).collect();
        match *self {
            Self::None => TokenSelection::new(chunks.iter().map(|_| Vec::new())),
            Self::Full => TokenSelection::new(chunks.iter().map(every)),
            Self::Link { tokens } => TokenSelection::new(chunks.iter().map(|chunk| {
                let first = if chunk.is_full { 0 } else { tokens.min(chunk.tokens) };
                (0..first as u32).collect()
            })),
            Self::Blend { share, .. } => largest(chunks, share, score_of(found.deviations.as_ref())),
            Self::Question { share, .. } => largest(chunks, share, score_of(found.attention.as_ref())),
            Self::Joint { share, .. } => {
                let (attention, deviation) =
                    (score_of(found.attention.as_ref()), score_of(found.deviations.as_ref()));
                largest(chunks, share, |chunk, token| {
                    attention(chunk, token) * deviation(chunk, token).sqrt()
                })
            }
            Self::Random { share, seed } => largest(chunks, share, |chunk, token| {
                let mixed = mix(seed ^ mix((chunk as u64) << 32 | token as u64));
                (mixed >> 40) as f32
            }),
        }
    }
}

/// Returns a function that looks up a token's score by chunk and token index. A token without a score has the
/// score 0.
fn score_of(scores: Option<&TokenScores>) -> impl Fn(usize, usize) -> f32 {
    move |chunk, token| scores.map_or(0.0, |scores| scores.of(chunk, token))
}

/// Selects the fraction `share` of all tokens: the tokens with the highest scores, and the earlier token in
/// case of a tie. Tokens of chunks whose KV already matches full attention are selected last.
fn largest(chunks: &[ChunkSpan], share: f64, score: impl Fn(usize, usize) -> f32) -> TokenSelection {
    let all: usize = chunks.iter().map(|chunk| chunk.tokens).sum();
    // Rounding can make a product such as 0.15 × 20 slightly larger than 3, so a small number is subtracted
    // from it.
    let wanted = ((all as f64 * share - 1e-9).ceil().max(0.0) as usize).min(all);
    let tokens = chunks.iter().enumerate().flat_map(|(c, chunk)| (0..chunk.tokens).map(move |t| (c, t)));
    let mut scored: Vec<(bool, f32, usize, usize)> =
        tokens.map(|(c, t)| (chunks[c].is_full, score(c, t), c, t)).collect();
    scored.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)).then((a.2, a.3).cmp(&(b.2, b.3))));
    let mut selected = vec![Vec::new(); chunks.len()];
    for &(_, _, chunk, token) in &scored[..wanted] {
        selected[chunk].push(token as u32);
    }
    TokenSelection::new(selected)
}

/// Scrambles the bits of `x` with a bijection (the finaliser of SplitMix64, Steele et al., 2014).
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns the name of the rows to compare.
fn rows(of: DeviationOf) -> &'static str {
    match of {
        DeviationOf::Keys => "keys",
        DeviationOf::Values => "values",
        DeviationOf::Both => "both",
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Link { tokens } => write!(f, "link:{tokens}"),
            Self::Blend { share, layer, of } => write!(f, "blend:{share}@{layer}:{}", rows(*of)),
            Self::Joint { share, layer, of } => write!(f, "joint:{share}@{layer}:{}", rows(*of)),
            Self::Question { share, from: None } => write!(f, "question:{share}"),
            Self::Question { share, from: Some(layer) } => write!(f, "question:{share}@{layer}"),
            Self::Random { share, seed } => write!(f, "random:{share}@{seed}"),
            Self::Full => f.write_str("full"),
        }
    }
}

impl FromStr for Recompute {
    type Err = Error;

    /// Parses `none`, `link:K`, `blend:R[@LAYER][:keys|values|both]`, `question:R[@LAYER]`,
    /// `joint:R[@LAYER][:keys|values|both]`, `random:R[@SEED]` or `full`. The layer of `blend` and `joint`
    /// defaults to 1, their rows to `values` and the seed to 0. `question` counts attention starting at its
    /// layer, by default after the first third of the layers.
    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::UnknownStrategy(text.to_owned());
        let (name, rest) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
        let share = |text: &str| text.parse().ok().filter(|r| (0.0..=1.0).contains(r)).ok_or_else(bad);
        match (name, rest) {
            ("none", None) => Ok(Self::None),
            ("full", None) => Ok(Self::Full),
            ("link", Some(tokens)) => Ok(Self::Link { tokens: tokens.parse().map_err(|_| bad())? }),
            ("blend" | "joint", Some(rest)) => {
                let (rest, of) = rest.split_once(':').unwrap_or((rest, "values"));
                let (r, layer) = rest.split_once('@').unwrap_or((rest, "1"));
                let of = match of {
                    "keys" => DeviationOf::Keys,
                    "values" => DeviationOf::Values,
                    "both" => DeviationOf::Both,
                    _ => return Err(bad()),
                };
                let (share, layer) = (share(r)?, layer.parse().map_err(|_| bad())?);
                Ok(if name == "blend" {
                    Self::Blend { share, layer, of }
                } else {
                    Self::Joint { share, layer, of }
                })
            }
            ("question", Some(rest)) => {
                let (r, layer) = rest.split_once('@').map_or((rest, None), |(r, layer)| (r, Some(layer)));
                let from = layer.map(|layer| layer.parse().map_err(|_| bad())).transpose()?;
                Ok(Self::Question { share: share(r)?, from })
            }
            ("random", Some(rest)) => {
                let (r, seed) = rest.split_once('@').unwrap_or((rest, "0"));
                Ok(Self::Random { share: share(r)?, seed: seed.parse().map_err(|_| bad())? })
            }
            _ => Err(bad()),
        }
    }
}

impl TryFrom<String> for Recompute {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<Recompute> for String {
    fn from(strategy: Recompute) -> Self {
        strategy.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks() -> [ChunkSpan; 3] {
        let span = |tokens, is_full| ChunkSpan { tokens, logical_start: 0, position: 0, is_full };
        [span(4, true), span(6, false), span(10, false)]
    }

    fn select(text: &str, found: &Findings) -> Vec<Vec<u32>> {
        text.parse::<Recompute>().unwrap().select(&chunks(), found).chunks().to_vec()
    }

    fn nothing() -> Findings {
        Findings::default()
    }

    #[test]
    fn link_takes_the_first_of_every_chunk_that_has_not_seen_all() {
        assert_eq!(select("link:2", &nothing()), [vec![], vec![0, 1], vec![0, 1]]);
        let long = select("link:100", &nothing());
        assert_eq!(long.iter().map(Vec::len).collect::<Vec<_>>(), [0, 6, 10]);
        assert_eq!(select("link:0", &nothing()), select("none", &nothing()));
    }

    #[test]
    fn blend_takes_the_share_that_deviates_most() {
        let mut deviations = vec![vec![0.0; 4], vec![0.0; 6], vec![0.1; 10]];
        (deviations[1][4], deviations[2][9]) = (7.0, f32::INFINITY);
        let deviations = Findings { deviations: Some(TokenScores::new(deviations)), ..nothing() };
        assert_eq!(select("blend:0.15", &deviations), [vec![], vec![4], vec![0, 9]]);
        assert_eq!(select("blend:0.01", &deviations), [vec![], vec![], vec![9]], "rounded up");
        assert_eq!(select("blend:0", &deviations), select("none", &nothing()));
        assert_eq!(select("blend:1", &deviations), select("full", &nothing()));
        for (text, check) in [("blend:0", None), ("blend:1", None), ("blend:0.5@2", Some(2))] {
            let evidence = text.parse::<Recompute>().unwrap().evidence();
            assert_eq!(evidence.deviations.map(|check| check.layer), check);
            assert_eq!((evidence.attention, evidence.is_none()), (None, check.is_none()));
        }
    }

    #[test]
    fn question_takes_the_share_with_the_highest_scores() {
        let mut attention = vec![vec![9.0; 4], vec![0.0; 6], vec![0.1; 10]];
        attention[1][4] = 0.7;
        let scores = Findings { attention: Some(TokenScores::new(attention)), ..nothing() };
        // The first chunk already matches full attention.
        assert_eq!(select("question:0.1", &scores), [vec![], vec![4], vec![0]]);
        assert_eq!(select("question:1", &nothing()), select("full", &nothing()));
        let of = |text: &str| text.parse::<Recompute>().unwrap().evidence();
        assert!(of("question:0").is_none() && of("question:1").is_none());
        let first = |text: &str, layers| of(text).attention.unwrap().first_layer(layers);
        assert_eq!([1, 3, 30].map(|layers| first("question:0.1", layers)), [0, 1, 10]);
        assert_eq!(first("question:0.1@7", 30), 7);
    }

    #[test]
    fn joint_takes_deviating_tokens_that_the_question_attends_to() {
        let scores = |of: [(usize, usize, f32); 3]| {
            let mut scores = vec![vec![0.01; 4], vec![0.01; 6], vec![0.01; 10]];
            for (chunk, token, x) in of {
                scores[chunk][token] = x;
            }
            Some(TokenScores::new(scores))
        };
        let found = Findings {
            // One token gets attention and is right, one gets attention and is wrong, and one is wrong but
            // gets no attention.
            attention: scores([(1, 0, 9.0), (1, 4, 0.7), (2, 9, 0.0)]),
            deviations: scores([(1, 0, 0.0), (1, 4, 0.25), (2, 9, 8.0)]),
        };
        assert_eq!(select("joint:0.05", &found), [vec![], vec![4], vec![]]);
        assert_eq!(select("question:0.05", &found), [vec![], vec![0], vec![]]);
        assert_eq!(select("blend:0.05", &found), [vec![], vec![], vec![9]]);
        let evidence = "joint:0.05@3".parse::<Recompute>().unwrap().evidence();
        assert_eq!((evidence.deviations.unwrap().layer, evidence.deepest_start(30)), (3, Some(10)));
        assert_eq!("joint:1".parse::<Recompute>().unwrap().evidence().deepest_start(30), None);
    }

    #[test]
    fn random_takes_as_many_and_others_under_another_seed() {
        let count = |selected: &[Vec<u32>]| selected.iter().map(Vec::len).sum::<usize>();
        let (a, b) = (select("random:0.3@1", &nothing()), select("random:0.3@2", &nothing()));
        assert_eq!((count(&a), count(&b)), (6, 6));
        assert_ne!(a, b);
        assert_eq!(a, select("random:0.3@1", &nothing()));
    }

    /// Scores with ties, infinities and values that are not numbers leave nothing to chance either.
    #[test]
    fn equal_inputs_give_equal_choices() {
        let scores = |salt: u64| {
            let odd = [0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, 0.5, 0.5];
            let of = |chunk: usize, tokens: usize| {
                (0..tokens)
                    .map(|token| odd[mix(salt ^ (chunk * 64 + token) as u64) as usize % odd.len()])
                    .collect()
            };
            TokenScores::new(vec![of(0, 4), of(1, 6), of(2, 10)])
        };
        let names = [
            "none",
            "link:2",
            "blend:0.3",
            "blend:0.3@2:both",
            "question:0.3",
            "question:0.3@1",
            "joint:0.3",
            "random:0.3@7",
            "full",
        ];
        for salt in 0..50 {
            let found =
                move || Findings { attention: Some(scores(salt)), deviations: Some(scores(salt + 1000)) };
            for name in names {
                let strategy: Recompute = name.parse().unwrap();
                let first = strategy.select(&chunks(), &found());
                assert_eq!(strategy.select(&chunks(), &found()), first, "{name}, scores {salt}");
                // Other calls in between, another thread and another value of the same name change nothing.
                let (other, _) = (strategy.name(), strategy.select(&chunks()[1..], &Findings::default()));
                let again = std::thread::spawn(move || {
                    other.parse::<Recompute>().unwrap().select(&chunks(), &found())
                });
                assert_eq!(again.join().unwrap(), first, "{name}, scores {salt}");
                assert_eq!(strategy.evidence(), name.parse::<Recompute>().unwrap().evidence());
            }
        }
    }

    #[test]
    fn an_unknown_strategy_is_an_error_that_lists_all() {
        for text in [
            "",
            "link",
            "link:x",
            "link:-1",
            "blend:2",
            "blend:nan",
            "blend:0.5@x",
            "blend:0.5:q",
            "question:2",
            "joint:2",
            "question:0.1@x",
            "full:1",
        ] {
            let error = text.parse::<Recompute>().unwrap_err().to_string();
            assert!(error.contains("link:K"), "{error}");
        }
        let json = serde_json::to_string(&Recompute::Link { tokens: 8 }).unwrap();
        assert_eq!(json, r#""link:8""#);
        assert_eq!(serde_json::from_str::<Recompute>(&json).unwrap(), Recompute::Link { tokens: 8 });
    }
}
