//! Arithmetic on numbers as Python defines it, within 128 bits.

use std::cmp::Ordering;

use super::fault::{Fault, Run, fail};
use super::operate::Operator;
use super::value::Value;

/// Returns the failure for a whole number that needs more than 128 bits.
pub(super) fn too_large() -> Fault {
    Fault::limit("a whole number is outside the range of 128 bits")
}

/// Applies an operator to whole numbers.
pub(super) fn whole(op: Operator, a: i128, b: i128) -> Run<Value> {
    let number = match op {
        Operator::Add => a.checked_add(b),
        Operator::Sub => a.checked_sub(b),
        Operator::Mul => a.checked_mul(b),
        Operator::Div | Operator::FloorDiv | Operator::Rem if b == 0 => return fail("division by zero"),
        Operator::Div => return Ok(Value::Float(quotient(a, b))),
        Operator::FloorDiv => {
            a.checked_div_euclid(b).map(|q| if b < 0 && a.rem_euclid(b) != 0 { q - 1 } else { q })
        }
        Operator::Rem => a.checked_rem_euclid(b).map(|rest| if b < 0 && rest != 0 { rest + b } else { rest }),
        Operator::Pow if b < 0 => return real(op, a as f64, b as f64),
        Operator::Pow if (-1..=1).contains(&a) => Some(if b == 0 || (a == -1 && b % 2 == 0) { 1 } else { a }),
        Operator::Pow => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
    };
    number.map(Value::Int).ok_or_else(too_large)
}

/// Returns the float that is nearest to the quotient of two whole numbers.
fn quotient(a: i128, b: i128) -> f64 {
    let (size, by) = (a.unsigned_abs(), b.unsigned_abs());
    let (mut quotient, mut rest, mut halved) = (size / by, size % by, 0);
    // More bits than a float holds. What follows them counts only by whether it is zero.
    while rest != 0 && quotient < 1 << 60 {
        rest <<= 1;
        quotient = quotient << 1 | u128::from(rest >= by);
        rest -= if rest >= by { by } else { 0 };
        halved += 1;
    }
    let size = (quotient | u128::from(rest != 0)) as f64 * 2f64.powi(-halved);
    if (a < 0) == (b < 0) { size } else { -size }
}

/// Applies an operator to floats.
pub(super) fn real(op: Operator, a: f64, b: f64) -> Run<Value> {
    Ok(Value::Float(match op {
        Operator::Add => a + b,
        Operator::Sub => a - b,
        Operator::Mul => a * b,
        Operator::Div | Operator::FloorDiv | Operator::Rem if b == 0.0 => {
            return fail("float division by zero");
        }
        Operator::Div => a / b,
        Operator::FloorDiv => floored(a, b).0,
        Operator::Rem => floored(a, b).1,
        Operator::Pow => return power(a, b).map(Value::Float),
    }))
}

/// Returns the floored quotient and the rest, whose sign is that of `b`: Python's `divmod`.
fn floored(a: f64, b: f64) -> (f64, f64) {
    let mut rest = a % b;
    let mut exact = (a - rest) / b;
    if rest == 0.0 {
        rest = 0f64.copysign(b);
    } else if (rest < 0.0) != (b < 0.0) {
        rest += b;
        exact -= 1.0;
    }
    let quotient = if exact == 0.0 {
        0f64.copysign(a / b)
    } else {
        let floor = exact.floor();
        if exact - floor > 0.5 { floor + 1.0 } else { floor }
    };
    (quotient, rest)
}

fn power(a: f64, b: f64) -> Run<f64> {
    if a == 0.0 && b < 0.0 {
        return fail("0.0 cannot be raised to a negative power");
    }
    if a < 0.0 && a.is_finite() && b.is_finite() && b.fract() != 0.0 {
        return fail(
            "a power of a negative number is complex; complex numbers are not supported in chat templates",
        );
    }
    let power = a.powf(b);
    if power.is_infinite() && a.is_finite() && b.is_finite() {
        return fail("a power is outside the range of floats");
    }
    Ok(power)
}

/// Compares two numbers by their exact values. Returns `None` if one of them is no number (NaN), or neither
/// a whole number nor a float.
pub(super) fn ordered(a: &Value, b: &Value) -> Option<Ordering> {
    match (a.as_int(), b.as_int(), a.as_float()?, b.as_float()?) {
        (Some(a), Some(b), ..) => Some(a.cmp(&b)),
        (Some(a), None, _, b) => with_float(a, b),
        (None, Some(b), a, _) => with_float(b, a).map(Ordering::reverse),
        (None, None, a, b) => a.partial_cmp(&b),
    }
}

fn with_float(a: i128, b: f64) -> Option<Ordering> {
    /// 2 to the power of 127.
    const BEYOND: f64 = -(i128::MIN as f64);
    if b.abs() >= BEYOND && b != -BEYOND {
        return Some(if b > 0.0 { Ordering::Less } else { Ordering::Greater });
    }
    if b.is_nan() {
        return None;
    }
    Some(a.cmp(&(b.trunc() as i128)).then(0f64.partial_cmp(&b.fract())?))
}

/// Returns a float without its fraction: Python's `int`.
pub(super) fn truncated(x: f64) -> Run<i128> {
    if !x.is_finite() {
        return fail(format!(
            "cannot convert float {} to integer",
            if x.is_nan() { "NaN" } else { "infinity" }
        ));
    }
    // Casts saturate, and no float inside the range has one of its ends as its whole part but -2^127.
    match x as i128 {
        i128::MAX => Err(too_large()),
        i128::MIN if x < i128::MIN as f64 => Err(too_large()),
        whole => Ok(whole),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_are_rounded_once() {
        for (a, b, expected) in [
            (9_007_199_254_740_993, 3, 3_002_399_751_580_331.0),
            (1, 3, 1.0 / 3.0),
            (-7, 2, -3.5),
            (i128::MAX, i128::MAX, 1.0),
            (i128::MIN, 1, i128::MIN as f64),
            (1, i128::MAX, 2f64.powi(-127)),
            (i128::MAX - 1, i128::MAX, 1.0),
            ((1 << 60) + 129, 1 << 60, 1.0 + 2f64.powi(-52)),
        ] {
            assert_eq!(quotient(a, b), expected, "{a} / {b}");
        }
    }
}
