//! The methods of Python's `str`.

use super::arguments::{Arguments, count, int_or, named_by, needed, text_of, whole_or};
use super::budget::Budget;
use super::evaluate::Evaluator;
use super::fault::{Run, fail};
use super::letters::{self, Fill, is_space};
use super::operate;
use super::value::Value;
use super::{characters, format, translation};

/// The methods of texts.
pub(super) const METHODS: [&str; 45] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];

/// The methods whose arguments can be given by name.
const WITH_NAMES: [&str; 5] = ["expandtabs", "format", "rsplit", "split", "splitlines"];

/// Calls a method of a text.
pub(super) fn call(run: &mut Evaluator<'_>, text: &str, method: &str, arguments: Arguments) -> Run<Value> {
    let budget = run.budget;
    // Every method reads the text and most make a copy, which case mappings may make three times as long.
    budget.memory(text.len())?;
    if !arguments.named.is_empty() && !WITH_NAMES.contains(&method) {
        return fail(format!("str.{method}() takes no keyword arguments"));
    }
    let new = |text: String| Value::text(budget, text);
    match method {
        "format" => {
            let formatted = format::braces(run, text, &arguments)?;
            return Value::text(run.budget, formatted);
        }
        "format_map" => {
            let [fields] = arguments.of(method, ["mapping"])?;
            let named = named_by(&needed(method, "mapping", fields)?)?;
            let formatted = format::braces(run, text, &Arguments { positional: Vec::new(), named })?;
            return Value::text(run.budget, formatted);
        }
        "maketrans" => return translation::table(run, arguments),
        "translate" => {
            let [table] = arguments.of(method, ["table"])?;
            return translation::translated(run, text, &needed(method, "table", table)?);
        }
        "join" => {
            let [items] = arguments.of("join", ["iterable"])?;
            let items = needed("join", "iterable", items)?.items(budget)?;
            let mut joined = String::new();
            for (i, item) in items.iter().enumerate() {
                let item = text_of("sequence item of join", item)?;
                budget.memory(item.len() + text.len())?;
                joined.push_str(if i > 0 { text } else { "" });
                joined.push_str(item);
            }
            return new(joined);
        }
        "replace" => {
            let [old, new, most] = arguments.of("replace", ["old", "new", "count"])?;
            let (old, new) = (needed("replace", "old", old)?, needed("replace", "new", new)?);
            let most = whole_or("replace", most.as_ref(), -1)?;
            return replaced(run, text, &old, &new, most);
        }
        "split" | "rsplit" => {
            let [separator, most] = arguments.of(method, ["sep", "maxsplit"])?;
            let most = whole_or(method, most.as_ref(), -1)?;
            let most = (most >= 0).then(|| count(most));
            let separator = optional_text(method, separator.as_ref())?;
            if separator == Some("") {
                return fail("empty separator");
            }
            let split = if method == "split" { letters::split } else { letters::rsplit };
            return Value::texts(budget, split(text, separator, most));
        }
        "partition" | "rpartition" => {
            let [separator] = arguments.of(method, ["sep"])?;
            let separator = needed(method, "sep", separator)?;
            let separator = text_of(method, &separator)?;
            if separator.is_empty() {
                return fail("empty separator");
            }
            let parts = match method {
                "partition" => text.split_once(separator).map_or([text, "", ""], |(a, b)| [a, separator, b]),
                _ => text.rsplit_once(separator).map_or(["", "", text], |(a, b)| [a, separator, b]),
            };
            return Value::tuple(budget, parts.map(Value::from).to_vec());
        }
        "find" | "rfind" | "index" | "rindex" | "count" | "startswith" | "endswith" => {
            return search(run, text, method, arguments);
        }
        "center" | "ljust" | "rjust" | "zfill" => return filled(run, text, method, arguments),
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = arguments.of(method, ["chars"])?;
            let chars = optional_text(method, chars.as_ref())?;
            budget.steps(chars.map_or(0, str::len) >> 4)?;
            return new(letters::strip(text, chars, method != "rstrip", method != "lstrip").to_owned());
        }
        "removeprefix" | "removesuffix" => {
            let [part] = arguments.of(method, ["fix"])?;
            let part = needed(method, "fix", part)?;
            let part = text_of(method, &part)?;
            let rest =
                if method == "removeprefix" { text.strip_prefix(part) } else { text.strip_suffix(part) };
            return new(rest.unwrap_or(text).to_owned());
        }
        "splitlines" => {
            let [keep] = arguments.of(method, ["keepends"])?;
            return Value::texts(budget, letters::lines(text, keep.is_some_and(|keep| keep.is_true())));
        }
        "expandtabs" => {
            let [size] = arguments.of(method, ["tabsize"])?;
            let size = count(whole_or(method, size.as_ref(), 8)?);
            budget.memory(text.matches('\t').count().saturating_mul(size))?;
            return new(expanded(text, size));
        }
        _ => {}
    }
    let [] = arguments.of(method, [])?;
    alone(budget, text, method)
}

