//! Filters for texts. A value that is no text is written as Python's `str` writes it.

use super::super::format;
use super::super::letters::{self, Fill};
use super::super::text_methods::replaced;
use super::{Arguments, Evaluator, Run, Value, count, fail, int_or, json, needed};

/// Applies a filter for texts.
pub(super) fn apply(run: &Evaluator<'_>, name: &str, value: &Value, arguments: Arguments) -> Run<Value> {
    let budget = run.budget;
    if name == "tojson" {
        return json::tojson(run, value, arguments);
    }
    let text = run.printer().text(value)?.into_owned();
    budget.memory(text.len())?;
    let new = |text: String| Value::text(budget, text);
    match name {
        "format" => {
            let Arguments { positional, named } = arguments;
            if !positional.is_empty() && !named.is_empty() {
                return fail("can't handle positional and keyword arguments at the same time");
            }
            let arguments = if named.is_empty() {
                Value::tuple(budget, positional)?
            } else {
                Value::dict(budget, named.into_iter().map(|(name, value)| (Value::from(&*name), value)))?
            };
            new(format::percent(run, &text, &arguments)?)
        }
        "replace" => {
            let [old, with, most] = arguments.of("replace", ["old", "new", "count"])?;
            let written = |value: Value| Value::text(budget, run.printer().text(&value)?);
            let (old, with) =
                (written(needed("replace", "old", old)?)?, written(needed("replace", "new", with)?)?);
            replaced(run, &text, &old, &with, int_or("replace", most.as_ref(), -1)?)
        }
        "trim" => {
            let [chars] = arguments.of("trim", ["chars"])?;
            let chars = chars.as_ref().and_then(Value::as_text);
            new(letters::strip(&text, chars, true, true).to_owned())
        }
        "center" => {
            let [width] = arguments.of("center", ["width"])?;
            let width = count(int_or("center", width.as_ref(), 80)?);
            budget.memory(width)?;
            new(letters::fill(&text, width, ' ', Fill::Both { odd: true }))
        }
        "indent" => indented(run, text, arguments),
        "truncate" => truncated(run, text, arguments),
        "urlencode" => {
            budget.memory(3 * text.len())?;
            let pair = |(key, value): &(Value, Value)| -> Run<String> {
                let part = |value: &Value| Ok(letters::quote(&run.printer().text(value)?, true));
                Ok(format!("{}={}", part(key)?, part(value)?))
            };
            match value {
                Value::Dict(_) | Value::List(_) | Value::Tuple(_) => {
                    let pairs = run.pairs(value)?;
                    new(pairs.iter().map(pair).collect::<Run<Vec<_>>>()?.join("&"))
                }
                _ => new(letters::quote(&text, false)),
            }
        }
        _ => {
            let [] = arguments.of(name, [])?;
            match name {
                "string" | "safe" => new(text),
                "upper" => new(text.to_uppercase()),
                "lower" => new(text.to_lowercase()),
                "capitalize" => new(letters::capitalize(&text)),
                "title" => new(titled(&text)),
                "wordcount" => Ok(words(&text).into()),
                "e" | "escape" | "forceescape" => new(letters::escape(&text)),
                other => fail(format!("No filter named '{other}'.")),
            }
        }
    }
}

/// Indents the lines behind the first one.
fn indented(run: &Evaluator<'_>, text: String, arguments: Arguments) -> Run<Value> {
    let [width, first, blank] = arguments.of("indent", ["width", "first", "blank"])?;
    let width = match &width {
        Some(Value::Text(width)) => width.to_string(),
        width => {
            let width = count(int_or("indent", width.as_ref(), 4)?);
            run.budget.memory(width)?;
            " ".repeat(width)
        }
    };
    let truth = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let (first, blank) = (truth(first), truth(blank));
    let text = text + "\n";
    let lines = letters::lines(&text, false);
    run.budget.memory(lines.len().saturating_mul(width.len() + 17))?;
    let mut out = String::new();
    for (i, line) in lines.into_iter().enumerate() {
        out.push_str(if i > 0 { "\n" } else { "" });
        if (i > 0 && (blank || !line.is_empty())) || (i == 0 && first) {
            out.push_str(&width);
        }
        out.push_str(line);
    }
    Value::text(run.budget, out)
}

/// Cuts a text that is longer than a length, behind a word if it can.
fn truncated(run: &Evaluator<'_>, text: String, arguments: Arguments) -> Run<Value> {
    let [length, kill, end, leeway] = arguments.of("truncate", ["length", "killwords", "end", "leeway"])?;
    let length = count(int_or("truncate", length.as_ref(), 255)?);
    let leeway = count(int_or("truncate", leeway.as_ref(), 5)?);
    let end = end.as_ref().and_then(Value::as_text).unwrap_or("...");
    if text.chars().count() <= length.saturating_add(leeway) {
        return Value::text(run.budget, text);
    }
    let cut: String = text.chars().take(length.saturating_sub(end.chars().count())).collect();
    let cut = if kill.is_some_and(|kill| kill.is_true()) {
        &cut
    } else {
        cut.rsplit_once(' ').map_or(&*cut, |(cut, _)| cut)
    };
    Value::text(run.budget, format!("{cut}{end}"))
}

/// Writes words as Jinja2's filter `title` does: words begin at white space, hyphens and opening brackets.
fn titled(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut begins = true;
    for c in text.chars() {
        if begins {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
        begins = letters::is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
    }
    out
}

/// Returns the number of runs of letters, digits and underscores.
fn words(text: &str) -> usize {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty()).count()
}
