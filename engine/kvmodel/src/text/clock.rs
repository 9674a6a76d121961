//! The current time for chat templates.

use std::sync::Arc;

use jiff::Zoned;
use jiff::fmt::strtime;

/// A clock: the local time of this machine, or a fixed time.
#[derive(Debug, Clone, Default)]
pub(super) struct TemplateClock(Option<Arc<Zoned>>);

impl TemplateClock {
    /// Creates a clock that always shows `time`.
    #[cfg(test)]
    pub(super) fn fixed(time: Zoned) -> Self {
        Self(Some(Arc::new(time)))
    }

    /// Formats the time as C's `strftime` does, in English.
    pub(super) fn strftime(&self, format: &str) -> Result<String, String> {
        let now = self.0.as_deref().map_or_else(Zoned::now, Zoned::clone);
        strtime::format(format, &now).map_err(|error| format!("strftime_now({format:?}): {error}"))
    }
}
