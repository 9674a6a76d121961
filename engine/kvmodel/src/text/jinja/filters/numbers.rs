//! Filters for numbers.

use super::super::arithmetic::{too_large, truncated};
use super::super::letters::{strip, with_ascii_digits};
use super::{Arguments, Evaluator, Run, Value, fail, int_or, operate};

/// Applies a filter for numbers.
pub(super) fn apply(run: &Evaluator<'_>, name: &str, value: &Value, arguments: Arguments) -> Run<Value> {
    operate::defined(value)?;
    match name {
        "abs" => match (value, value.as_int()) {
            (Value::Float(x), _) => Ok(Value::Float(x.abs())),
            (_, Some(n)) => n.checked_abs().map(Value::Int).ok_or_else(too_large),
            (other, None) => fail(format!("bad operand type for abs(): '{}'", other.kind())),
        },
        "float" => {
            let [default] = arguments.of("float", ["default"])?;
            let parsed = value.as_float().or_else(|| float_of(value.as_text()?));
            Ok(parsed.map_or_else(|| default.unwrap_or(Value::Float(0.0)), Value::Float))
        }
        "int" => {
            let [default, base] = arguments.of("int", ["default", "base"])?;
            let base = int_or("int", base.as_ref(), 10)?;
            let parsed = match value {
                Value::Float(x) if x.is_nan() => None,
                Value::Float(x) => Some(truncated(*x)?),
                Value::Text(text) | Value::Safe(text) => {
                    run.budget.steps(text.len())?;
                    match whole_of(text, base)? {
                        Some(number) => Some(number),
                        None => float_of(text).filter(|x| x.is_finite()).map(truncated).transpose()?,
                    }
                }
                other => other.as_int(),
            };
            Ok(parsed.map_or_else(|| default.unwrap_or(Value::Int(0)), Value::Int))
        }
        _ => {
            let [precision, method] = arguments.of("round", ["precision", "method"])?;
            let whole = matches!(precision, Some(Value::None));
            let precision = int_or("round", precision.as_ref(), 0)?.clamp(-400, 400) as i32;
            let Some(x) = value.as_float() else {
                return fail(format!("type {} doesn't define __round__ method", value.kind()));
            };
            let scale = 10f64.powi(precision);
            match method.as_ref().and_then(Value::as_text).unwrap_or("common") {
                "common" => match value.as_int() {
                    Some(n) if precision >= 0 => Ok(Value::Int(n)),
                    Some(n) => Ok(Value::Int(
                        (n as f64 * scale).round_ties_even() as i128 * (1.0 / scale).round() as i128,
                    )),
                    None if whole => truncated(x.round_ties_even()).map(Value::Int),
                    None if precision >= 0 => {
                        let digits = format!("{x:.*}", precision as usize);
                        Ok(Value::Float(digits.parse().unwrap_or(x)))
                    }
                    None => Ok(Value::Float((x * scale).round_ties_even() / scale)),
                },
                "ceil" => Ok(Value::Float((x * scale).ceil() / scale)),
                "floor" => Ok(Value::Float((x * scale).floor() / scale)),
                _ => fail("method must be common, ceil or floor"),
            }
        }
    }
}

/// Parses a float as Python's `float` does.
fn float_of(text: &str) -> Option<f64> {
    let text = with_ascii_digits(strip(text, None, true, true));
    let digits = without_underscores(&text)?;
    digits.parse().ok()
}

/// Removes the underscores between digits. Returns `None` if one stands elsewhere.
fn without_underscores(digits: &str) -> Option<String> {
    let chars: Vec<char> = digits.chars().collect();
    let between = |at: usize| {
        let digit = |at: usize| chars.get(at).is_some_and(char::is_ascii_alphanumeric);
        at > 0 && digit(at - 1) && digit(at + 1)
    };
    let misplaced = (0..chars.len()).any(|at| chars[at] == '_' && !between(at));
    (!misplaced).then(|| chars.into_iter().filter(|c| *c != '_').collect())
}

/// Parses a whole number in a base as Python's `int` does. The base 0 is that of the number's prefix.
fn whole_of(text: &str, base: i128) -> Run<Option<i128>> {
    let text = with_ascii_digits(strip(text, None, true, true));
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(&text)),
    };
    let lower = digits.to_ascii_lowercase();
    let of_prefix =
        [("0x", 16), ("0o", 8), ("0b", 2)].into_iter().find(|(prefix, _)| lower.starts_with(prefix));
    let (digits, base) = match (base, of_prefix) {
        (0, Some((_, base))) => (&lower[2..], base),
        // A decimal number with its own base has no zeros before it.
        (0, None) if lower.starts_with('0') && lower.contains(|c| !matches!(c, '0' | '_')) => {
            return Ok(None);
        }
        (0, None) => (&*lower, 10),
        (2 | 8 | 16, Some((_, own))) if own == base => (&lower[2..], base),
        (2..=36, _) => (&*lower, base),
        _ => return Ok(None),
    };
    // One underscore may follow a prefix.
    let digits =
        if digits.len() + 2 == lower.len() { digits.strip_prefix('_').unwrap_or(digits) } else { digits };
    let Some(digits) = without_underscores(digits) else { return Ok(None) };
    let known = |c: char| c.to_digit(36).is_some_and(|digit| i128::from(digit) < base);
    if digits.is_empty() || !digits.chars().all(known) {
        return Ok(None);
    }
    let signed = if negative { format!("-{digits}") } else { digits };
    let base = u32::try_from(base).unwrap_or(10);
    i128::from_str_radix(&signed, base).map(Some).map_err(|_| too_large())
}
