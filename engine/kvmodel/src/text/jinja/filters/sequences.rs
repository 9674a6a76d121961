//! Filters for lists, dictionaries and other values with elements.

use std::cmp::Ordering;

use super::super::iterables::Stream;
use super::super::operate::{self, Operator, binary, compare, sorted};
use super::super::predicates;
use super::super::value::check_key;
use super::{Arguments, Evaluator, Run, Value, apply as apply_filter, count, fail, int_or, needed, text_of};

/// Applies a filter for values with elements.
pub(super) fn apply(run: &mut Evaluator<'_>, name: &str, value: &Value, arguments: Arguments) -> Run<Value> {
    let budget = run.budget;
    match name {
        "length" | "count" => match value.counted_len(run.budget)? {
            Some(len) => Ok(len.into()),
            None => fail(format!("object of type '{}' has no len()", value.kind())),
        },
        "list" => Value::list(budget, value.items(budget)?),
        "first" | "last" => {
            let item = match (value, name) {
                (Value::Stream(stream), "first") => stream.next(),
                (Value::Stream(_), _) => return fail("'generator' object is not reversible"),
                (value, "first") => value.items(budget)?.into_iter().next(),
                (value, _) => value.items(budget)?.pop(),
            };
            Ok(item.unwrap_or_else(|| none_of(&format!("No {name} item, sequence was empty."))))
        }
        "reverse" => {
            let items = value.items(budget)?.into_iter().rev();
            match value {
                Value::Safe(_) => fail(operate::safe_use("the filter 'reverse'")),
                Value::Text(text) => Value::text(budget, text.chars().rev().collect::<String>()),
                // What Python cannot read backwards is a list first.
                Value::Stream(_) => Value::list(budget, items.collect()),
                _ => Stream::value(budget, items.collect()),
            }
        }
        "items" => match value {
            Value::Undefined(_) => Stream::value(budget, Vec::new()),
            Value::Dict(dict) => {
                let pair =
                    |(key, value): &(Value, Value)| Value::tuple(budget, vec![key.clone(), value.clone()]);
                Stream::value(budget, dict.entries.iter().map(pair).collect::<Run<_>>()?)
            }
            _ => fail("Can only get item pairs from a mapping."),
        },
        "join" => {
            let [separator, attribute] = arguments.of("join", ["d", "attribute"])?;
            joined(run, value, separator, attribute.as_ref())
        }
        "attr" => {
            let [field] = arguments.of("attr", ["name"])?;
            match value {
                Value::Dict(_) => Ok(none_of("a dictionary has no attributes")),
                value => run.attribute(value, text_of("attr", &needed("attr", "name", field)?)?),
            }
        }
        "map" => map(run, value, arguments),
        "select" | "reject" | "selectattr" | "rejectattr" => select(run, name, value, arguments),
        "sort" | "dictsort" | "unique" | "min" | "max" | "sum" | "groupby" => {
            ordering(run, name, value, arguments)
        }
        "batch" => {
            let [width, with] = arguments.of("batch", ["linecount", "fill_with"])?;
            let width = int_or("batch", Some(&needed("batch", "linecount", width)?), 1)?;
            let items = value.items(budget)?;
            let mut rows = Vec::new();
            // Jinja2 ends a row when it has as many elements as asked for: never, if that is none.
            if width == 0 && !items.is_empty() {
                rows.push(Value::list(budget, Vec::new())?);
            }
            let width = if width > 0 { count(width) } else { usize::MAX };
            for row in items.chunks(width) {
                let mut row = row.to_vec();
                if let Some(with) = with.as_ref().filter(|with| !matches!(with, Value::None))
                    && width < usize::MAX
                {
                    budget.memory(width.saturating_mul(size_of::<Value>()))?;
                    row.resize(width, with.clone());
                }
                rows.push(Value::list(budget, row)?);
            }
            Stream::value(budget, rows)
        }
        _ => {
            let [slices, with] = arguments.of("slice", ["slices", "fill_with"])?;
            let slices = int_or("slice", Some(&needed("slice", "slices", slices)?), 1)?;
            if slices == 0 {
                return fail("integer division or modulo by zero");
            }
            let slices = count(slices);
            budget.memory(slices.saturating_mul(64))?;
            let items = value.items(budget)?;
            let (each, more) = (items.len() / slices.max(1), items.len() % slices.max(1));
            let (mut rows, mut at) = (Vec::new(), 0);
            for i in 0..slices {
                let len = each + usize::from(i < more);
                let mut row = items[at..at + len].to_vec();
                at += len;
                if let Some(with) = with.as_ref().filter(|with| !matches!(with, Value::None) && i >= more) {
                    row.push(with.clone());
                }
                rows.push(Value::list(budget, row)?);
            }
            Stream::value(budget, rows)
        }
    }
}

