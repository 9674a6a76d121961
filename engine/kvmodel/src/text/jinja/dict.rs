//! Dictionaries of templates.

use std::collections::HashMap;
use std::rc::Rc;

use super::budget::{Budget, MAX_LEVELS, too_deep};
use super::fault::Run;
use super::value::{Value, check_key};

/// A dictionary, in the order of insertion. Keys that are texts are found without a search, so that an object of JSON may
/// have many fields.
#[derive(Debug, Default)]
pub(super) struct Dict {
    pub(super) entries: Vec<(Value, Value)>,
    /// The places of the keys that are texts, in `entries`.
    texts: HashMap<Rc<str>, usize>,
    depth: usize,
}

impl Dict {
    /// Returns the number of levels of containers.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// Returns the value of a key.
    ///
    /// # Errors
    /// Fails if no dictionary can have the key.
    pub(super) fn get(&self, key: &Value, budget: &Budget) -> Run<Option<&Value>> {
        check_key(key)?;
        Ok(self.place(key, budget)?.map(|place| &self.entries[place].1))
    }

    /// Returns the value of a key that is a text.
    pub(super) fn field(&self, name: &str, budget: &Budget) -> Run<Option<&Value>> {
        budget.scanned(name)?;
        Ok(self.texts.get(name).map(|place| &self.entries[*place].1))
    }

    /// Sets the value of a key, and takes the memory.
    pub(super) fn insert(&mut self, budget: &Budget, key: Value, value: Value) -> Run<()> {
        check_key(&key)?;
        self.depth = self.depth.max(1 + key.depth().max(value.depth()));
        if self.depth > MAX_LEVELS {
            return Err(too_deep());
        }
        if let Some(place) = self.place(&key, budget)? {
            self.entries[place].1 = value;
            return Ok(());
        }
        budget.memory(2 * size_of::<Value>())?;
        if let Value::Text(text) | Value::Safe(text) = &key {
            budget.memory(2 * size_of::<(Rc<str>, usize)>())?;
            self.texts.insert(Rc::clone(text), self.entries.len());
        }
        self.entries.push((key, value));
        Ok(())
    }

    /// Returns the place of a key in the entries.
    fn place(&self, key: &Value, budget: &Budget) -> Run<Option<usize>> {
        budget.steps(1)?;
        if let Some(text) = key.as_text() {
            budget.scanned(text)?;
            return Ok(self.texts.get(text).copied());
        }
        for (place, (known, _)) in self.entries.iter().enumerate() {
            if known.equals(key, budget)? {
                return Ok(Some(place));
            }
        }
        Ok(None)
    }
}
