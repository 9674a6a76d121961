//! Progress on standard error if that is a terminal, and the growing answer on standard output.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvmodel::{Observer, TextCodec};

use crate::error::Result;

/// Returns a bar that is visible only on a terminal, and only if `show` is true.
pub(crate) fn bar(what: &'static str, unit: &str, show: bool) -> ProgressBar {
    let show = show && std::io::stderr().is_terminal();
    let target = if show { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let style = ProgressStyle::with_template(&format!("{{msg:>8}} {{bar:30}} {unit} {{elapsed}}"))
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(None, target).with_style(style).with_message(what)
}

/// Shows the prefill as a bar, and after it prints the text of the answer token by token.
pub(crate) struct Live<'a> {
    codec: &'a TextCodec,
    prefill: ProgressBar,
    stream: bool,
    tokens: Vec<u32>,
    printed: usize,
}

impl<'a> Live<'a> {
    /// Creates an observer. With `stream` it prints text to standard output; otherwise it shows only the bar.
    pub(crate) fn new(codec: &'a TextCodec, stream: bool) -> Self {
        Self {
            codec,
            prefill: bar("prefill", "{pos}/{len} layers", true),
            stream,
            tokens: Vec::new(),
            printed: 0,
        }
    }
}

impl Live<'_> {
    /// Prints the text that is still held back: bytes that never became a character.
    pub(crate) fn finish(self) -> Result<()> {
        let text = self.codec.decode(&self.tokens)?;
        if let Some(rest) = text.get(self.printed..) {
            std::io::stdout().write_all(rest.as_bytes())?;
        }
        Ok(())
    }
}

impl Observer for Live<'_> {
    fn layer(&mut self, done: usize, total: usize) -> ControlFlow<()> {
        self.prefill.set_length(total as u64);
        self.prefill.set_position(done as u64);
        if done == total {
            self.prefill.finish_and_clear();
        }
        ControlFlow::Continue(())
    }

    fn token(&mut self, token: u32) -> ControlFlow<()> {
        if !self.stream {
            return ControlFlow::Continue(());
        }
        self.tokens.push(token);
        // A character may need more than one token; an incomplete character decodes to a replacement
        // character.
        if let Ok(text) = self.codec.decode(&self.tokens)
            && !text.ends_with('\u{FFFD}')
            && let Some(fresh) = text.get(self.printed..)
        {
            let shown = if self.printed == 0 { fresh.trim_start() } else { fresh };
            let mut out = std::io::stdout();
            // A closed pipe ends the program when the answer is complete, and nothing is lost before that.
            let _ = out.write_all(shown.as_bytes()).and_then(|()| out.flush());
            self.printed = text.len();
        }
        ControlFlow::Continue(())
    }
}
