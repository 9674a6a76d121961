//! The arguments of a call of a filter, a test, a method or a function.

use super::fault::{Run, fail};
use super::value::Value;

/// The arguments of a call. The callee takes them by position or by name.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(String, Value)>,
}

impl Arguments {
    /// Checks that there are at most the parameters `names`, and returns their arguments in this order.
    /// `what` names the callee in errors.
    pub(super) fn of<const N: usize>(self, what: &str, names: [&str; N]) -> Run<[Option<Value>; N]> {
        let mut taken = [const { None }; N];
        if self.positional.len() > N {
            return fail(format!(
                "{what} takes at most {N} arguments, but {} were given",
                self.positional.len()
            ));
        }
        for (slot, value) in taken.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|known| *known == name) {
                Some(at) if taken[at].is_none() => taken[at] = Some(value),
                Some(_) => return fail(format!("{what} got several values for argument '{name}'")),
                None => return fail(format!("{what} got an unexpected argument '{name}'")),
            }
        }
        Ok(taken)
    }
}

/// Returns the arguments that a dictionary names.
pub(super) fn named_by(values: &Value) -> Run<Vec<(String, Value)>> {
    let Value::Dict(dict) = values else {
        return fail(format!("argument after ** must be a mapping, not {}", values.kind()));
    };
    let named = |(name, value): &(Value, Value)| match name.as_text() {
        Some(name) => Ok((name.to_owned(), value.clone())),
        None => fail("keywords must be strings"),
    };
    dict.entries.iter().map(named).collect()
}

/// Returns an argument that must be given.
pub(super) fn needed(what: &str, name: &str, value: Option<Value>) -> Run<Value> {
    value.map_or_else(|| fail(format!("{what} lacks the argument '{name}'")), Ok)
}

/// Returns an argument that must be a text.
pub(super) fn text_of<'a>(what: &str, value: &'a Value) -> Run<&'a str> {
    match value {
        Value::Text(text) | Value::Safe(text) => Ok(text),
        Value::Undefined(words) => fail(&**words),
        other => fail(format!("{what}: '{}' object is not a string", other.kind())),
    }
}

/// Returns an argument that must be a whole number, or `absent` if it is not given or none.
pub(super) fn int_or(what: &str, value: Option<&Value>, absent: i128) -> Run<i128> {
    match value {
        None | Some(Value::None) => Ok(absent),
        Some(Value::Undefined(words)) => fail(&**words),
        Some(value) => match value.as_int() {
            Some(number) => Ok(number),
            None => fail(format!("{what}: '{}' object cannot be interpreted as an integer", value.kind())),
        },
    }
}

/// Returns an argument that must be a whole number and not none, or `absent` if it is not given.
pub(super) fn whole_or(what: &str, value: Option<&Value>, absent: i128) -> Run<i128> {
    match value {
        Some(Value::None) => fail(format!("{what}: 'NoneType' object cannot be interpreted as an integer")),
        value => int_or(what, value, absent),
    }
}

/// Returns a number of elements or characters: negative numbers count as 0.
pub(super) fn count(number: i128) -> usize {
    usize::try_from(number.max(0)).unwrap_or(usize::MAX)
}
