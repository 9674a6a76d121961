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
            match method.as_ref().and_then(Value::as_text).unwrap_or("common") {
                "common" => match value.as_int() {
                    Some(n) => rounded(n, 0.0, precision).map(Value::Int),
                    None if whole => truncated(x.round_ties_even()).map(Value::Int),
                    None if precision >= 0 => {
                        let digits = format!("{x:.*}", precision as usize);
                        Ok(Value::Float(digits.parse().unwrap_or(x)))
                    }
                    None if !x.is_finite() => Ok(Value::Float(x)),
                    None => {
                        let n = rounded(truncated(x)?, x.fract(), precision)?;
                        Ok(Value::Float((n as f64).copysign(x)))
                    }
                },
                "ceil" if !whole => by(value.as_int(), x, precision, f64::ceil).map(Value::Float),
                "floor" if !whole => by(value.as_int(), x, precision, f64::floor).map(Value::Float),
                "ceil" | "floor" => fail("unsupported operand type(s) for ** or pow(): 'int' and 'NoneType'"),
                _ => fail("method must be common, ceil or floor"),
            }
        }
    }
}

/// Rounds the number `n + fraction` to `precision` digits behind the point. Half of a unit is rounded to the even
/// neighbour.
fn rounded(n: i128, fraction: f64, precision: i32) -> Run<i128> {
    if precision >= 0 {
        return Ok(n);
    }
    // All numbers of 128 bits are less than half of 10^39.
    let Some(unit) = 10i128.checked_pow(precision.unsigned_abs()) else { return Ok(0) };
    // The fraction has the sign of `n`, so that `rest` is counted from zero.
    let (units, rest) = (n / unit, n % unit);
    let (rest, other) = (rest.abs(), unit - rest.abs());
    let up = rest > other || (rest == other && (fraction != 0.0 || units % 2 != 0));
    let units = if up { units + if n < 0 { -1 } else { 1 } } else { units };
    units.checked_mul(unit).ok_or_else(too_large)
}

/// Rounds up or down, as Jinja2 does: `to(x * 10 ** precision) / 10 ** precision`.
fn by(whole: Option<i128>, x: f64, precision: i32, to: fn(f64) -> f64) -> Run<f64> {
    if whole.is_some() && precision >= 0 {
        return Ok(x);
    }
    let scale: f64 = format!("1e{precision}").parse().unwrap_or(f64::INFINITY);
    if scale.is_infinite() {
        return fail("int too large to convert to float");
    }
    let scaled = x * scale;
    if !scaled.is_finite() {
        return fail(format!("cannot convert float {scaled} to integer"));
    }
    if scale == 0.0 {
        return fail("float division by zero");
    }
    Ok(to(scaled) / scale)
}

/// Parses a float as Python's `float` does.
fn float_of(text: &str) -> Option<f64> {
    let text = with_ascii_digits(strip(text, None, true, true));
    let digits = without_underscores(&text, char::is_ascii_digit)?;
    digits.parse().ok()
}

/// Removes the underscores between digits. Returns `None` if one stands elsewhere.
fn without_underscores(digits: &str, is_digit: fn(&char) -> bool) -> Option<String> {
    let chars: Vec<char> = digits.chars().collect();
    let between = |at: usize| {
        let digit = |at: usize| chars.get(at).is_some_and(is_digit);
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
    let Some(digits) = without_underscores(digits, char::is_ascii_alphanumeric) else { return Ok(None) };
    let known = |c: char| c.to_digit(36).is_some_and(|digit| i128::from(digit) < base);
    if digits.is_empty() || !digits.chars().all(known) {
        return Ok(None);
    }
    let signed = if negative { format!("-{digits}") } else { digits };
    let base = u32::try_from(base).unwrap_or(10);
    i128::from_str_radix(&signed, base).map(Some).map_err(|_| too_large())
}
