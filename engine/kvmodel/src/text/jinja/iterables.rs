//! Values that Python iterates over but does not store: the views of dictionaries, and generators.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use super::budget::{Budget, MAX_LEVELS, too_deep};
use super::dict::Dict;
use super::fault::{Fault, FaultKind, Run};
use super::value::{Value, deepest};

/// The part of a dictionary that a view shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    Keys,
    Values,
    Items,
}

/// A view of a dictionary: the result of its methods `keys`, `values` and `items`.
#[derive(Debug)]
pub(super) struct View {
    pub(super) shown: Shown,
    pub(super) dict: Rc<Dict>,
}

/// The result of a filter that gives its elements one after another, and each of them once.
#[derive(Debug)]
pub(super) struct Stream {
    left: RefCell<VecDeque<Value>>,
    /// The failure behind the last element. Python's generators fail when their elements are asked for.
    failure: RefCell<Option<Fault>>,
    /// The number of levels of containers.
    pub(super) levels: usize,
}

impl View {
    /// Returns the name of the type.
    pub(super) fn kind(&self) -> &'static str {
        match self.shown {
            Shown::Keys => "dict_keys",
            Shown::Values => "dict_values",
            Shown::Items => "dict_items",
        }
    }

    /// Returns the elements, and takes the memory of pairs.
    pub(super) fn items(&self, budget: &Budget) -> Run<Vec<Value>> {
        let entries = self.dict.entries.iter();
        match self.shown {
            Shown::Keys => Ok(entries.map(|(key, _)| key.clone()).collect()),
            Shown::Values => Ok(entries.map(|(_, value)| value.clone()).collect()),
            Shown::Items => {
                entries.map(|(key, value)| Value::tuple(budget, vec![key.clone(), value.clone()])).collect()
            }
        }
    }

    /// Returns true if the view shows an element.
    pub(super) fn contains(&self, item: &Value, budget: &Budget) -> Run<bool> {
        match (self.shown, item) {
            (Shown::Keys, key) => Ok(self.dict.get(key, budget)?.is_some()),
            (Shown::Values, value) => {
                for (_, known) in &self.dict.entries {
                    if known.equals(value, budget)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            (Shown::Items, Value::Tuple(pair)) => match &*pair.items {
                [key, value] => match self.dict.get(key, budget)? {
                    Some(known) => known.equals(value, budget),
                    None => Ok(false),
                },
                _ => Ok(false),
            },
            (Shown::Items, _) => Ok(false),
        }
    }

    /// Returns true if two views show the same elements. Views of values are equal only if they are one.
    pub(super) fn equals(&self, other: &Self, budget: &Budget) -> Run<bool> {
        let alike = self.shown == other.shown && self.shown != Shown::Values;
        if !alike || self.dict.entries.len() != other.dict.entries.len() {
            return Ok(std::ptr::eq(self, other));
        }
        for item in self.items(budget)? {
            if !other.contains(&item, budget)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Stream {
    /// Creates a stream of these elements, and takes its memory.
    pub(super) fn value(budget: &Budget, items: Vec<Value>) -> Run<Value> {
        Self::with_failure(budget, items, None)
    }

    /// Creates a stream of the elements that `part` adds to a list. If it fails, so does the stream behind these
    /// elements. A template that exceeds its budget fails at once.
    pub(super) fn of(budget: &Budget, part: impl FnOnce(&mut Vec<Value>) -> Run<()>) -> Run<Value> {
        let mut items = Vec::new();
        match part(&mut items) {
            Ok(()) => Self::value(budget, items),
            Err(fault) if fault.kind == FaultKind::Failed => Self::with_failure(budget, items, Some(fault)),
            Err(fault) => Err(fault),
        }
    }

    fn with_failure(budget: &Budget, items: Vec<Value>, failure: Option<Fault>) -> Run<Value> {
        budget.memory(items.len().saturating_mul(size_of::<Value>()).saturating_add(64))?;
        let levels = 1 + deepest(&items);
        if levels > MAX_LEVELS {
            return Err(too_deep());
        }
        Ok(Value::Stream(Rc::new(Self {
            left: RefCell::new(items.into()),
            failure: RefCell::new(failure),
            levels,
        })))
    }

    /// Takes the next element.
    pub(super) fn next(&self) -> Run<Option<Value>> {
        let next = self.left.borrow_mut().pop_front();
        if next.is_none() {
            self.end()?;
        }
        Ok(next)
    }

    /// Takes all elements that are left.
    pub(super) fn rest(&self) -> Run<Vec<Value>> {
        let rest = std::mem::take(&mut *self.left.borrow_mut()).into();
        self.end().map(|()| rest)
    }

    /// Fails once, if the stream has a failure. A generator of Python that has failed is at its end.
    fn end(&self) -> Run<()> {
        self.failure.borrow_mut().take().map_or(Ok(()), Err)
    }

    /// Takes elements up to the first one that equals `item`, and returns true if there is one.
    pub(super) fn contains(&self, item: &Value, budget: &Budget) -> Run<bool> {
        while let Some(next) = self.next()? {
            if next.equals(item, budget)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
