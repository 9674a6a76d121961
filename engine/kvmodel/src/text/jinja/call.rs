//! Attributes, items and calls of values.

use std::cell::Cell;
use std::rc::Rc;

use super::arguments::{Arguments, count, needed, text_of, whole_or};
use super::evaluate::Evaluator;
use super::fault::{Fault, Run, fail};
use super::iterables::{Shown, View};
use super::value::{Function, LoopState, Value, check_key};
use super::{operate, text_methods};

/// The global functions.
const GLOBALS: [&str; 7] =
    ["range", "dict", "namespace", "cycler", "joiner", "raise_exception", "strftime_now"];

const DICT_METHODS: [&str; 6] = ["get", "items", "keys", "values", "copy", "fromkeys"];
const LIST_METHODS: [&str; 3] = ["count", "index", "copy"];
const TUPLE_METHODS: [&str; 2] = ["count", "index"];
const LOOP_METHODS: [&str; 2] = ["cycle", "changed"];
const CYCLER_METHODS: [&str; 2] = ["next", "reset"];
/// Methods and attributes of Python that are not supported: no published chat template uses them.
const OTHER_TEXT_METHODS: [&str; 2] = ["encode", "isidentifier"];
const NUMBER_ATTRIBUTES: [&str; 13] = [
    "as_integer_ratio",
    "bit_count",
    "bit_length",
    "conjugate",
    "denominator",
    "from_bytes",
    "fromhex",
    "hex",
    "imag",
    "is_integer",
    "numerator",
    "real",
    "to_bytes",
];
/// Methods that change a value, which templates must not call.
const CHANGING: [&str; 13] = [
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
    "add",
    "discard",
];

/// Returns a global function.
pub(super) fn global(name: &str) -> Option<Value> {
    let name = GLOBALS.into_iter().find(|known| *known == name)?;
    Some(Value::Function(Rc::new(Function::Global(name))))
}

