//! Shows progress on standard error if it is a terminal, and prints the answer to standard output as it
//! grows.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
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

/// An observer that shows the prefill as a bar and then prints the answer as its text becomes certain.
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
    /// text.
    pub(crate) fn finish(mut self) -> Result<String> {
        if let Some(failure) = self.failure {
            return Err(failure.into());
        }
        let rest = self.text.rest();
        if self.print {
            std::io::stdout().write_all(if self.begun { rest } else { rest.trim_start() }.as_bytes())?;
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
                    // A closed pipe ends the program when the answer is complete. Nothing is lost before
                    // that.
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
