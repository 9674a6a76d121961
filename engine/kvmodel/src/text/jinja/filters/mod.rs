//! The filters of templates: `value | name(arguments)`.

use super::arguments::{Arguments, count, int_or, needed, text_of};
use super::evaluate::Evaluator;
use super::fault::{Run, fail};
use super::json;
use super::operate;
use super::value::Value;

mod numbers;
mod sequences;
mod texts;

/// The filters of one kind of values, by name.
const NUMBERS: [&str; 4] = ["abs", "float", "int", "round"];
const TEXTS: [&str; 18] = [
    "capitalize",
    "center",
    "e",
    "escape",
    "forceescape",
    "format",
    "indent",
    "lower",
    "replace",
    "safe",
    "string",
    "title",
    "tojson",
    "trim",
    "truncate",
    "upper",
    "urlencode",
    "wordcount",
];
const SEQUENCES: [&str; 23] = [
    "attr",
    "batch",
    "count",
    "dictsort",
    "first",
    "groupby",
    "items",
    "join",
    "last",
    "length",
    "list",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "slice",
    "sort",
    "sum",
    "unique",
];
/// The filters of Jinja2 that are not supported: no published chat template uses them.
const UNSUPPORTED: [&str; 7] =
    ["filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr"];

/// Returns true if there is a filter with this name.
pub(super) fn is_known(name: &str) -> bool {
    ["d", "default"].contains(&name)
        || NUMBERS.iter().chain(&TEXTS).chain(&SEQUENCES).any(|known| *known == name)
}

/// Applies a filter.
pub(super) fn apply(run: &mut Evaluator<'_>, name: &str, value: Value, arguments: Arguments) -> Run<Value> {
    run.budget.steps(1)?;
    match name {
        "d" | "default" => {
            let [default, boolean] = arguments.of("default", ["default_value", "boolean"])?;
            let empty = boolean.is_some_and(|boolean| boolean.is_true()) && !value.is_true();
            Ok(if value.is_undefined() || empty { default.unwrap_or_else(|| "".into()) } else { value })
        }
        _ if UNSUPPORTED.contains(&name) => {
            fail(format!("the filter '{name}' is not supported in chat templates"))
        }
        _ if NUMBERS.contains(&name) => numbers::apply(run, name, &value, arguments),
        _ if TEXTS.contains(&name) => texts::apply(run, name, &value, arguments),
        _ if SEQUENCES.contains(&name) => sequences::apply(run, name, &value, arguments),
        other => fail(format!("No filter named '{other}'.")),
    }
}