impl Evaluator<'_> {
    /// Returns `value.name`: a method or a field of the value, or else its item with this key.
    pub(super) fn attribute(&self, value: &Value, name: &str) -> Run<Value> {
        if let Some(found) = self.own_attribute(value, name)? {
            return Ok(found);
        }
        match value {
            Value::Undefined(words) => fail(&**words),
            Value::Dict(dict) => match dict.field(name, self.budget)? {
                Some(field) => Ok(field.clone()),
                None => Ok(lacking(value, &format!("attribute '{name}'"))),
            },
            other => Ok(lacking(other, &format!("attribute '{name}'"))),
        }
    }

    /// Returns `value[key]`: the item, or else, for a key that is a text, the attribute of this name.
    pub(super) fn item(&self, value: &Value, key: &Value) -> Run<Value> {
        let found = match (value, key) {
            (Value::Undefined(words), _) => return fail(&**words),
            (Value::Dict(_), key) if check_key(key).is_err() => None,
            (Value::Dict(dict), key) => dict.get(key, self.budget)?.cloned(),
            (value, key) => match key.as_int() {
                Some(index) => operate::element(self.budget, value, index)?,
                None => None,
            },
        };
        match (found, key) {
            (Some(found), _) => Ok(found),
            (None, Value::Text(name)) => match self.own_attribute(value, name)? {
                Some(found) => Ok(found),
                None => Ok(lacking(value, &format!("attribute '{name}'"))),
            },
            (None, key) => Ok(lacking(value, &format!("element {}", self.printer().repr(key)?))),
        }
    }

    /// Returns a method of the value, or a field of a loop or a namespace.
    pub(super) fn own_attribute(&self, value: &Value, name: &str) -> Run<Option<Value>> {
        let methods: &[&str] = match value {
            Value::Text(_) => &text_methods::METHODS,
            Value::Dict(_) => &DICT_METHODS,
            Value::List(_) => &LIST_METHODS,
            // The groups of the filter `groupby` are pairs with names.
            Value::Tuple(pair) if pair.items.len() == 2 && name == "grouper" => {
                return Ok(pair.items.first().cloned());
            }
            Value::Tuple(pair) if pair.items.len() == 2 && name == "list" => {
                return Ok(pair.items.last().cloned());
            }
            Value::Range { start, stop, step, .. } if ["start", "stop", "step"].contains(&name) => {
                return Ok(Some(Value::Int(match name {
                    "start" => *start,
                    "step" => *step,
                    _ => *stop,
                })));
            }
            Value::Safe(_) => return fail(operate::safe_use(&format!("the attribute '{name}'"))),
            Value::Tuple(_) | Value::Range { .. } => &TUPLE_METHODS,
            Value::Loop(state) => {
                if let Some(field) = loop_field(state, name) {
                    return Ok(Some(field));
                }
                &LOOP_METHODS
            }
            Value::Namespace(number) => {
                let fields = self.namespaces.get(*number).map(Vec::as_slice).unwrap_or_default();
                self.budget.compared(name, fields.len())?;
                return Ok(fields.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone()));
            }
            Value::Function(function) => match &**function {
                Function::Cycler(items, at) if name == "current" => return Ok(items.get(at.get()).cloned()),
                Function::Cycler(..) => &CYCLER_METHODS,
                Function::Global("dict") => &["fromkeys"],
                Function::Macro(own, number) => return self.macro_field(own.as_deref(), *number, name),
                _ => &[],
            },
            _ => &[],
        };
        if matches!(value, Value::List(_) | Value::Dict(_)) && CHANGING.contains(&name) {
            let words = format!("access to attribute '{name}' of '{}' object is unsafe.", value.kind());
            let field = match value {
                Value::Dict(dict) => dict.field(name, self.budget)?.is_some(),
                _ => false,
            };
            return Ok((!field).then(|| Value::Undefined(words.into())));
        }
        let others = match value {
            Value::Text(_) => &OTHER_TEXT_METHODS[..],
            Value::Bool(_) | Value::Int(_) | Value::Float(_) => &NUMBER_ATTRIBUTES,
            _ => &[],
        };
        if others.contains(&name) {
            return fail(format!(
                "the attribute '{name}' of a '{}' is not supported in chat templates",
                value.kind()
            ));
        }
        let method = methods.contains(&name).then(|| Function::Method(value.clone(), name.into()));
        method.map(|method| Value::function(self.budget, method)).transpose()
    }

    /// Calls a value.
    pub(super) fn call(&mut self, callee: &Value, arguments: Arguments) -> Run<Value> {
        self.budget.steps(1)?;
        match callee {
            Value::Undefined(words) => fail(&**words),
            Value::Loop(state) => {
                let [items] = arguments.of("loop", ["iterable"])?;
                self.repeat_again(state, &needed("loop", "iterable", items)?)
            }
            Value::Function(function) => match &**function {
                Function::Global(name) => self.call_global(name, arguments),
                Function::Macro(_, number) => self.call_macro(*number, arguments),
                Function::Method(value, method) => self.call_method(value, method, arguments),
                Function::Joiner(separator, called) => {
                    let first = !called.replace(true);
                    Ok(if first { "".into() } else { separator.clone() })
                }
                Function::Cycler(..) => fail("'Cycler' object is not callable"),
            },
            other => fail(format!("'{}' object is not callable", other.kind())),
        }
    }

    fn call_global(&mut self, name: &str, arguments: Arguments) -> Run<Value> {
        match name {
            "range" => operate::range(&arguments.positional),
            "dict" => {
                let Arguments { positional, named } = arguments;
                let mut pairs = Vec::new();
                for value in positional {
                    pairs.extend(self.pairs(&value)?);
                }
                pairs.extend(named.into_iter().map(|(name, value)| (Value::from(&*name), value)));
                Value::dict(self.budget, pairs)
            }
            "namespace" => {
                let number = self.namespaces.len();
                self.budget.memory(64)?;
                self.namespaces.push(Vec::new());
                let Arguments { positional, named } = arguments;
                for value in positional {
                    for (name, value) in self.pairs(&value)? {
                        self.set_field(number, text_of("namespace", &name)?, value)?;
                    }
                }
                for (name, value) in named {
                    self.set_field(number, &name, value)?;
                }
                Ok(Value::Namespace(number))
            }
            "cycler" if arguments.positional.is_empty() => fail("at least one item has to be provided"),
            "cycler" => Value::function(self.budget, Function::Cycler(arguments.positional, Cell::new(0))),
            "joiner" => {
                let [separator] = arguments.of("joiner", ["sep"])?;
                let separator = separator.unwrap_or_else(|| ", ".into());
                Value::function(self.budget, Function::Joiner(separator, Cell::new(false)))
            }
            "raise_exception" => {
                let [message] = arguments.of("raise_exception", ["message"])?;
                let message = needed("raise_exception", "message", message)?;
                Err(Fault::refused(self.printer().text(&message)?))
            }
            "strftime_now" => {
                let [format] = arguments.of("strftime_now", ["format"])?;
                let format = needed("strftime_now", "format", format)?;
                let format = text_of("strftime_now", &format)?;
                self.budget.memory(format.len().saturating_mul(32))?;
                Value::text(self.budget, self.clock.strftime(format).map_err(Fault::failed)?)
            }
            other => fail(format!("'{other}' is undefined")),
        }
    }

    /// Returns the pairs of a dictionary, or of a list of pairs.
    pub(super) fn pairs(&self, value: &Value) -> Run<Vec<(Value, Value)>> {
        if let Value::Dict(dict) = value {
            self.budget.memory(dict.entries.len() * size_of::<(Value, Value)>())?;
            return Ok(dict.entries.clone());
        }
        let pair = |item: Value| match <[Value; 2]>::try_from(item.items(self.budget)?) {
            Ok([key, value]) => Ok((key, value)),
            Err(_) => fail("an element of a list of pairs is not a pair"),
        };
        value.items(self.budget)?.into_iter().map(pair).collect()
    }

    /// Implements Python's `dict.fromkeys`.
    fn dict_of_keys(&self, arguments: Arguments) -> Run<Value> {
        let [keys, value] = arguments.of("fromkeys", ["iterable", "value"])?;
        let (keys, value) = (needed("fromkeys", "iterable", keys)?, value.unwrap_or(Value::None));
        let keys = keys.items(self.budget)?;
        Value::dict(self.budget, keys.into_iter().map(|key| (key, value.clone())))
    }

    fn call_method(&mut self, value: &Value, method: &str, arguments: Arguments) -> Run<Value> {
        if !arguments.named.is_empty() && !matches!(value, Value::Text(_)) {
            return fail(format!("{}.{method}() takes no keyword arguments", value.kind()));
        }
        match value {
            Value::Text(text) => text_methods::call(self, text, method, arguments),
            Value::Dict(dict) if method == "get" => {
                let [key, default] = arguments.of("get", ["key", "default"])?;
                let found = dict.get(&needed("get", "key", key)?, self.budget)?.cloned();
                Ok(found.or(default).unwrap_or(Value::None))
            }
            Value::Dict(_) if method == "fromkeys" => self.dict_of_keys(arguments),
            Value::Dict(dict) => {
                let [] = arguments.of(method, [])?;
                let shown = match method {
                    "keys" => Shown::Keys,
                    "values" => Shown::Values,
                    "items" => Shown::Items,
                    _ => return Value::dict(self.budget, dict.entries.iter().cloned()),
                };
                self.budget.memory(64)?;
                Ok(Value::View(Rc::new(View { shown, dict: Rc::clone(dict) })))
            }
            Value::Loop(state) => self.call_loop(state, method, arguments),
            Value::Function(function) => match (&**function, method) {
                (Function::Global(_), _) => self.dict_of_keys(arguments),
                (Function::Cycler(items, at), "next") => {
                    let current = items.get(at.get()).cloned().unwrap_or(Value::None);
                    at.set((at.get() + 1) % items.len().max(1));
                    Ok(current)
                }
                (Function::Cycler(_, at), _) => {
                    at.set(0);
                    Ok(Value::None)
                }
                _ => fail(format!("function has no method {method}")),
            },
            value if method == "copy" => {
                let [] = arguments.of(method, [])?;
                Value::list(self.budget, value.items(self.budget)?)
            }
            value => {
                let [wanted, start, stop] = arguments.of(method, ["value", "start", "stop"])?;
                let bounded = start.is_some() || stop.is_some();
                if bounded && (method == "count" || matches!(value, Value::Range { .. })) {
                    return fail(format!("{method} takes at most 1 argument"));
                }
                let wanted = needed(method, "value", wanted)?;
                let items = value.items(self.budget)?;
                let place = |bound: Option<&Value>, absent: usize| -> Run<usize> {
                    let bound = whole_or(method, bound, absent as i128)?;
                    Ok(count(if bound < 0 { bound.saturating_add(items.len() as i128) } else { bound }))
                };
                let (start, stop) = (place(start.as_ref(), 0)?, place(stop.as_ref(), items.len())?);
                let mut places = Vec::new();
                for (i, item) in items.iter().enumerate().take(stop).skip(start) {
                    if item.equals(&wanted, self.budget)? {
                        places.push(i);
                    }
                }
                match (method, places.first()) {
                    ("count", _) => Ok(places.len().into()),
                    (_, Some(first)) => Ok((*first).into()),
                    (_, None) => fail(format!("{} is not in list", self.printer().repr(&wanted)?)),
                }
            }
        }
    }

    fn call_loop(&mut self, state: &LoopState, method: &str, arguments: Arguments) -> Run<Value> {
        let items = arguments.positional;
        if method == "cycle" {
            return match items.len() {
                0 => fail("no items for cycling given"),
                len => Ok(items[state.index.get() % len].clone()),
            };
        }
        let mut seen = state.seen.borrow_mut();
        let same = match &*seen {
            Some(seen) if seen.len() == items.len() => {
                let mut same = true;
                for (a, b) in seen.iter().zip(&items) {
                    same &= a.equals(b, self.budget)?;
                }
                same
            }
            _ => false,
        };
        *seen = Some(items);
        Ok(Value::Bool(!same))
    }
}

/// Returns a field of `loop`.
fn loop_field(state: &LoopState, name: &str) -> Option<Value> {
    let (index, len) = (state.index.get(), state.items.len());
    let near = |at: Option<usize>| {
        let item = at.and_then(|at| state.items.get(at)).cloned();
        item.unwrap_or_else(|| Value::Undefined("there is no item beside this one in the loop".into()))
    };
    Some(match name {
        "index" => (index + 1).into(),
        "index0" => index.into(),
        "revindex" => (len - index).into(),
        "revindex0" => (len - index - 1).into(),
        "first" => (index == 0).into(),
        "last" => (index + 1 == len).into(),
        "length" => len.into(),
        "depth" => (state.depth + 1).into(),
        "depth0" => state.depth.into(),
        "previtem" => near(index.checked_sub(1)),
        "nextitem" => near(Some(index + 1)),
        _ => return None,
    })
}

/// Returns the value of an attribute or an element that a value lacks.
fn lacking(value: &Value, what: &str) -> Value {
    let owner = match value {
        Value::None => "None".to_owned(),
        other => format!("{} object", other.kind()),
    };
    let owner = if what.starts_with("attribute") { format!("'{owner}'") } else { owner };
    Value::Undefined(format!("{owner} has no {what}").into())
}