/// Applies a filter that orders or compares elements by keys.
fn ordering(run: &Evaluator<'_>, name: &str, value: &Value, arguments: Arguments) -> Run<Value> {
    let budget = run.budget;
    match name {
        "sort" => {
            let [reverse, cases, attribute] =
                arguments.of("sort", ["reverse", "case_sensitive", "attribute"])?;
            let reverse = is_true(reverse);
            let keys = Keys::new(attribute, cases);
            let items = value.items(budget)?;
            let keyed = keyed(run, items, reverse, |item| {
                // Jinja2 compares lists of keys, in which missing ones are equal.
                Value::tuple(budget, vec![keys.of(run, item)?])
            })?;
            ordered(run, keyed, reverse)
        }
        "dictsort" => {
            let [cases, by, reverse] = arguments.of("dictsort", ["case_sensitive", "by", "reverse"])?;
            let reverse = is_true(reverse);
            let by = match by.as_ref().map_or(Some("key"), Value::as_text) {
                Some("key") => 0,
                Some("value") => 1,
                _ => return fail("You can only sort by either \"key\" or \"value\""),
            };
            let keys = Keys::new(Some(Value::Int(by)), cases);
            let Value::Dict(_) = operate::defined(value)? else {
                return fail(format!("'{}' object has no attribute 'items'", value.kind()));
            };
            let pairs =
                run.pairs(value)?.into_iter().map(|(key, value)| Value::tuple(budget, vec![key, value]));
            let pairs = pairs.collect::<Run<Vec<_>>>()?;
            let keyed = keyed(run, pairs, reverse, |pair| keys.of(run, pair))?;
            ordered(run, keyed, reverse)
        }
        "unique" => {
            let [cases, attribute] = arguments.of("unique", ["case_sensitive", "attribute"])?;
            let keys = Keys::new(attribute, cases);
            let (mut seen, mut kept): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
            'items: for item in value.items(budget)? {
                let key = keys.of(run, &item)?;
                check_key(&key)?;
                for old in &seen {
                    if old.equals(&key, budget)? {
                        continue 'items;
                    }
                }
                seen.push(key);
                kept.push(item);
            }
            Stream::value(budget, kept)
        }
        "min" | "max" => {
            let [cases, attribute] = arguments.of(name, ["case_sensitive", "attribute"])?;
            let keys = Keys::new(attribute, cases);
            let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
            let mut best: Option<(Value, Value)> = None;
            for item in value.items(budget)? {
                let key = keys.of(run, &item)?;
                let better = match &best {
                    None => true,
                    Some((old, _)) => compare(budget, &key, old)? == Some(wanted),
                };
                best = if better { Some((key, item)) } else { best };
            }
            Ok(best.map_or_else(|| none_of("No aggregated item, sequence was empty."), |(_, item)| item))
        }
        "sum" => {
            let [attribute, start] = arguments.of("sum", ["attribute", "start"])?;
            let keys = Keys { fold: false, ..Keys::new(attribute, None) };
            let mut sum = start.unwrap_or(Value::Int(0));
            if matches!(sum, Value::Text(_)) {
                return fail("sum() can't sum strings [use the filter 'join' instead]");
            }
            for item in value.items(budget)? {
                sum = binary(budget, Operator::Add, &sum, &keys.of(run, &item)?)?;
            }
            Ok(sum)
        }
        _ => {
            let [attribute, default, cases] =
                arguments.of("groupby", ["attribute", "default", "case_sensitive"])?;
            grouped(run, value, &Keys::new(attribute, cases), default.as_ref())
        }
    }
}

fn none_of(words: &str) -> Value {
    Value::Undefined(words.into())
}

fn is_true(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}

/// The keys by which a filter orders or compares elements: an attribute, in lower case unless cases count.
struct Keys {
    attribute: Option<Value>,
    fold: bool,
}

impl Keys {
    fn new(attribute: Option<Value>, case_sensitive: Option<Value>) -> Self {
        Self {
            attribute: attribute.filter(|value| !matches!(value, Value::None)),
            fold: !is_true(case_sensitive),
        }
    }

    fn of(&self, run: &Evaluator<'_>, item: &Value) -> Run<Value> {
        let key = match &self.attribute {
            None => item.clone(),
            Some(Value::Text(names)) if names.contains(',') => {
                let keys = names.split(',').map(|name| self.folded(run, attribute(run, item, &name.into())?));
                return Value::tuple(run.budget, keys.collect::<Run<_>>()?);
            }
            Some(name) => attribute(run, item, name)?,
        };
        self.folded(run, key)
    }

    fn folded(&self, run: &Evaluator<'_>, key: Value) -> Run<Value> {
        match key {
            Value::Text(text) if self.fold => Value::text(run.budget, text.to_lowercase()),
            key => Ok(key),
        }
    }
}

/// Returns an attribute whose name may have several parts: `function.name` or `0.text`.
fn attribute(run: &Evaluator<'_>, item: &Value, name: &Value) -> Run<Value> {
    let Value::Text(name) = name else { return run.item(item, name) };
    let mut value = item.clone();
    for part in name.split('.') {
        let key = part.parse::<u32>().map_or_else(|_| Value::from(part), |n| Value::Int(n.into()));
        value = run.item(&value, &key)?;
    }
    Ok(value)
}

