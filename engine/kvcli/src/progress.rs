//! Shows progress on standard error, and prints the answer to standard output as it grows.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvengine::{FinishReason, Generation};
use kvmodel::{Observer, TextCodec, TextStream};

use crate::error::Result;

/// Returns a progress bar, visible only on a terminal and only if `show` is true.
pub(crate) fn bar(what: &'static str, unit: &str, show: bool) -> ProgressBar {
    let show = show && std::io::stderr().is_terminal();
    let target = if show { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(&format!("{{msg:>8}} {{bar:30}} {unit} {{elapsed}}"))
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(None, target).with_style(style).with_message(what)
}

/// Returns a function that sets a bar's position and length, from the number of items done and the total.
pub(crate) fn counting(bar: &ProgressBar) -> impl FnMut(usize, usize) {
    |done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    }
}

/// Shows how many answers an evaluation has: as a bar on a terminal, otherwise as one line per minute.
pub(crate) struct AnswerProgress {
    bar: ProgressBar,
    begun: Instant,
    lines: Option<MinuteLines>,
}

impl AnswerProgress {
    /// Creates a progress display that starts with no answers. Nothing is shown if `show` is false.
    pub(crate) fn new(show: bool) -> Self {
        let lines = show && !std::io::stderr().is_terminal();
        Self {
            bar: bar("answers", "{pos}/{len} {eta}", show),
            begun: Instant::now(),
            lines: lines.then(MinuteLines::default),
        }
    }

    /// Shows that there are `done` answers out of `total`.
    pub(crate) fn count(&mut self, done: usize, total: usize) {
        counting(&self.bar)(done, total);
        let elapsed = self.begun.elapsed();
        if let Some(line) = self.lines.as_mut().and_then(|lines| lines.line(done, total, elapsed)) {
            note!("{line}");
        }
    }

    /// Removes the bar.
    pub(crate) fn finish(self) {
        self.bar.finish_and_clear();
    }
}

/// Progress lines for an output that is not a terminal, at most one per minute.
#[derive(Default)]
struct MinuteLines {
    /// The number of answers that were known at the start.
    known: Option<usize>,
    /// The time of the last line.
    last: Duration,
}

impl MinuteLines {
    /// Returns a line if a minute has passed since the last line. Must be called after each answer.
    fn line(&mut self, done: usize, total: usize, elapsed: Duration) -> Option<String> {
        let known = *self.known.get_or_insert(done.saturating_sub(1));
        if elapsed < self.last + Duration::from_secs(60) {
            return None;
        }
        self.last = elapsed;
        let left = elapsed.mul_f64(total.saturating_sub(done) as f64 / (done - known).max(1) as f64);
        let minutes = |time: Duration| (time.as_secs_f64() / 60.0).round();
        Some(format!(
            "{done} of {total} answers after {} min, about {} min left",
            minutes(elapsed),
            minutes(left)
        ))
    }
}

/// An observer that shows the prefill as a bar and then prints the answer as its text becomes final.
pub(crate) struct LiveAnswer<'a> {
    text: TextStream<'a>,
    prefill: ProgressBar,
    print: bool,
    /// True once something has been printed. White space before that is skipped.
    begun: bool,
    failure: Option<kvmodel::Error>,
}

impl<'a> LiveAnswer<'a> {
    /// Creates an observer that ends the answer at any string in `stop`. If `print` is true, it prints the
    /// text to standard output; otherwise it only shows the bar.
    pub(crate) fn new(codec: &'a TextCodec, stop: &[String], print: bool) -> Result<Self> {
        Ok(Self {
            text: TextStream::new(codec, stop.iter().cloned())?,
            prefill: bar("prefill", "{pos}/{len} layers", true),
            print,
            begun: false,
            failure: None,
        })
    }
}

impl LiveAnswer<'_> {
    /// Prints the text that was held back, such as bytes that never became a character, and returns the whole
    /// text. If the text that was held back contains a stop string, sets the generation's reason accordingly.
    pub(crate) fn finish(mut self, generation: &mut Generation) -> Result<String> {
        if let Some(failure) = self.failure {
            return Err(failure.into());
        }
        let rest = self.text.rest()?;
        if self.print {
            std::io::stdout().write_all(if self.begun { rest } else { rest.trim_start() }.as_bytes())?;
        }
        if self.text.is_stopped() {
            generation.finish = FinishReason::StopString;
        }
        Ok(self.text.finish()?)
    }
}

impl Observer for LiveAnswer<'_> {
    fn layer(&mut self, done: usize, total: usize) -> ControlFlow<()> {
        counting(&self.prefill)(done, total);
        if done == total {
            self.prefill.finish_and_clear();
        }
        ControlFlow::Continue(())
    }

    fn token(&mut self, token: u32) -> ControlFlow<()> {
        match self.text.push(token) {
            Ok(fresh) if self.print => {
                let shown = if self.begun { fresh } else { fresh.trim_start() };
                if !shown.is_empty() {
                    self.begun = true;
                    let mut out = std::io::stdout();
                    // If the pipe is closed, the program ends once the answer is complete. Until then,
                    // nothing is lost.
                    let _ = out.write_all(shown.as_bytes()).and_then(|()| out.flush());
                }
            }
            Ok(_) => (),
            Err(error) => {
                self.failure.get_or_insert(error);
            }
        }
        ControlFlow::Continue(())
    }

    fn is_complete(&self) -> bool {
        self.text.is_stopped()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_a_minute_estimates_the_rest_from_new_answers_alone() {
        let mut lines = MinuteLines::default();
        let mut at = |done, seconds| lines.line(done, 500, Duration::from_secs(seconds));
        assert_eq!((at(101, 1), at(102, 59)), (None, None));
        let line = at(200, 120).unwrap();
        assert_eq!(line, "200 of 500 answers after 2 min, about 6 min left");
        assert_eq!(at(201, 179), None);
        assert_eq!(at(500, 480).unwrap(), "500 of 500 answers after 8 min, about 0 min left");
    }
}
