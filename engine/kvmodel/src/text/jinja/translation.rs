//! Tables that replace the characters of a text: Python's `str.maketrans` and `str.translate`.

use super::arguments::{Arguments, needed, text_of};
use super::evaluate::Evaluator;
use super::fault::{Run, fail};
use super::operate;
use super::value::Value;

/// Returns the key of a character in a table.
fn code(c: char) -> Value {
    Value::Int(u32::from(c).into())
}

/// Creates a table: from a dictionary, or from two texts of equal length and a text of characters to remove.
pub(super) fn table(run: &Evaluator<'_>, arguments: Arguments) -> Run<Value> {
    let [from, to, removed] = arguments.of("maketrans", ["x", "y", "z"])?;
    let from = needed("maketrans", "x", from)?;
    let Some(to) = to else {
        let Value::Dict(dict) = &from else {
            return fail("if you give only one argument to maketrans it must be a dict");
        };
        let key = |key: &Value| match key.as_text() {
            None if key.as_int().is_some() => Ok(key.clone()),
            None => fail("keys in translate table must be strings or integers"),
            Some(text) => {
                let mut chars = text.chars();
                match (chars.next(), chars.next()) {
                    (Some(c), None) => Ok(code(c)),
                    _ => fail("string keys in translate table must be of length 1"),
                }
            }
        };
        let pairs = dict.entries.iter().map(|(name, value)| Ok((key(name)?, value.clone())));
        return Value::dict(run.budget, pairs.collect::<Run<Vec<_>>>()?);
    };
    let (from, to) = (text_of("maketrans", &from)?, text_of("maketrans", &to)?);
    if from.chars().count() != to.chars().count() {
        return fail("the first two maketrans arguments must have equal length");
    }
    let removed = removed.as_ref().map_or(Ok(""), |removed| text_of("maketrans", removed))?;
    let replaced = from.chars().zip(to.chars()).map(|(from, to)| (code(from), code(to)));
    let removed = removed.chars().map(|c| (code(c), Value::None));
    Value::dict(run.budget, replaced.chain(removed))
}

/// Replaces each character by what a table has at the character's number.
pub(super) fn translated(run: &Evaluator<'_>, text: &str, table: &Value) -> Run<Value> {
    let mut out = String::new();
    for c in text.chars() {
        let found = match table {
            Value::Dict(dict) => dict.get(&code(c), run.budget)?.cloned(),
            Value::Text(_) | Value::List(_) | Value::Tuple(_) | Value::Range { .. } => {
                run.budget.steps(1)?;
                operate::element(run.budget, table, u32::from(c).into())?
            }
            other => return fail(format!("'{}' object is not subscriptable", other.kind())),
        };
        match found {
            None => out.push(c),
            Some(Value::None) => {}
            Some(Value::Text(part) | Value::Safe(part)) => {
                run.budget.memory(part.len())?;
                out.push_str(&part);
            }
            Some(value) => {
                match value.as_int().map(|number| u32::try_from(number).ok().and_then(char::from_u32)) {
                    Some(Some(c)) => out.push(c),
                    Some(None) => return fail("character mapping must be in range(0x110000)"),
                    None => return fail("character mapping must return integer, None or str"),
                }
            }
        }
    }
    Value::text(run.budget, out)
}