/// Returns the elements with their keys.
fn keyed(
    run: &Evaluator<'_>,
    mut items: Vec<Value>,
    reverse: bool,
    key: impl Fn(&Value) -> Run<Value>,
) -> Run<Vec<(Value, Value)>> {
    // Sorting in reverse keeps the order of equal elements, as in Python.
    if reverse {
        items.reverse();
    }
    run.budget.steps(items.len())?;
    items.into_iter().map(|item| Ok((key(&item)?, item))).collect()
}

fn ordered(run: &Evaluator<'_>, keyed: Vec<(Value, Value)>, reverse: bool) -> Run<Value> {
    let mut items = sorted(run.budget, keyed)?;
    if reverse {
        items.reverse();
    }
    Value::list(run.budget, items)
}

fn grouped(run: &Evaluator<'_>, value: &Value, keys: &Keys, default: Option<&Value>) -> Run<Value> {
    let budget = run.budget;
    let raw = Keys { attribute: keys.attribute.clone(), fold: false };
    let mut keyed = Vec::new();
    for item in value.items(budget)? {
        let missing = |key: Value| match default {
            Some(default) if key.is_undefined() => default.clone(),
            _ => key,
        };
        let (key, shown) = (missing(keys.of(run, &item)?), missing(raw.of(run, &item)?));
        keyed.push((key.clone(), Value::tuple(budget, vec![key, shown, item])?));
    }
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for entry in sorted(budget, keyed)? {
        let Ok([key, shown, item]) = <[Value; 3]>::try_from(entry.items(budget)?) else { continue };
        match groups.last_mut() {
            Some((last, _, items)) if last.equals(&key, budget)? => items.push(item),
            _ => groups.push((key, shown, vec![item])),
        }
    }
    let group = |(_, shown, items): (Value, Value, Vec<Value>)| {
        Value::tuple(budget, vec![shown, Value::list(budget, items)?])
    };
    Value::list(budget, groups.into_iter().map(group).collect::<Run<_>>()?)
}

fn joined(run: &Evaluator<'_>, value: &Value, separator: Option<Value>, by: Option<&Value>) -> Run<Value> {
    let separator = separator.unwrap_or_else(|| "".into());
    let separator = run.printer().text(&separator)?;
    let mut out = String::new();
    for (i, item) in value.items(run.budget)?.iter().enumerate() {
        let item = match by {
            Some(name) if !matches!(name, Value::None) => attribute(run, item, name)?,
            _ => item.clone(),
        };
        let item = run.printer().text(&item)?;
        run.budget.memory(item.len() + separator.len())?;
        out.push_str(if i > 0 { &separator } else { "" });
        out.push_str(&item);
    }
    Value::text(run.budget, out)
}

fn map(run: &mut Evaluator<'_>, value: &Value, arguments: Arguments) -> Run<Value> {
    let Arguments { mut positional, mut named } = arguments;
    let items = if value.is_true() { value.items(run.budget)? } else { Vec::new() };
    let mut out = Vec::with_capacity(items.len());
    if positional.is_empty() {
        let Some(at) = named.iter().position(|(name, _)| name == "attribute") else {
            return fail("map requires a filter argument");
        };
        let name = named.remove(at).1;
        if let Some((name, _)) = named.iter().find(|(name, _)| name != "default") {
            return fail(format!("Unexpected keyword argument '{name}'"));
        }
        let default = named.pop().map(|(_, value)| value);
        for item in &items {
            let found = attribute(run, item, &name)?;
            out.push(default.clone().filter(|_| found.is_undefined()).unwrap_or(found));
        }
    } else {
        let filter = positional.remove(0);
        let filter = text_of("map", &filter)?;
        for item in items {
            let arguments = Arguments { positional: positional.clone(), named: named.clone() };
            out.push(apply_filter(run, filter, item, arguments)?);
        }
    }
    Stream::value(run.budget, out)
}

fn select(run: &Evaluator<'_>, name: &str, value: &Value, arguments: Arguments) -> Run<Value> {
    let mut arguments = arguments.positional.into_iter();
    let by = if name.ends_with("attr") { Some(needed(name, "attribute", arguments.next())?) } else { None };
    let test = arguments.next();
    let rest: Vec<Value> = arguments.collect();
    let wanted = name.starts_with("select");
    let mut kept = Vec::new();
    let items = if value.is_true() { value.items(run.budget)? } else { Vec::new() };
    for item in items {
        run.budget.steps(1)?;
        let tested = match &by {
            Some(name) => attribute(run, &item, name)?,
            None => item.clone(),
        };
        let holds = match &test {
            None => tested.is_true(),
            Some(test) => predicates::holds(run, text_of(name, test)?, &tested, &rest)?,
        };
        kept.extend((holds == wanted).then_some(item));
    }
    Stream::value(run.budget, kept)
}
