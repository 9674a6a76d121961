//! JSON in the format of Python's `json.dumps`, for the `tojson` filter in chat templates.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Implements transformers' filter `tojson(ensure_ascii=False, indent=None, separators=None,
/// sort_keys=False)`. Unlike Jinja's own filter, it does not escape HTML.
#[allow(clippy::needless_pass_by_value, reason = "the signature of a filter")]
pub(super) fn tojson(value: Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let argument = |place: usize, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = named.get(name)?;
        Ok(named.or_else(|| positional.get(place).cloned()).filter(|value| !value.is_none()))
    };
    let indent = match argument(1, "indent")? {
        None => None,
        Some(value) => Some(match (usize::try_from(value.clone()), value.as_str()) {
            (Ok(spaces), _) => " ".repeat(spaces),
            (Err(_), Some(text)) => text.to_owned(),
            (Err(_), None) => {
                return Err(wrong(&format!("indent is {value}; it must be a number or a string")));
            }
        }),
    };
    let (item, key) = match argument(2, "separators")? {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some(pair) => match pair.try_iter()?.collect::<Vec<_>>().as_slice() {
            [item, key] => (item.to_string(), key.to_string()),
            _ => return Err(wrong(&format!("separators is {pair}; it must be a pair of strings"))),
        },
    };
    let writer = Writer {
        ascii: argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true()),
        sorted: argument(3, "sort_keys")?.is_some_and(|value| value.is_true()),
        indent,
        item,
        key,
    };
    named.assert_all_used()?;
    let mut out = String::new();
    writer.value(&mut out, &value, 0)?;
    Ok(out)
}

fn wrong(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"))
}

/// A JSON writer with its format settings.
struct Writer {
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

impl Writer {
    fn value(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list(out, '[', ']', depth, &items, |out, item| self.value(out, item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.list(out, '{', '}', depth, &keys, |out, key| {
                    match key.kind() {
                        ValueKind::String => self.text(out, key.as_str().unwrap_or_default()),
                        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                            out.push('"');
                            self.value(out, key, depth)?;
                            out.push('"');
                        }
                        other => return Err(wrong(&format!("a key is a {other}"))),
                    }
                    out.push_str(&self.key);
                    self.value(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            other => return Err(wrong(&format!("a value is {other}, which JSON does not have"))),
        }
        Ok(())
    }

    fn list(
        &self,
        out: &mut String,
        open: char,
        close: char,
        depth: usize,
        items: &[Value],
        mut write: impl FnMut(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (i, item) in items.iter().enumerate() {
            if i > 0 {
                out.push_str(&self.item);
            }
            self.line(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            self.line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    /// Starts a new line, if lines are indented.
    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    }

    fn text(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Writes a number as Python does: floats with the fewest digits that give the same value, and with an
/// exponent if they are very small or very large.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(x) = f64::try_from(value.clone()) else { return value.to_string() };
    if x.is_nan() {
        return "NaN".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{x:e}");
    match scientific.split_once('e').and_then(|(digits, power)| Some((digits, power.parse::<i32>().ok()?))) {
        Some((digits, power)) if x != 0.0 && !(-4..16).contains(&power) => {
            let sign = if power < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", power.abs())
        }
        _ => format!("{x:?}"),
    }
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;
    use rstest::rstest;

    use super::*;

    // The expected strings are what Python 3.11 prints for json.dumps of the same values and arguments.
    #[rstest]
    #[case(r"{'b': [1, 2.5, none, true], 'a': '<&>'} | tojson", r#"{"b": [1, 2.5, null, true], "a": "<&>"}"#)]
    #[case(r"{'b': 1, 'a': [2, 3]} | tojson(separators=(',', ':'))", r#"{"b":1,"a":[2,3]}"#)]
    #[case(r"{'b': 1, 'a': 2} | tojson(sort_keys=true)", r#"{"a": 2, "b": 1}"#)]
    #[case(
        r"{'b': 1, 'a': [2, []]} | tojson(indent=2)",
        "{\n  \"b\": 1,\n  \"a\": [\n    2,\n    []\n  ]\n}"
    )]
    #[case(r"[1, {}] | tojson(indent='\t')", "[\n\t1,\n\t{}\n]")]
    #[case(r"[1, 2] | tojson(false, 1)", "[\n 1,\n 2\n]")]
    #[case(r"[1] | tojson(indent=0)", "[\n1\n]")]
    #[case(r#"'é😀\n"\\' | tojson"#, r#""é😀\n\"\\""#)]
    #[case(r"'é😀~' | tojson(ensure_ascii=true)", r#""\u00e9\ud83d\ude00~""#)]
    #[case(
        r"[1.0, 0.1, 1e16, 1e-5, 123456789012.5, -0.0001, 0.0] | tojson",
        "[1.0, 0.1, 1e+16, 1e-05, 123456789012.5, -0.0001, 0.0]"
    )]
    #[case(r"{1: 2, true: 3} | tojson", r#"{"1": 2, "true": 3}"#)]
    fn values_are_written_as_python_writes_them(#[case] expression: &str, #[case] expected: &str) {
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        let written = environment.render_str(&format!("{{{{ {expression} }}}}"), ()).unwrap();
        assert_eq!(written, expected);
    }

    #[rstest]
    #[case("nothing | tojson", "undefined")]
    #[case("1 | tojson(separators=',')", "separators")]
    #[case("1 | tojson(indent=1.5)", "indent")]
    #[case("1 | tojson(width=3)", "width")]
    fn wrong_arguments_are_named(#[case] expression: &str, #[case] expected: &str) {
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        let error = environment.render_str(&format!("{{{{ {expression} }}}}"), ()).unwrap_err();
        assert!(format!("{error:#}").contains(expected), "{error:#}");
    }
}
