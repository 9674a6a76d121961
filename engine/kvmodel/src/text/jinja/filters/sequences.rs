//! Filters for lists, dictionaries and other values with elements.

use std::cmp::Ordering;

use super::super::arguments::whole_or;
use super::super::arithmetic::truncated;
use super::super::dict::Dict;
use super::super::iterables::Stream;
use super::super::operate::{self, Operator, binary, compare, sorted};
use super::super::predicates;
use super::{Arguments, Evaluator, Run, Value, apply as apply_filter, count, fail, needed, text_of};

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
                (Value::Stream(stream), "first") => stream.next()?,
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
                // A generator has no end from which it could be read, so Jinja2 makes a list first.
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
                // The filter reads no items.
                Value::Dict(_) => {
                    let name = needed("attr", "name", field)?;
                    let name = text_of("attr", &name)?;
                    let found = run.own_attribute(value, name)?;
                    Ok(found.unwrap_or_else(|| none_of(&format!("'dict' object has no attribute '{name}'"))))
                }
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
            let (width, with) = (needed("batch", "linecount", width)?, with.unwrap_or(Value::None));
            Stream::of(budget, |rows| batches(run, value, &width, &with, rows))
        }
        _ => {
            let [slices, with] = arguments.of("slice", ["slices", "fill_with"])?;
            let (slices, with) = (needed("slice", "slices", slices)?, with.unwrap_or(Value::None));
            Stream::of(budget, |rows| slices_of(run, value, &slices, &with, rows))
        }
    }
}

/// Adds rows of `width` elements. The last row is filled up with `with`, unless it is none.
fn batches(
    run: &Evaluator<'_>,
    value: &Value,
    width: &Value,
    with: &Value,
    rows: &mut Vec<Value>,
) -> Run<()> {
    let budget = run.budget;
    let items = value.items(budget)?;
    // Jinja2 ends a row when its length equals `width`: never, if that is no number of elements.
    let whole = match width {
        Value::Float(x) if x.fract() == 0.0 => truncated(*x)?,
        Value::Float(_) => -1,
        width => width.as_int().unwrap_or(-1),
    };
    if whole == 0 && !items.is_empty() {
        rows.push(Value::list(budget, Vec::new())?);
    }
    let most = if whole > 0 { count(whole) } else { usize::MAX };
    for row in items.chunks(most) {
        let mut row = row.to_vec();
        if !matches!(with, Value::None) {
            let more = width.as_float().map(|width| width > row.len() as f64);
            match (more, width.as_int()) {
                (None, _) => {
                    return fail(format!(
                        "'<' not supported between instances of 'int' and '{}'",
                        width.kind()
                    ));
                }
                (Some(true), None) => return fail("can't multiply sequence by non-int of type 'float'"),
                (Some(true), Some(_)) => {
                    budget.memory(most.saturating_mul(size_of::<Value>()))?;
                    row.resize(most, with.clone());
                }
                (Some(false), _) => {}
            }
        }
        rows.push(Value::list(budget, row)?);
    }
    Ok(())
}

/// Adds a number of rows, of which the first ones are longer by one element or the others have `with` at their end.
fn slices_of(
    run: &Evaluator<'_>,
    value: &Value,
    slices: &Value,
    with: &Value,
    rows: &mut Vec<Value>,
) -> Run<()> {
    let budget = run.budget;
    let items = value.items(budget)?;
    let slices = whole_or("slice", Some(slices), 1)?;
    if slices == 0 {
        return fail("integer division or modulo by zero");
    }
    let slices = count(slices);
    budget.memory(slices.saturating_mul(64))?;
    let (each, more) = (items.len() / slices.max(1), items.len() % slices.max(1));
    let mut at = 0;
    for i in 0..slices {
        let len = each + usize::from(i < more);
        let mut row = items[at..at + len].to_vec();
        at += len;
        if !matches!(with, Value::None) && i >= more {
            row.push(with.clone());
        }
        rows.push(Value::list(budget, row)?);
    }
    Ok(())
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
            let (mut seen, mut kept) = (Dict::default(), Vec::new());
            for item in value.items(budget)? {
                let key = keys.of(run, &item)?;
                if seen.get(&key, budget)?.is_none() {
                    seen.insert(budget, key, Value::None)?;
                    kept.push(item);
                }
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
    let budget = run.budget;
    Stream::of(budget, |out| mapped(run, value, arguments, out))
}

fn mapped(run: &mut Evaluator<'_>, value: &Value, arguments: Arguments, out: &mut Vec<Value>) -> Run<()> {
    let Arguments { mut positional, mut named } = arguments;
    if !value.is_true() {
        return Ok(());
    }
    if positional.is_empty() {
        let Some(at) = named.iter().position(|(name, _)| name == "attribute") else {
            return fail("map requires a filter argument");
        };
        let name = named.remove(at).1;
        if let Some((name, _)) = named.iter().find(|(name, _)| name != "default") {
            return fail(format!("Unexpected keyword argument '{name}'"));
        }
        let default = named.pop().map(|(_, value)| value);
        for item in &value.items(run.budget)? {
            let found = attribute(run, item, &name)?;
            out.push(default.clone().filter(|_| found.is_undefined()).unwrap_or(found));
        }
    } else {
        let filter = positional.remove(0);
        let filter = text_of("map", &filter)?;
        for item in value.items(run.budget)? {
            let arguments = Arguments { positional: positional.clone(), named: named.clone() };
            out.push(apply_filter(run, filter, item, arguments)?);
        }
    }
    Ok(())
}

fn select(run: &Evaluator<'_>, name: &str, value: &Value, arguments: Arguments) -> Run<Value> {
    Stream::of(run.budget, |kept| selected(run, name, value, arguments, kept))
}

fn selected(
    run: &Evaluator<'_>,
    name: &str,
    value: &Value,
    arguments: Arguments,
    kept: &mut Vec<Value>,
) -> Run<()> {
    if !value.is_true() {
        return Ok(());
    }
    let mut arguments = arguments.positional.into_iter();
    let by = if name.ends_with("attr") { Some(needed(name, "attribute", arguments.next())?) } else { None };
    let test = arguments.next();
    let rest: Vec<Value> = arguments.collect();
    let wanted = name.starts_with("select");
    for item in value.items(run.budget)? {
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
    Ok(())
}
