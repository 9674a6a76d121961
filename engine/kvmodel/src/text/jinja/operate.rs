//! Operators on values, as Python defines them.

use std::cmp::Ordering;

use super::arithmetic::{self, too_large};
use super::budget::Budget;
use super::fault::{Fault, Run, fail};
use super::letters;
use super::value::Value;

/// A binary operator on numbers, texts and lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Rem,
    Pow,
}

impl Operator {
    fn sign(self) -> &'static str {
        match self {
            Self::Add => "+",
            Self::Sub => "-",
            Self::Mul => "*",
            Self::Div => "/",
            Self::FloorDiv => "//",
            Self::Rem => "%",
            Self::Pow => "** or pow()",
        }
    }
}

/// Returns the error that an undefined operand is.
pub(super) fn defined(value: &Value) -> Run<&Value> {
    match value {
        Value::Undefined(words) => fail(&**words),
        value => Ok(value),
    }
}

/// Applies an operator. A text as the left operand of `%` is not handled here.
pub(super) fn binary(budget: &Budget, op: Operator, a: &Value, b: &Value) -> Run<Value> {
    if matches!(a, Value::Safe(_)) || matches!(b, Value::Safe(_)) {
        return with_safe(budget, op, a, b);
    }
    match (op, defined(a)?, defined(b)?) {
        (Operator::Add, Value::Text(a), Value::Text(b)) => {
            budget.memory(a.len() + b.len())?;
            Value::text(budget, [&**a, &**b].concat())
        }
        (Operator::Add, Value::List(a), Value::List(b)) => {
            budget.memory((a.items.len() + b.items.len()) * size_of::<Value>())?;
            Value::list(budget, [&*a.items, &*b.items].concat())
        }
        (Operator::Add, Value::Tuple(a), Value::Tuple(b)) => {
            budget.memory((a.items.len() + b.items.len()) * size_of::<Value>())?;
            Value::tuple(budget, [&*a.items, &*b.items].concat())
        }
        (Operator::Mul, container @ (Value::Text(_) | Value::List(_) | Value::Tuple(_)), count)
        | (Operator::Mul, count, container @ (Value::Text(_) | Value::List(_) | Value::Tuple(_)))
            if count.as_int().is_some() =>
        {
            let count = count.as_int().unwrap_or(0).max(0);
            repeat(budget, container, usize::try_from(count).unwrap_or(usize::MAX))
        }
        (op, a, b) => match (a.as_int(), b.as_int(), a.as_float(), b.as_float()) {
            (Some(a), Some(b), ..) => arithmetic::whole(op, a, b),
            (.., Some(a), Some(b)) => arithmetic::real(op, a, b),
            _ => fail(format!(
                "unsupported operand type(s) for {}: '{}' and '{}'",
                op.sign(),
                a.kind(),
                b.kind()
            )),
        },
    }
}

/// Applies an operator to operands of which one is a safe text. Python escapes what it adds to such a text.
fn with_safe(budget: &Budget, op: Operator, a: &Value, b: &Value) -> Run<Value> {
    let escaped = |value: &Value| match value {
        Value::Text(text) => Some(letters::escape(text)),
        Value::Safe(text) => Some(text.to_string()),
        _ => None,
    };
    match (op, escaped(defined(a)?), escaped(defined(b)?)) {
        (Operator::Add, Some(a), Some(b)) => {
            budget.memory(2 * (a.len() + b.len()))?;
            Ok(Value::Safe((a + &b).into()))
        }
        _ => fail(safe_use(op.sign())),
    }
}

/// Returns the words of the error for a use of a safe text that is not supported.
pub(super) fn safe_use(what: &str) -> String {
    format!(
        "{what} is not supported for a text that 'safe' or 'escape' has marked; leave out that filter in chat templates"
    )
}

/// Repeats a text, a list or a tuple.
fn repeat(budget: &Budget, container: &Value, count: usize) -> Run<Value> {
    match container {
        Value::Text(text) => {
            budget.memory(text.len().saturating_mul(count))?;
            Value::text(budget, text.repeat(count))
        }
        Value::List(items) | Value::Tuple(items) => {
            let len = items.items.len().saturating_mul(count);
            budget.memory(len.saturating_mul(size_of::<Value>()))?;
            let repeated = std::iter::repeat_n(&items.items, if len > 0 { count } else { 0 });
            let repeated = repeated.flatten().cloned().collect();
            match container {
                Value::List(_) => Value::list(budget, repeated),
                _ => Value::tuple(budget, repeated),
            }
        }
        other => fail(format!("'{}' object cannot be repeated", other.kind())),
    }
}

