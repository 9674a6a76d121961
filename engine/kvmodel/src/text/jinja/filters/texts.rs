//! Filters for texts. A value that is no text is written as Python's `str` writes it.

use super::super::arguments::whole_or;
use super::super::letters::{self, Fill};
use super::super::text_methods::replaced;
use super::super::{characters, format, operate};
use super::{Arguments, Evaluator, Run, Value, count, fail, int_or, json, needed, text_of};

/// Applies a filter for texts.
pub(super) fn apply(run: &Evaluator<'_>, name: &str, value: &Value, arguments: Arguments) -> Run<Value> {
    let budget = run.budget;
    if name == "tojson" {
        return json::tojson(run, value, arguments);
    }
    let text = run.printer().text(value)?.into_owned();
    budget.memory(text.len())?;
    let safe = matches!(value, Value::Safe(_));
    // Filters that call a method of the text keep its mark.
    let new = |text: String| match name {
        "safe" | "e" | "escape" | "forceescape" => marked(run, text),
        "capitalize" | "center" | "lower" | "string" | "trim" | "upper" if safe => marked(run, text),
        _ => Value::text(budget, text),
    };
    if safe && ["format", "indent", "truncate"].contains(&name) {
        return fail(operate::safe_use(&format!("the filter '{name}'")));
    }
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
            let chars = match &chars {
                None | Some(Value::None) => None,
                Some(chars) => Some(text_of("trim", chars)?),
            };
            budget.steps(chars.map_or(0, str::len) >> 4)?;
            new(letters::strip(&text, chars, true, true).to_owned())
        }
        "center" => {
            let [width] = arguments.of("center", ["width"])?;
            let width = count(whole_or("center", width.as_ref(), 80)?);
            budget.memory(width)?;
            new(letters::fill(&text, width, ' ', Fill::Both { odd: true }))
        }
        "indent" => {
            text_of("indent", value)?;
            indented(run, text, arguments)
        }
        "truncate" => truncated(run, value, &text, arguments),
        "urlencode" => {
            budget.memory(3 * text.len())?;
            let pair = |(key, value): &(Value, Value)| -> Run<String> {
                let part = |value: &Value| Ok(letters::quote(&run.printer().text(value)?, true));
                Ok(format!("{}={}", part(key)?, part(value)?))
            };
            match value {
                _ if value.as_text().is_none() && value.is_iterable() => {
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
                "e" | "escape" if safe => new(text),
                "e" | "escape" | "forceescape" => new(letters::escape(&text)),
                other => fail(format!("No filter named '{other}'.")),
            }
        }
    }
}

/// Creates a text that is marked as safe, and takes its memory.
fn marked(run: &Evaluator<'_>, text: String) -> Run<Value> {
    run.budget.memory(text.len() + 32)?;
    Ok(Value::Safe(text.into()))
}

/// Indents the lines behind the first one.
fn indented(run: &Evaluator<'_>, text: String, arguments: Arguments) -> Run<Value> {
    let [width, first, blank] = arguments.of("indent", ["width", "first", "blank"])?;
    let width = match &width {
        Some(Value::Text(width)) => width.to_string(),
        width => {
            let width = count(whole_or("indent", width.as_ref(), 4)?);
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
fn truncated(run: &Evaluator<'_>, value: &Value, text: &str, arguments: Arguments) -> Run<Value> {
    let [length, kill, end, leeway] = arguments.of("truncate", ["length", "killwords", "end", "leeway"])?;
    let (length, leeway) =
        (whole_or("truncate", length.as_ref(), 255)?, int_or("truncate", leeway.as_ref(), 5)?);
    let end = end.as_ref().and_then(Value::as_text).unwrap_or("...");
    let least = end.chars().count() as i128;
    if length < least || leeway < 0 {
        return fail(format!("truncate: a length of at least {least} is needed, and a leeway of at least 0"));
    }
    let (length, leeway) = (count(length), count(leeway));
    // Jinja2 returns any value that is short enough as it is.
    match value.counted_len(run.budget)? {
        Some(len) if len <= length.saturating_add(leeway) => return Ok(value.clone()),
        Some(_) => {
            text_of("truncate", value)?;
        }
        None => return fail(format!("object of type '{}' has no len()", value.kind())),
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
    let ends = |c: char| letters::is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
    for word in text.split_inclusive(ends) {
        let mut chars = word.chars();
        if let Some(first) = chars.next() {
            out.extend(first.to_uppercase());
            out.push_str(&chars.as_str().to_lowercase());
        }
    }
    out
}

/// Returns the number of runs of letters, digits and underscores.
fn words(text: &str) -> usize {
    text.split(|c: char| !(characters::is_alphanumeric(c) || c == '_'))
        .filter(|word| !word.is_empty())
        .count()
}
