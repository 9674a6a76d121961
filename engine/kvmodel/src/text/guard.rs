//! Calls the tokenizer library, which panics on some files, and turns its panics into errors.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use crate::error::{Error, Result};

thread_local! {
    /// True while this thread calls the library.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

// Decision: docs/decisions/models.md#panics-of-the-tokenizer-library-are-errors
/// Calls the library. A panic becomes an error, and is not printed.
///
/// # Errors
/// Returns [`Error::Tokenizer`] if the library returns an error or panics.
pub(super) fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let outer = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                outer(info);
            }
        }));
    });
    let before = GUARDED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    GUARDED.set(before);
    match result {
        Ok(result) => result.map_err(|error| Error::Tokenizer(error.to_string())),
        Err(panic) => {
            let words = panic.downcast_ref::<String>().map(String::as_str);
            let words = words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            Err(Error::Tokenizer(format!(
                "the tokenizer library failed ({words}); the file is damaged or contradicts itself: download it again"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_words() {
        let of = |result: Result<()>| result.unwrap_err().to_string();
        assert!(of(guarded(|| panic!("index {}", 5))).contains("failed (index 5)"));
        assert!(of(guarded(|| panic!("plain"))).contains("failed (plain)"));
        assert!(of(guarded(|| Err("refused".into()))).ends_with("tokenizer: refused"));
        assert_eq!(guarded(|| Ok(3)).unwrap(), 3);
        assert!(!GUARDED.get());
    }
}
