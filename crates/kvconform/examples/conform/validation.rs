//! Messages of Vulkan's validation layers while the suite runs.
//!
//! A build with debug assertions asks for the layers, and `wgpu` passes their messages to the `log` crate.
//! One message is ignored: the debug information of a kernel names WGSL as its source language, by a number
//! that older layers do not know.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use log::{Level, LevelFilter, Log, Metadata, Record};

/// Log target to which `wgpu` sends messages of the layers.
const SOURCE: &str = "wgpu_hal::vulkan::instance";

/// Text of the ignored message.
const KNOWN: &str = "Invalid source language operand";

/// Messages to print; further ones are only counted.
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
        // The lines after a message list its objects, indented.
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

/// Prints a summary, and returns whether no message was reported.
pub(crate) fn silent() -> bool {
    let messages = LISTENER.messages.load(Relaxed);
    if !cfg!(debug_assertions) || LISTENER.missing.load(Relaxed) {
        println!("SKIPPED: validation layers (Debian: vulkan-validationlayers; in a debug build)");
    } else {
        let known = LISTENER.known.load(Relaxed);
        println!(
            "validation layers: {messages} messages, and {known} that they do not know WGSL as a source"
        );
    }
    messages == 0
}
