//! Arms: the strategies that an evaluation compares.

use std::str::FromStr;

use kvchunk::{ContextScaling, Recompute, Reuse, ReuseCell};
use kvengine::Request;
use kvmodel::TextCodec;
use serde::Serialize;

use super::{PromptStyle, Question};
use crate::error::{Error, Result};

/// One strategy for answering: a cell, a recompute strategy and a context scaling.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Arm {
    /// The compute mode and position strategy of reuse; `None` for ordinary full attention.
    pub cell: Option<ReuseCell>,
    /// The strategy that chooses which tokens to recompute.
    pub recompute: Recompute,
    /// The temperature and scale of the question's attention to documents.
    pub scaling: ContextScaling,
}

impl Arm {
    /// Creates the arm of ordinary full attention over the whole prompt. All other arms are compared with it.
    pub fn full_attention() -> Self {
        Self { cell: None, recompute: Recompute::None, scaling: ContextScaling::default() }
    }

    /// Creates an arm that reuses KV in a cell.
    pub fn reuse(cell: ReuseCell, recompute: Recompute) -> Self {
        Self { cell: Some(cell), recompute, scaling: ContextScaling::default() }
    }

    /// Returns the reuse settings, or `None` for ordinary full attention.
    pub fn reused(&self) -> Option<Reuse> {
        let (recompute, scaling) = (self.recompute, self.scaling);
        self.cell.map(|cell| Reuse { cell, recompute, scaling })
    }

    /// Returns the arm's name in tables.
    pub fn name(&self) -> String {
        let Some(cell) = self.cell else { return "full attention".to_owned() };
        let word = |value: serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let strategy = serde_json::to_value(cell.strategy).map(word).unwrap_or_default();
        let name = format!("{strategy}, {}, {}", cell.mode, self.recompute);
        if self.scaling.is_plain() {
            return name;
        }
        format!("{name}, T {} S {}", self.scaling.temperature, self.scaling.scale)
    }

    /// Creates the request for an answer to a chunked prompt.
    pub(super) fn request(
        &self,
        question: &Question,
        order: &[usize],
        codec: &TextCodec,
        style: &PromptStyle,
    ) -> Result<Request> {
        let mut request = Request::new(style.prompt(question, order, codec)?);
        // Full attention computes its whole prompt. Prefixes cached by other arms would make full attention
        // look faster.
        (request.full_attention, request.reuse) = (self.cell.is_none(), self.cell.is_some());
        Ok(match self.reused() {
            Some(way) => request.reusing(&way),
            None => request,
        })
    }
}

impl From<Reuse> for Arm {
    fn from(way: Reuse) -> Self {
        Self { cell: Some(way.cell), recompute: way.recompute, scaling: way.scaling }
    }
}

impl FromStr for Arm {
    type Err = Error;

    /// Parses an arm's name as it appears in tables: `full attention`, or positions, mode and strategy,
    /// optionally followed by the temperature and the scale of attention to documents.
    ///
    /// ```
    /// use kvlab::Arm;
    /// for name in ["full attention", "sequential, with-system, link:16", "overlapped, sink:4, none, T 0.9 S 0.8"] {
    ///     assert_eq!(name.parse::<Arm>()?.name(), name);
    /// }
    /// assert_eq!("sequential,alone,full".parse::<Arm>()?.name(), "sequential, alone, full");
    /// # Ok::<(), kvlab::Error>(())
    /// ```
    fn from_str(text: &str) -> Result<Self> {
        let bad = || Error::UnknownArm(text.to_owned());
        match text.split(',').map(str::trim).collect::<Vec<_>>()[..] {
            ["full attention" | "full"] => Ok(Self::full_attention()),
            [strategy, mode, recompute, scaling] => {
                let number = |text: &str, name| text.strip_prefix(name)?.trim().parse::<f32>().ok();
                let (temperature, scale) = scaling.split_once(" S").ok_or_else(bad)?;
                let temperature = number(temperature, "T").ok_or_else(bad)?;
                let scaling = ContextScaling { temperature, scale: number(scale, "").ok_or_else(bad)? };
                scaling.check()?;
                Ok(Self { scaling, ..[strategy, mode, recompute].join(",").parse()? })
            }
            [strategy, mode, recompute] => {
                let cell = ReuseCell {
                    strategy: serde_json::from_value(strategy.into()).map_err(|_| bad())?,
                    mode: mode.parse().map_err(|_| bad())?,
                };
                Ok(Self::reuse(cell, recompute.parse()?))
            }
            _ => Err(bad()),
        }
    }
}
