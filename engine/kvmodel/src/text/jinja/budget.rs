//! What a template may use: steps, memory and nesting. A template comes from a model's file, and may be
//! written by anyone.

use std::cell::Cell;

use super::fault::{Fault, Run};

/// The maximum size of a template's source, in bytes. Published templates have up to 40 KiB.
pub(super) const MAX_SOURCE: usize = 128 << 10;
/// The stack of the thread that parses and evaluates a template, in bytes. It is reserved, not used: a source
/// of [`MAX_SOURCE`] bytes can nest as deeply as it has bytes.
pub(super) const STACK: usize = 512 << 20;
/// The maximum number of steps. A published template takes a few hundred per message.
const STEPS: u64 = 20_000_000;
/// The memory, in bytes, for texts and lists that do not depend on the size of the conversation.
const MEMORY: u64 = 256 << 20;
/// The memory, in bytes, per byte of the conversation.
const PER_BYTE: u64 = 64;
/// The maximum nesting of expressions, statements and macro calls.
const MAX_DEPTH: usize = 2000;
/// The maximum nesting of lists and dictionaries.
pub(super) const MAX_LEVELS: usize = 200;

/// The steps and the memory that are left.
#[derive(Debug)]
pub(super) struct Budget {
    steps: Cell<u64>,
    memory: Cell<u64>,
    all: u64,
    depth: Cell<usize>,
}

impl Budget {
    /// Returns the budget for a conversation of `input` bytes.
    pub(super) fn new(input: usize) -> Self {
        let all = MEMORY.saturating_add(PER_BYTE.saturating_mul(input as u64));
        Self { steps: Cell::new(STEPS), memory: Cell::new(all), all, depth: Cell::new(0) }
    }

    /// Takes the steps to read every character of a text.
    pub(super) fn scanned(&self, text: &str) -> Run<()> {
        self.steps(text.len() >> 6)
    }

    /// Takes the steps to compare a name with `count` others.
    pub(super) fn compared(&self, name: &str, count: usize) -> Run<()> {
        self.steps(count.saturating_mul(1 + (name.len() >> 6)) >> 4)
    }

    /// Takes `count` steps.
    pub(super) fn steps(&self, count: usize) -> Run<()> {
        match self.steps.get().checked_sub(count as u64) {
            Some(left) => {
                self.steps.set(left);
                Ok(())
            }
            None => Err(Fault::limit(format!(
                "it takes more than {STEPS} steps; use another template, or shorten the messages, tools and documents"
            ))),
        }
    }

    /// Takes memory for `bytes` bytes, before they are allocated. Memory is not given back: the budget bounds
    /// the sum of all texts and lists that a template makes.
    pub(super) fn memory(&self, bytes: usize) -> Run<()> {
        match self.memory.get().checked_sub(bytes as u64) {
            Some(left) => {
                self.memory.set(left);
                self.steps(bytes >> 10)
            }
            None => Err(Fault::limit(format!(
                "it makes texts and lists of more than {} MiB; use another template, or shorten the messages, tools and \
                 documents",
                self.all >> 20
            ))),
        }
    }

    /// Enters a level of nesting. The caller leaves it with [`leave`](Self::leave).
    pub(super) fn enter(&self) -> Run<()> {
        if self.depth.get() >= MAX_DEPTH {
            return Err(Fault::limit(format!(
                "its calls and expressions are nested more than {MAX_DEPTH} levels deep"
            )));
        }
        self.depth.set(self.depth.get() + 1);
        Ok(())
    }

    /// Leaves a level of nesting.
    pub(super) fn leave(&self) {
        self.depth.set(self.depth.get() - 1);
    }
}

/// Returns the failure of a template whose lists and dictionaries are nested too deeply.
pub(super) fn too_deep() -> Fault {
    Fault::limit(format!("its lists and dictionaries are nested more than {MAX_LEVELS} levels deep"))
}
