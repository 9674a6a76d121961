//! Values as Python's `str` and `repr` write them.

use std::borrow::Cow;
use std::fmt::Write as _;

use super::budget::{Budget, MAX_LEVELS, too_deep};
use super::characters::is_printable;
use super::fault::{Run, fail};
use super::value::{Function, Value};

/// The fields of namespaces, for printing: each namespace's number is its index.
pub(super) type Namespaces = Vec<Vec<(String, Value)>>;

/// A writer of values.
#[derive(Clone, Copy)]
pub(super) struct Printer<'a> {
    pub(super) budget: &'a Budget,
    pub(super) namespaces: &'a Namespaces,
}

impl Printer<'_> {
    /// Returns Python's `str(value)`.
    pub(super) fn text<'v>(&self, value: &'v Value) -> Run<Cow<'v, str>> {
        match value {
            Value::Undefined(_) => Ok(Cow::Borrowed("")),
            Value::Text(text) | Value::Safe(text) => Ok(Cow::Borrowed(text)),
            other => self.repr(other).map(Cow::Owned),
        }
    }

    /// Returns Python's `repr(value)`.
    pub(super) fn repr(&self, value: &Value) -> Run<String> {
        let mut out = String::new();
        self.write(&mut out, value, 0)?;
        Ok(out)
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Run<()> {
        if depth > MAX_LEVELS {
            return Err(too_deep());
        }
        let before = out.len();
        self.budget.steps(1)?;
        match value {
            Value::Undefined(_) => out.push_str("Undefined"),
            Value::None => out.push_str("None"),
            Value::Bool(truth) => out.push_str(if *truth { "True" } else { "False" }),
            Value::Int(number) => {
                let _ = write!(out, "{number}");
            }
            Value::Float(number) => out.push_str(&float(*number)),
            Value::Text(text) => {
                self.budget.memory(text.len())?;
                quoted(out, text);
            }
            Value::Safe(text) => {
                self.budget.memory(text.len())?;
                out.push_str("Markup(");
                quoted(out, text);
                out.push(')');
            }
            Value::List(items) => self.list(out, "[", &items.items, "]", depth)?,
            Value::Tuple(items) => {
                let close = if items.items.len() == 1 { ",)" } else { ")" };
                self.list(out, "(", &items.items, close, depth)?;
            }
            Value::Dict(dict) => self.map(out, "{", &dict.entries, depth)?,
            Value::Range { start, stop, step, .. } => {
                let _ = write!(out, "range({start}, {stop}");
                if *step != 1 {
                    let _ = write!(out, ", {step}");
                }
                out.push(')');
            }
            Value::Namespace(number) => {
                let fields = self.namespaces.get(*number).map(Vec::as_slice).unwrap_or_default();
                let fields: Vec<(Value, Value)> =
                    fields.iter().map(|(name, value)| (name.as_str().into(), value.clone())).collect();
                self.map(out, "<Namespace {", &fields, depth)?;
                out.push('>');
            }
            Value::Loop(state) => {
                let _ = write!(out, "<LoopContext {}/{}>", state.index.get() + 1, state.items.len());
            }
            Value::View(view) => {
                let _ = write!(out, "{}(", view.kind());
                self.list(out, "[", &view.items(self.budget)?, "])", depth)?;
            }
            Value::Function(function) => match &**function {
                Function::Macro(Some(name), _) => {
                    let _ = write!(out, "<Macro '{name}'>");
                }
                Function::Macro(None, _) => out.push_str("<Macro anonymous>"),
                Function::Method(_, name) => return without_text(&format!("the method '{name}'")),
                Function::Global(name) => return without_text(&format!("the function '{name}'")),
                Function::Cycler(..) => return without_text("a cycler"),
                Function::Joiner(..) => return without_text("a joiner"),
            },
            Value::Stream(_) => return without_text("the result of a filter such as 'map' or 'select'"),
        }
        self.budget.memory(out.len() - before)
    }

    fn list(&self, out: &mut String, open: &str, items: &[Value], close: &str, depth: usize) -> Run<()> {
        out.push_str(open);
        for (i, item) in items.iter().enumerate() {
            out.push_str(if i > 0 { ", " } else { "" });
            self.write(out, item, depth + 1)?;
        }
        out.push_str(close);
        Ok(())
    }

    fn map(&self, out: &mut String, open: &str, entries: &[(Value, Value)], depth: usize) -> Run<()> {
        out.push_str(open);
        for (i, (key, value)) in entries.iter().enumerate() {
            out.push_str(if i > 0 { ", " } else { "" });
            self.write(out, key, depth + 1)?;
            out.push_str(": ");
            self.write(out, value, depth + 1)?;
        }
        out.push('}');
        Ok(())
    }
}

/// Returns the failure of a value that Python prints with its address in memory.
fn without_text<T>(what: &str) -> Run<T> {
    fail(format!("{what} has no text of its own; call it, or add the filter 'list' or 'join'"))
}

/// Returns a text in quotes, as Python's `ascii` writes it: with escapes for all characters outside ASCII.
pub(super) fn ascii(repr: &str) -> String {
    let mut out = String::with_capacity(repr.len());
    for c in repr.chars() {
        if c.is_ascii() { out.push(c) } else { escaped(&mut out, c) }
    }
    out
}

/// Writes a character as an escape.
pub(super) fn escaped(out: &mut String, c: char) {
    let _ = match c as u32 {
        code @ ..=0xFF => write!(out, "\\x{code:02x}"),
        code @ ..=0xFFFF => write!(out, "\\u{code:04x}"),
        code => write!(out, "\\U{code:08x}"),
    };
}

/// Writes a text in quotes, as Python's `repr` does.
pub(super) fn quoted(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if c == ' ' || is_printable(c) => out.push(c),
            c => escaped(out, c),
        }
    }
    out.push(quote);
}

/// Writes a float as Python does: with the fewest digits that give the same value, and with an exponent if it
/// is very small or very large.
pub(super) fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{x:e}");
    match scientific.split_once('e').and_then(|(digits, power)| Some((digits, power.parse::<i32>().ok()?))) {
        Some((digits, power)) if x != 0.0 && !(-4..16).contains(&power) => {
            let sign = if power < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", power.abs())
        }
        // Debug never writes an exponent for the numbers that are left, except for 1e-4 itself.
        _ if x != 0.0 && x.abs() < 1e-3 => format!("{x}"),
        _ => format!("{x:?}"),
    }
}
