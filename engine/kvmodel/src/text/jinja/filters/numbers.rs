//! Filters for numbers.

use super::{Arguments, Evaluator, Run, Value, fail, int_or, operate};

/// Applies a filter for numbers.
pub(super) fn apply(run: &Evaluator<'_>, name: &str, value: &Value, arguments: Arguments) -> Run<Value> {
    operate::defined(value)?;
    match name {
        "abs" => match (value, value.as_int()) {
            (Value::Float(x), _) => Ok(Value::Float(x.abs())),
            (_, Some(n)) => Ok(Value::Int(n.saturating_abs())),
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
                Value::Float(x) if x.is_finite() && x.abs() < 1e38 => Some(*x as i128),
                Value::Text(text) => {
                    run.budget.steps(text.len())?;
                    whole_of(text, base).or_else(|| {
                        float_of(text).filter(|x| x.is_finite() && x.abs() < 1e38).map(|x| x as i128)
                    })
                }
                other => other.as_int(),
            };
            Ok(parsed.map_or_else(|| default.unwrap_or(Value::Int(0)), Value::Int))
        }
        _ => {
            let [precision, method] = arguments.of("round", ["precision", "method"])?;
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
    let text = super::super::letters::strip(text, None, true, true).replace('_', "");
    text.parse().ok()
}

/// Parses a whole number in a base as Python's `int` does.
fn whole_of(text: &str, base: i128) -> Option<i128> {
    let text = super::super::letters::strip(text, None, true, true);
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let lower = digits.to_lowercase();
    let prefix = match base {
        16 => "0x",
        8 => "0o",
        2 => "0b",
        _ => "",
    };
    let digits = lower.strip_prefix(prefix).unwrap_or(&lower);
    let well_formed = !digits.starts_with('_') && !digits.ends_with('_') && !digits.contains("__");
    let digits = digits.replace('_', "");
    let base = u32::try_from(base).ok().filter(|base| (2..=36).contains(base))?;
    if !well_formed || digits.starts_with(['+', '-']) {
        return None;
    }
    i128::from_str_radix(&digits, base).ok().map(|number| sign * number)
}