/// Returns the negative of a number.
pub(super) fn negative(value: &Value) -> Run<Value> {
    match (defined(value)?, value.as_int()) {
        (Value::Float(x), _) => Ok(Value::Float(-x)),
        (_, Some(x)) => x.checked_neg().map(Value::Int).ok_or_else(too_large),
        (other, None) => fail(format!("bad operand type for unary -: '{}'", other.kind())),
    }
}

/// Compares two values. Returns `None` if one of them is not a number (NaN).
pub(super) fn compare(budget: &Budget, a: &Value, b: &Value) -> Run<Option<Ordering>> {
    budget.steps(1)?;
    match (defined(a)?, defined(b)?) {
        (Value::Text(a) | Value::Safe(a), Value::Text(b) | Value::Safe(b)) => {
            budget.steps(a.len().min(b.len()) >> 10)?;
            Ok(Some(a.cmp(b)))
        }
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
            for (a, b) in a.items.iter().zip(&b.items) {
                if !a.equals(b, budget)? {
                    return compare(budget, a, b);
                }
            }
            Ok(Some(a.items.len().cmp(&b.items.len())))
        }
        (a, b) if a.as_float().is_some() && b.as_float().is_some() => Ok(arithmetic::ordered(a, b)),
        (a, b) => fail(format!("'<' not supported between instances of '{}' and '{}'", a.kind(), b.kind())),
    }
}

/// Returns true if `container` contains `item`.
pub(super) fn contains(budget: &Budget, container: &Value, item: &Value) -> Run<bool> {
    let any = |items: &[Value]| -> Run<bool> {
        for one in items {
            if one.equals(item, budget)? {
                return Ok(true);
            }
        }
        Ok(false)
    };
    match container {
        Value::Text(text) | Value::Safe(text) => match item {
            Value::Text(part) | Value::Safe(part) => {
                budget.steps(text.len() >> 8)?;
                Ok(text.contains(&**part))
            }
            other => fail(format!("'in <string>' requires string as left operand, not {}", other.kind())),
        },
        Value::List(items) | Value::Tuple(items) => any(&items.items),
        Value::Loop(state) => any(&state.items),
        Value::View(view) => view.contains(item, budget),
        Value::Stream(stream) => stream.contains(item, budget),
        Value::Dict(dict) => Ok(dict.get(item, budget)?.is_some()),
        Value::Range { .. } => any(&container.items(budget)?),
        Value::Undefined(_) => Ok(false),
        other => fail(format!("argument of type '{}' is not iterable", other.kind())),
    }
}

/// Returns the element at an index, or `None` if the value has no element there. Negative indices count from
/// the end.
pub(super) fn element(budget: &Budget, value: &Value, index: i128) -> Run<Option<Value>> {
    let Some(len) = value.counted_len(budget)? else { return Ok(None) };
    let Ok(at) = usize::try_from(if index < 0 { index + len as i128 } else { index }) else {
        return Ok(None);
    };
    Ok(match value {
        Value::List(items) | Value::Tuple(items) => items.items.get(at).cloned(),
        Value::Safe(_) => return fail(safe_use("an index")),
        Value::Range { start, step, .. } if at < len => Some(Value::Int(start + step * at as i128)),
        Value::Text(text) => text.chars().nth(at).map(|c| (&*c.encode_utf8(&mut [0; 4])).into()),
        _ => None,
    })
}

