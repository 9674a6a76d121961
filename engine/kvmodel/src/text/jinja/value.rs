//! The values of templates: Python's, as far as templates see them.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::rc::Rc;

use super::arithmetic;
use super::budget::{Budget, MAX_LEVELS, too_deep};
use super::dict::Dict;
use super::fault::{Run, fail};
use super::iterables::{Shown, Stream, View};

/// A value. Cloning shares texts and containers.
#[derive(Debug, Clone)]
pub(super) enum Value {
    /// A missing variable or field, with the words of the error that most of its uses are.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Rc<str>),
    List(Rc<Items>),
    Tuple(Rc<Items>),
    Dict(Rc<Dict>),
    /// A text that is marked as safe in HTML, by the filters `safe` and `escape`.
    Safe(Rc<str>),
    /// Python's `range(start, stop, step)`, with its length.
    Range {
        start: i128,
        stop: i128,
        step: i128,
        len: usize,
    },
    /// A namespace, by its number in the evaluator.
    Namespace(usize),
    Loop(Rc<LoopState>),
    /// A view of a dictionary.
    View(Rc<View>),
    /// A generator of Python.
    Stream(Rc<Stream>),
    Function(Rc<Function>),
}

/// The elements of a list or a tuple.
#[derive(Debug, Default)]
pub(super) struct Items {
    pub(super) items: Vec<Value>,
    depth: usize,
}

/// The state of a `for` loop, which a template sees as `loop`.
#[derive(Debug)]
pub(super) struct LoopState {
    pub(super) items: Vec<Value>,
    /// The number of levels of containers.
    pub(super) levels: usize,
    /// The index of the current element.
    pub(super) index: Cell<usize>,
    /// The number of loops around this one that called it recursively.
    pub(super) depth: usize,
    /// The number of the loop's statement and of its scope, if the template may call the loop.
    pub(super) recursive: Option<(usize, usize)>,
    /// The arguments of the last call of `changed`.
    pub(super) seen: RefCell<Option<Vec<Value>>>,
}

