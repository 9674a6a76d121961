//! Messages from Vulkan's validation layers while the suite runs.
//!
//! `wgpu` requests the layers if `WGPU_VALIDATION` and `WGPU_DEBUG` are 1 (`cargo xtask conform` sets both)
//! or in a build with debug assertions, and passes their messages to the `log` crate. One message is ignored:
//! the debug information of a kernel names WGSL as its source language, a number that older layers do not
//! recognise.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use log::{Level, LevelFilter, Log, Metadata, Record};

/// The log target to which `wgpu` sends the layers' messages.
const SOURCE: &str = "wgpu_hal::vulkan::instance";

/// Text of the ignored message.
const KNOWN: &str = "Invalid source language operand";

/// The maximum number of messages to print. All further messages are only counted.
const SHOWN: usize = 10;

struct Listener {
    messages: AtomicUsize,
    known: AtomicUsize,
    missing: AtomicBool,
}

static LISTENER: Listener =
    Listener { messages: AtomicUsize::new(0), known: AtomicUsize::new(0), missing: AtomicBool::new(false) };

impl Log for Listener {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.target() == SOURCE && metadata.level() != Level::Trace
    }

    fn log(&self, record: &Record) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let text = record.args().to_string();
        if text.contains("unable to find layer") {
            self.missing.store(true, Relaxed);
        }
        // After a message come indented lines that list its objects.
        let message = record.level() <= Level::Warn && text.starts_with("VALIDATION");
        if message && text.contains(KNOWN) {
            self.known.fetch_add(1, Relaxed);
        } else if message && self.messages.fetch_add(1, Relaxed) < SHOWN {
            eprintln!("validation layers: {text}");
        }
    }

    fn flush(&self) {}
}

/// Starts counting messages.
pub(crate) fn listen() {
    if log::set_logger(&LISTENER).is_ok() {
        log::set_max_level(LevelFilter::Debug);
    }
}

/// Prints the number of messages, and returns whether there were none. In strict runs, missing layers are a
/// failure.
pub(crate) fn silent() -> bool {
    let asked =
        ["WGPU_VALIDATION", "WGPU_DEBUG"].iter().all(|name| std::env::var(name).is_ok_and(|on| on == "1"));
    if LISTENER.missing.load(Relaxed) || !(asked || cfg!(debug_assertions)) {
        let reason = "validation layers (Debian: vulkan-validationlayers; run by `cargo xtask conform`)";
        println!("{}: {reason}", if kvconform::is_strict() { "FAILED" } else { "SKIPPED" });
        return !kvconform::is_strict();
    }
    let (messages, known) = (LISTENER.messages.load(Relaxed), LISTENER.known.load(Relaxed));
    println!("validation layers: {messages} messages, and {known} that they do not know WGSL as a source");
    messages == 0
}
