//! JSON in the format of Python's `json.dumps`, for the `tojson` filter in chat templates.

use std::fmt::Write as _;

use super::arguments::{Arguments, count};
use super::budget::{Budget, MAX_LEVELS, too_deep};
use super::evaluate::Evaluator;
use super::fault::{Fault, Run, fail};
use super::operate::sorted;
use super::print;
use super::value::Value;

/// Implements transformers' filter `tojson(ensure_ascii=False, indent=None, separators=None,
/// sort_keys=False)`. Unlike Jinja's own filter, it does not escape HTML.
pub(super) fn tojson(run: &Evaluator<'_>, value: &Value, arguments: Arguments) -> Run<Value> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let arguments = arguments.of("tojson", names)?;
    let [ascii, indent, separators, sorted] =
        arguments.map(|argument| argument.filter(|value| !matches!(value, Value::None)));
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let indent = match indent {
        None => None,
        Some(Value::Text(text)) => Some(text.to_string()),
        Some(value) => match value.as_int() {
            Some(spaces) if spaces <= MAX_INDENT => Some(" ".repeat(count(spaces))),
            Some(spaces) => {
                return Err(Fault::limit(format!("tojson: indent is {spaces}, more than {MAX_INDENT}")));
            }
            None => return fail("tojson: indent must be a whole number or a string"),
        },
    };
    let (item, key) = match separators {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some(pair) => match pair.items(run.budget)?.as_slice() {
            [Value::Text(item), Value::Text(key)] => (item.to_string(), key.to_string()),
            _ => return fail("tojson: separators must be a pair of strings"),
        },
    };
    let writer =
        Writer { budget: run.budget, ascii: is_true(ascii), sorted: is_true(sorted), indent, item, key };
    let mut out = String::new();
    writer.value(&mut out, value, 0)?;
    Value::text(run.budget, out)
}

/// The most spaces per level, above which an indentation is an error.
const MAX_INDENT: i128 = 64;

/// A JSON writer with its format settings.
struct Writer<'a> {
    budget: &'a Budget,
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

impl Writer<'_> {
    fn value(&self, out: &mut String, value: &Value, depth: usize) -> Run<()> {
        if depth > MAX_LEVELS {
            return Err(too_deep());
        }
        self.budget.steps(1)?;
        match value {
            Value::None => out.push_str("null"),
            Value::Bool(truth) => out.push_str(if *truth { "true" } else { "false" }),
            Value::Int(_) | Value::Float(_) => out.push_str(&number(value)),
            Value::Text(text) | Value::Safe(text) => {
                self.budget.memory(text.len())?;
                self.text(out, text);
            }
            Value::List(items) | Value::Tuple(items) => {
                self.list(out, '[', ']', depth, &items.items, |out, item| self.value(out, item, depth + 1))?;
            }
            Value::Dict(dict) => {
                let mut keys: Vec<Value> = dict.entries.iter().map(|(key, _)| key.clone()).collect();
                if self.sorted {
                    keys = sorted(self.budget, keys.into_iter().map(|key| (key.clone(), key)).collect())?;
                }
                self.list(out, '{', '}', depth, &keys, |out, key| {
                    match key {
                        Value::Text(text) => self.text(out, text),
                        Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
                            out.push('"');
                            self.value(out, key, depth)?;
                            out.push('"');
                        }
                        other => {
                            return fail(format!(
                                "keys must be str, int, float, bool or None, not {}",
                                other.kind()
                            ));
                        }
                    }
                    out.push_str(&self.key);
                    match dict.get(key, self.budget)? {
                        Some(value) => self.value(out, value, depth + 1),
                        None => Ok(()),
                    }
                })?;
            }
            other => return fail(format!("Object of type {} is not JSON serializable", other.kind())),
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
        mut write: impl FnMut(&mut String, &Value) -> Run<()>,
    ) -> Run<()> {
        let before = out.len();
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
        self.budget.memory(out.len() - before)
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

/// Writes a number as Python's `json.dumps` does.
fn number(value: &Value) -> String {
    match value {
        Value::Float(x) if x.is_nan() => "NaN".to_owned(),
        Value::Float(x) if x.is_infinite() => if *x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        Value::Float(x) => print::float(*x),
        other => other.as_int().unwrap_or(0).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use crate::text::jinja::tests::printed;

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
    #[case(r"{1: 2, true: 3, none: 4, 2.5: 5} | tojson", r#"{"1": 3, "null": 4, "2.5": 5}"#)]
    fn values_are_written_as_python_writes_them(#[case] expression: &str, #[case] expected: &str) {
        assert_eq!(printed(expression).unwrap(), expected);
    }

    #[rstest]
    #[case("nothing | tojson", "Undefined is not JSON")]
    #[case("1 | tojson(separators=',')", "separators")]
    #[case("1 | tojson(indent=1.5)", "indent")]
    #[case("1 | tojson(width=3)", "width")]
    fn wrong_arguments_are_named(#[case] expression: &str, #[case] expected: &str) {
        let error = printed(expression).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