/// A value that can be called.
#[derive(Debug)]
pub(super) enum Function {
    /// A global function.
    Global(&'static str),
    /// A method of a value.
    Method(Value, Rc<str>),
    /// A macro, with its name unless it is a `caller`, and its number in the evaluator.
    Macro(Option<Rc<str>>, usize),
    /// A cycler, with its values and its position.
    Cycler(Vec<Value>, Cell<usize>),
    /// A joiner, with its separator and whether it was called.
    Joiner(Value, Cell<bool>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}

impl From<bool> for Value {
    fn from(truth: bool) -> Self {
        Self::Bool(truth)
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::Int(number as i128)
    }
}

impl Value {
    /// Creates the value of a variable that is not defined.
    pub(super) fn undefined(name: &str) -> Self {
        Self::Undefined(format!("'{name}' is undefined").into())
    }

    /// Creates a text, and takes its memory.
    pub(super) fn text(budget: &Budget, text: impl Into<Rc<str>>) -> Run<Self> {
        let text: Rc<str> = text.into();
        budget.memory(text.len() + 32)?;
        Ok(Self::Text(text))
    }

    /// Creates a list, and takes its memory.
    pub(super) fn list(budget: &Budget, items: Vec<Self>) -> Run<Self> {
        Ok(Self::List(Rc::new(Items::new(budget, items)?)))
    }

    /// Creates a tuple, and takes its memory.
    pub(super) fn tuple(budget: &Budget, items: Vec<Self>) -> Run<Self> {
        Ok(Self::Tuple(Rc::new(Items::new(budget, items)?)))
    }

    /// Creates a list of texts, and takes its memory.
    pub(super) fn texts<'a>(budget: &Budget, texts: impl IntoIterator<Item = &'a str>) -> Run<Self> {
        let texts = texts.into_iter().map(|text| Self::text(budget, text)).collect::<Run<_>>()?;
        Self::list(budget, texts)
    }

    /// Creates a function, and takes its memory.
    pub(super) fn function(budget: &Budget, function: Function) -> Run<Self> {
        budget.memory(64)?;
        let function = Self::Function(Rc::new(function));
        if function.depth() > MAX_LEVELS { Err(too_deep()) } else { Ok(function) }
    }

    /// Creates a dictionary from pairs, and takes its memory. Of equal keys, the last one counts.
    pub(super) fn dict(budget: &Budget, pairs: impl IntoIterator<Item = (Self, Self)>) -> Run<Self> {
        let mut dict = Dict::default();
        for (key, value) in pairs {
            dict.insert(budget, key, value)?;
        }
        Ok(Self::Dict(Rc::new(dict)))
    }

    /// Returns the number of levels of containers.
    pub(super) fn depth(&self) -> usize {
        match self {
            Self::List(items) | Self::Tuple(items) => items.depth,
            Self::Dict(dict) => dict.depth(),
            Self::Loop(state) => state.levels,
            Self::View(view) => 1 + view.dict.depth(),
            Self::Stream(stream) => stream.levels,
            Self::Function(function) => match &**function {
                Function::Method(value, _) | Function::Joiner(value, _) => 1 + value.depth(),
                Function::Cycler(items, _) => 1 + deepest(items),
                Function::Global(_) | Function::Macro(..) => 0,
            },
            _ => 0,
        }
    }

    /// Returns Python's truth of the value.
    pub(super) fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(truth) => *truth,
            Self::Int(number) => *number != 0,
            Self::Float(number) => *number != 0.0,
            Self::Text(text) | Self::Safe(text) => !text.is_empty(),
            Self::List(items) | Self::Tuple(items) => !items.items.is_empty(),
            Self::Dict(dict) => !dict.entries.is_empty(),
            Self::Range { len, .. } => *len > 0,
            Self::Loop(state) => !state.items.is_empty(),
            Self::View(view) => !view.dict.entries.is_empty(),
            Self::Namespace(_) | Self::Function(_) | Self::Stream(_) => true,
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    /// Returns the name of the type, as in Python's errors.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Text(_) => "str",
            Self::Safe(_) => "Markup",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::Range { .. } => "range",
            Self::Namespace(_) => "Namespace",
            Self::Loop(_) => "LoopContext",
            Self::View(view) => view.kind(),
            Self::Stream(_) => "generator",
            Self::Function(_) => "function",
        }
    }

    /// Returns the text, if the value is one.
    pub(super) fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) | Self::Safe(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the whole number. Truth values are 0 and 1, as in Python.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Bool(truth) => Some((*truth).into()),
            Self::Int(number) => Some(*number),
            _ => None,
        }
    }

    /// Returns the number as a float.
    pub(super) fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(number) => Some(*number),
            other => other.as_int().map(|number| number as f64),
        }
    }

    /// Returns the length, if the value has one.
    pub(super) fn len(&self) -> Option<usize> {
        Some(match self {
            Self::Undefined(_) => 0,
            Self::Text(text) | Self::Safe(text) => text.chars().count(),
            Self::List(items) | Self::Tuple(items) => items.items.len(),
            Self::Dict(dict) => dict.entries.len(),
            Self::Range { len, .. } => *len,
            Self::Loop(state) => state.items.len(),
            Self::View(view) => view.dict.entries.len(),
            _ => return None,
        })
    }

    /// Returns the [length](Self::len), and takes the steps to count a text's characters.
    pub(super) fn counted_len(&self, budget: &Budget) -> Run<Option<usize>> {
        if let Some(text) = self.as_text() {
            budget.scanned(text)?;
        }
        Ok(self.len())
    }

    /// Returns true if the value can be iterated over.
    pub(super) fn is_iterable(&self) -> bool {
        // The characters of a text need not be counted for this.
        matches!(self, Self::Text(_) | Self::Safe(_) | Self::Stream(_)) || self.len().is_some()
    }

    /// Returns the elements that an iteration over the value visits, and takes their memory.
    pub(super) fn items(&self, budget: &Budget) -> Run<Vec<Self>> {
        if let Self::Stream(stream) = self {
            return stream.rest();
        }
        let Some(len) = self.counted_len(budget)? else {
            return fail(format!("'{}' object is not iterable", self.kind()));
        };
        budget.memory(len.saturating_mul(size_of::<Self>()))?;
        Ok(match self {
            Self::List(items) | Self::Tuple(items) => items.items.clone(),
            Self::Loop(state) => state.items.clone(),
            Self::View(view) => view.items(budget)?,
            Self::Dict(dict) => dict.entries.iter().map(|(key, _)| key.clone()).collect(),
            Self::Range { start, len, step, .. } => {
                (0..*len).map(|i| Self::Int(start + step * i as i128)).collect()
            }
            Self::Text(text) | Self::Safe(text) => {
                budget.memory(len.saturating_mul(32))?;
                text.chars().map(|c| Self::Text((&*c.encode_utf8(&mut [0; 4])).into())).collect()
            }
            _ => Vec::new(),
        })
    }

    /// Returns true if the values are equal in Python: numbers by their value, containers by their elements.
    pub(super) fn equals(&self, other: &Self, budget: &Budget) -> Run<bool> {
        budget.steps(1)?;
        let all = |a: &[Self], b: &[Self]| -> Run<bool> {
            if a.len() != b.len() {
                return Ok(false);
            }
            for (a, b) in a.iter().zip(b) {
                if !a.equals(b, budget)? {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        Ok(match (self, other) {
            (Self::Undefined(_), Self::Undefined(_)) | (Self::None, Self::None) => true,
            (Self::Text(a) | Self::Safe(a), Self::Text(b) | Self::Safe(b)) => {
                budget.steps(a.len() >> 10)?;
                a == b
            }
            (Self::List(a), Self::List(b)) | (Self::Tuple(a), Self::Tuple(b)) => all(&a.items, &b.items)?,
            (Self::Dict(a), Self::Dict(b)) => {
                if a.entries.len() != b.entries.len() {
                    return Ok(false);
                }
                for (key, value) in &a.entries {
                    match b.get(key, budget)? {
                        Some(found) if value.equals(found, budget)? => {}
                        _ => return Ok(false),
                    }
                }
                true
            }
            (Self::Range { .. }, Self::Range { .. }) => all(&self.items(budget)?, &other.items(budget)?)?,
            (Self::Namespace(a), Self::Namespace(b)) => a == b,
            (Self::Loop(a), Self::Loop(b)) => Rc::ptr_eq(a, b),
            (Self::View(a), Self::View(b)) => a.equals(b, budget)?,
            (Self::Stream(a), Self::Stream(b)) => Rc::ptr_eq(a, b),
            (Self::Function(a), Self::Function(b)) => match (&**a, &**b) {
                (Function::Global(a), Function::Global(b)) => a == b,
                (Function::Method(a, name), Function::Method(b, other)) => {
                    name == other && a.is_same(b, budget)?
                }
                _ => Rc::ptr_eq(a, b),
            },
            (a, b) => arithmetic::ordered(a, b) == Some(Ordering::Equal),
        })
    }

    /// Returns true if the values are the same object. Values without identity are compared.
    pub(super) fn is_same(&self, other: &Self, budget: &Budget) -> Run<bool> {
        match (self, other) {
            (Self::List(a), Self::List(b)) => Ok(Rc::ptr_eq(a, b)),
            (Self::Dict(a), Self::Dict(b)) => Ok(Rc::ptr_eq(a, b)),
            (Self::View(a), Self::View(b)) => Ok(Rc::ptr_eq(a, b)),
            (Self::Undefined(a), Self::Undefined(b)) => Ok(Rc::ptr_eq(a, b)),
            (a, b) if a.kind() != b.kind() => Ok(false),
            // Python creates a method's object at each use.
            (Self::Function(a), _) if matches!(**a, Function::Method(..)) => Ok(false),
            (Self::Text(a) | Self::Safe(a), Self::Text(b) | Self::Safe(b)) if Rc::ptr_eq(a, b) => Ok(true),
            (Self::Tuple(a), Self::Tuple(b)) if Rc::ptr_eq(a, b) => Ok(true),
            (a, b) if !a.equals(b, budget)? => Ok(false),
            // Python has one object for each of these values.
            (Self::Int(-5..=256), _) => Ok(true),
            (Self::Text(text), _) if text.chars().nth(1).is_none() && text.chars().all(|c| c <= 'ÿ') => {
                Ok(true)
            }
            (Self::Tuple(items), _) if items.items.is_empty() => Ok(true),
            // Python may have one object for equal values, or several.
            (
                Self::Text(_)
                | Self::Safe(_)
                | Self::Tuple(_)
                | Self::Range { .. }
                | Self::Int(_)
                | Self::Float(_),
                _,
            ) => {
                let kind = self.kind();
                fail(format!("'sameas' is not defined for equal values of the type '{kind}'; use '=='"))
            }
            _ => Ok(true),
        }
    }
}

/// Returns the largest number of levels of the items.
pub(super) fn deepest(items: &[Value]) -> usize {
    items.iter().map(Value::depth).max().unwrap_or(0)
}

impl Items {
    fn new(budget: &Budget, items: Vec<Value>) -> Run<Self> {
        budget.memory(items.len().saturating_mul(size_of::<Value>()).saturating_add(48))?;
        let depth = 1 + deepest(&items);
        if depth > MAX_LEVELS { Err(too_deep()) } else { Ok(Self { items, depth }) }
    }
}

/// Checks that a value can be a key, as Python's `hash` does.
pub(super) fn check_key(key: &Value) -> Run<()> {
    match key {
        Value::List(_) | Value::Dict(_) => fail(format!("unhashable type: '{}'", key.kind())),
        Value::View(view) if view.shown != Shown::Values => {
            fail(format!("unhashable type: '{}'", key.kind()))
        }
        Value::Tuple(items) => items.items.iter().try_for_each(check_key),
        _ => Ok(()),
    }
}