/// Calls a method that has no arguments.
fn alone(budget: &Budget, text: &str, method: &str) -> Run<Value> {
    let new = |text: String| Value::text(budget, text);
    let every = |test: fn(char) -> bool| Ok(Value::Bool(!text.is_empty() && text.chars().all(test)));
    match method {
        "upper" => new(text.to_uppercase()),
        "lower" => new(text.to_lowercase()),
        "casefold" => new(letters::casefold(text)),
        "capitalize" => new(letters::capitalize(text)),
        "title" => new(letters::title(text)),
        "swapcase" => new(letters::swapcase(text)),
        "isalnum" => every(characters::is_alphanumeric),
        "isalpha" => every(characters::is_letter),
        "isdecimal" => every(characters::is_decimal),
        "isdigit" => every(characters::is_digit),
        "isnumeric" => every(characters::is_numeric),
        "isspace" => every(is_space),
        "isascii" => Ok(text.is_ascii().into()),
        "isprintable" => Ok(text.chars().all(|c| c == ' ' || characters::is_printable(c)).into()),
        "islower" => Ok(letters::is_lower(text).into()),
        "isupper" => Ok(letters::is_upper(text).into()),
        "istitle" => Ok(letters::is_title(text).into()),
        other => fail(format!("'str object' has no attribute '{other}'")),
    }
}

fn optional_text<'a>(what: &str, value: Option<&'a Value>) -> Run<Option<&'a str>> {
    match value {
        None | Some(Value::None) => Ok(None),
        Some(value) => text_of(what, value).map(Some),
    }
}

/// Replaces up to `most` occurrences; a negative number replaces all.
pub(super) fn replaced(run: &Evaluator<'_>, text: &str, old: &Value, new: &Value, most: i128) -> Run<Value> {
    let (old, new) = (text_of("replace", old)?, text_of("replace", new)?);
    let most = (most >= 0).then(|| count(most));
    let found = if old.is_empty() { text.chars().count() + 1 } else { text.matches(old).count() };
    let found = most.map_or(found, |most| found.min(most));
    run.budget.memory(text.len().saturating_add(found.saturating_mul(new.len())))?;
    Value::text(run.budget, letters::replace(text, old, new, most))
}

fn expanded(text: &str, size: usize) -> String {
    let mut out = String::with_capacity(text.len());
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' if size > 0 => {
                let width = size - column % size;
                out.extend(std::iter::repeat_n(' ', width));
                column += width;
            }
            '\t' => {}
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    out
}

fn filled(run: &Evaluator<'_>, text: &str, method: &str, arguments: Arguments) -> Run<Value> {
    let [width, with] = arguments.of(method, ["width", "fillchar"])?;
    let width = count(whole_or(method, Some(&needed(method, "width", width)?), 0)?);
    let with = optional_text(method, with.as_ref())?.unwrap_or(if method == "zfill" { "0" } else { " " });
    let mut chars = with.chars();
    let (Some(with), None) = (chars.next(), chars.next()) else {
        return fail("the fill character must be exactly one character long");
    };
    run.budget.memory(width.saturating_mul(with.len_utf8()))?;
    let sign = text.chars().next().filter(|c| method == "zfill" && matches!(c, '+' | '-'));
    let filled = match (method, sign) {
        ("zfill", Some(sign)) => {
            format!("{sign}{}", letters::fill(&text[1..], width.saturating_sub(1), with, Fill::Left))
        }
        ("center", _) => letters::fill(text, width, with, Fill::Both { odd: true }),
        ("ljust", _) => letters::fill(text, width, with, Fill::Right),
        _ => letters::fill(text, width, with, Fill::Left),
    };
    Value::text(run.budget, filled)
}

/// Calls a method that looks for a part of a text between two positions.
fn search(run: &Evaluator<'_>, text: &str, method: &str, arguments: Arguments) -> Run<Value> {
    let [part, start, end] = arguments.of(method, ["sub", "start", "end"])?;
    let part = needed(method, "sub", part)?;
    let whole = start.is_none() && end.is_none();
    let len = text.chars().count() as i128;
    let place = |bound: Option<&Value>, absent: i128| -> Run<i128> {
        let bound = int_or(method, bound, absent)?;
        Ok(if bound < 0 { (bound + len).max(0) } else { bound.min(len.max(bound)) })
    };
    let (start, end) = (place(start.as_ref(), 0)?, place(end.as_ref(), len)?.min(len));
    let within = match operate::slice(run.budget, &text.into(), Some(start), Some(end), None)? {
        _ if whole => text.into(),
        Value::Text(within) => within,
        _ => "".into(),
    };
    let inside = start <= len && start <= end.max(start);
    if matches!(method, "startswith" | "endswith") {
        let parts = match &part {
            Value::Tuple(parts) => parts.items.clone(),
            one => vec![one.clone()],
        };
        for part in &parts {
            let part = text_of(method, part)?;
            run.budget.steps(1 + (part.len().min(text.len()) >> 10))?;
            let fits = start <= len && (start <= end || !part.is_empty());
            if fits
                && (if method == "startswith" { within.starts_with(part) } else { within.ends_with(part) })
            {
                return Ok(true.into());
            }
        }
        return Ok(false.into());
    }
    let part = text_of(method, &part)?;
    if method == "count" {
        let found = if part.is_empty() { within.chars().count() + 1 } else { within.matches(part).count() };
        return Ok(if inside && start <= end { found.into() } else { 0.into() });
    }
    let at = if method.starts_with('r') { within.rfind(part) } else { within.find(part) };
    match at.filter(|_| inside && start <= end) {
        Some(at) => Ok(Value::Int(start + within[..at].chars().count() as i128)),
        None if method.ends_with("find") => Ok(Value::Int(-1)),
        None => fail("substring not found"),
    }
}