/// Returns the elements `[start:stop:step]` of a text, a list or a tuple.
pub(super) fn slice(
    budget: &Budget,
    value: &Value,
    start: Option<i128>,
    stop: Option<i128>,
    step: Option<i128>,
) -> Run<Value> {
    let len = match defined(value)? {
        Value::Text(_) | Value::List(_) | Value::Tuple(_) | Value::Range { .. } => {
            value.counted_len(budget)?.unwrap_or(0)
        }
        Value::Safe(_) => return fail(safe_use("a slice")),
        other => return fail(format!("'{}' object is not subscriptable by a slice", other.kind())),
    };
    let step = step.unwrap_or(1);
    if step == 0 {
        return fail("slice step cannot be zero");
    }
    let len = len as i128;
    let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let bound = |bound: Option<i128>, absent: i128| match bound {
        None => absent,
        Some(n) if n < 0 => n.saturating_add(len).max(lowest),
        Some(n) => n.min(highest),
    };
    let (first, end) =
        if step > 0 { (bound(start, 0), bound(stop, len)) } else { (bound(start, len - 1), bound(stop, -1)) };
    let ahead = if step > 0 { end - first } else { first - end };
    let count = if ahead > 0 { ((ahead.unsigned_abs() - 1) / step.unsigned_abs() + 1) as usize } else { 0 };
    let places = (0..count as i128).map(|i| (first + step * i) as usize);
    match value {
        Value::Text(text) => {
            budget.memory(text.len())?;
            if step == 1 {
                let text: String = text.chars().skip(first as usize).take(count).collect();
                return Value::text(budget, text);
            }
            budget.memory(4 * text.len())?;
            let chars: Vec<char> = text.chars().collect();
            Value::text(budget, places.filter_map(|i| chars.get(i)).collect::<String>())
        }
        Value::Range { start, step: each, .. } => {
            let at = |place: i128| each.checked_mul(place).and_then(|ahead| start.checked_add(ahead));
            match (at(first), at(end), each.checked_mul(step)) {
                (Some(start), Some(stop), Some(step)) => Ok(Value::Range { start, stop, step, len: count }),
                _ => Err(too_large()),
            }
        }
        Value::List(items) | Value::Tuple(items) => {
            budget.memory(count.saturating_mul(size_of::<Value>()))?;
            let picked = places.filter_map(|i| items.items.get(i).cloned()).collect();
            match value {
                Value::Tuple(_) => Value::tuple(budget, picked),
                _ => Value::list(budget, picked),
            }
        }
        _ => Ok(Value::None),
    }
}

/// Sorts values by their keys, stably. The order may fail, which the standard sorts do not allow.
pub(super) fn sorted(budget: &Budget, keyed: Vec<(Value, Value)>) -> Run<Vec<Value>> {
    budget.memory(2 * keyed.len() * size_of::<(Value, Value)>())?;
    Ok(merge_sorted(budget, keyed)?.into_iter().map(|(_, value)| value).collect())
}

fn merge_sorted(budget: &Budget, mut keyed: Vec<(Value, Value)>) -> Run<Vec<(Value, Value)>> {
    if keyed.len() < 2 {
        return Ok(keyed);
    }
    let right = merge_sorted(budget, keyed.split_off(keyed.len() / 2))?;
    let left = merge_sorted(budget, keyed)?;
    let mut merged = Vec::with_capacity(left.len() + right.len());
    let (mut left, mut right) = (left.into_iter().peekable(), right.into_iter().peekable());
    loop {
        match (left.peek(), right.peek()) {
            (Some((a, _)), Some((b, _))) => {
                let later = compare(budget, b, a)? == Some(Ordering::Less);
                merged.extend(if later { right.next() } else { left.next() });
            }
            (None, None) => return Ok(merged),
            _ => merged.extend(left.by_ref().chain(right.by_ref())),
        }
    }
}

/// Returns Python's `range(start, stop, step)`.
pub(super) fn range(arguments: &[Value]) -> Run<Value> {
    /// The most elements that Jinja2's sandbox allows.
    const MAX_RANGE: u128 = 100_000;
    let mut numbers = Vec::new();
    for argument in arguments {
        match defined(argument)?.as_int() {
            Some(number) => numbers.push(number),
            None => {
                return fail(format!("'{}' object cannot be interpreted as an integer", argument.kind()));
            }
        }
    }
    let (start, stop, step) = match *numbers {
        [stop] => (0, stop, 1),
        [start, stop] => (start, stop, 1),
        [start, stop, step] => (start, stop, step),
        _ => return fail("range takes 1 to 3 arguments"),
    };
    if step == 0 {
        return fail("range() arg 3 must not be zero");
    }
    let far = stop.checked_sub(start).ok_or_else(too_large)?;
    let ahead = far != 0 && (far > 0) == (step > 0);
    let len = if ahead { (far.unsigned_abs() - 1) / step.unsigned_abs() + 1 } else { 0 };
    if len > MAX_RANGE {
        return Err(Fault::limit(format!("range has {len} elements, more than {MAX_RANGE}")));
    }
    Ok(Value::Range { start, stop, step, len: len as usize })
}
