//! The tests of templates: `value is name(arguments)`.

use std::cmp::Ordering;

use super::evaluate::Evaluator;
use super::fault::{Run, fail};
use super::operate::{self, Operator, compare, contains};
use super::value::Value;
use super::{filters, letters};

/// The names of all tests.
pub(super) const TESTS: [&str; 39] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

/// Returns a value as a text, and takes the steps to read every character of it.
fn scanned(run: &Evaluator<'_>, value: &Value) -> Run<String> {
    let text = run.printer().text(value)?.into_owned();
    run.budget.scanned(&text)?;
    Ok(text)
}

/// Returns true if a value has a property.
pub(super) fn holds(run: &Evaluator<'_>, name: &str, value: &Value, arguments: &[Value]) -> Run<bool> {
    let other = || match arguments {
        [other] => Ok(other),
        _ => fail(format!("the test '{name}' takes 1 argument, but {} were given", arguments.len())),
    };
    let order = || compare(run.budget, value, other()?);
    let remainder = |by: &Value| -> Run<Value> { operate::binary(run.budget, Operator::Rem, value, by) };
    Ok(match name {
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => value.as_float().is_some(),
        "string" => matches!(value, Value::Text(_) | Value::Safe(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "iterable" => value.is_iterable(),
        "sequence" => {
            value.is_iterable() && !matches!(value, Value::Loop(_) | Value::View(_) | Value::Stream(_))
        }
        "callable" => match value {
            Value::Function(function) => !matches!(**function, super::value::Function::Cycler(..)),
            other => matches!(other, Value::Loop(_) | Value::Undefined(_)),
        },
        "escaped" => matches!(value, Value::Safe(_)),
        "lower" => letters::is_lower(&scanned(run, value)?),
        "upper" => letters::is_upper(&scanned(run, value)?),
        "odd" => remainder(&Value::Int(2))?.as_float() == Some(1.0),
        "even" => remainder(&Value::Int(2))?.as_float() == Some(0.0),
        "divisibleby" => remainder(other()?)?.as_float() == Some(0.0),
        "sameas" => value.is_same(other()?, run.budget)?,
        "in" => contains(run.budget, other()?, value)?,
        "eq" | "==" | "equalto" => value.equals(other()?, run.budget)?,
        "ne" | "!=" => !value.equals(other()?, run.budget)?,
        "lt" | "<" | "lessthan" => order()? == Some(Ordering::Less),
        "le" | "<=" => order()?.is_some_and(Ordering::is_le),
        "gt" | ">" | "greaterthan" => order()? == Some(Ordering::Greater),
        "ge" | ">=" => order()?.is_some_and(Ordering::is_ge),
        "filter" => value.as_text().is_some_and(filters::is_known),
        "test" => value.as_text().is_some_and(|name| TESTS.contains(&name)),
        other => return fail(format!("No test named '{other}'.")),
    })
}
