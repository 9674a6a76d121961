//! Jinja2's language for chat templates, within a budget.
//!
//! minijinja parses a template; this module evaluates it with the values, operators, methods, filters and
//! tests of Python and Jinja2, and counts each step and each byte.
//!
//! ```text
//!   source ─ minijinja's parser ─► statements ─ evaluate ─► text
//!                                               │  expression, call, operate, format, print, json
//!                                               │  text_methods, translation, filters, predicates
//!                                               ▼
//!                                             value   dict   budget   fault
//! ```

// Decision: docs/decisions/models.md#a-chat-template-is-evaluated-here

mod arguments;
mod arithmetic;
mod budget;
mod call;
mod characters;
mod dict;
mod evaluate;
mod expression;
mod fault;
mod filters;
mod format;
mod iterables;
mod json;
mod letters;
mod literals;
mod macros;
mod names;
mod operate;
mod parts;
mod predicates;
mod print;
mod tags;
mod text_methods;
mod translation;
mod value;

use std::borrow::Cow;

use minijinja::machinery::{self, ast::Stmt};
use minijinja::syntax::SyntaxConfig;

use super::clock::TemplateClock;
use super::variable::Variable;
use budget::{Budget, MAX_SOURCE, STACK};
use evaluate::Evaluator;
pub(super) use fault::Fault;
use fault::{Run, fail};
use value::Value;

/// Renders a template with these variables. The template runs in a thread of its own, with a stack of its
/// own.
///
/// # Errors
/// Returns a [`Fault`] if the template is malformed, fails, refuses the variables, or exceeds its budget.
pub(super) fn render(
    source: &str,
    variables: &[(&str, Cow<'_, Variable>)],
    clock: &TemplateClock,
) -> Result<String, Fault> {
    on_own_stack(|| {
        let budget = Budget::new(variables.iter().map(|(_, value)| value.size()).sum());
        let values = variables.iter().map(|(name, value)| Ok((*name, converted(&budget, value)?)));
        let values: Vec<(&str, Value)> = values.collect::<Run<_>>()?;
        parsed(source, |template| Evaluator::new(&budget, clock, values).template(template))
    })
}

/// Returns true if a template iterates over the parts of a message's content.
///
/// # Errors
/// Returns a [`Fault`] if the template is malformed.
pub(super) fn reads_parts(source: &str) -> Result<bool, Fault> {
    on_own_stack(|| parsed(source, |template| Ok(parts::are_read(template))))
}

fn on_own_stack<T: Send>(run: impl FnOnce() -> Run<T> + Send) -> Run<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("chat-template".to_owned()).stack_size(STACK);
        match thread.spawn_scoped(scope, run) {
            Ok(thread) => thread.join().unwrap_or_else(|_| fail("the template engine failed; this is a bug")),
            Err(error) => fail(format!("no thread can be started for the template: {error}")),
        }
    })
}

/// Parses a template, and passes it on.
fn parsed<T>(source: &str, use_template: impl FnOnce(&Stmt<'_>) -> Run<T>) -> Run<T> {
    if source.len() > MAX_SOURCE {
        let (len, most) = (source.len() >> 10, MAX_SOURCE >> 10);
        return Err(Fault::limit(format!(
            "it has {len} KiB, more than {most}; use a template of ordinary size"
        )));
    }
    // Jinja2 reads every line break as a line feed, and drops the one at the end.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = tags::rewritten(&source)?;
    let bad = |error: minijinja::Error| {
        let words = match error.detail() {
            Some(detail) => format!("{}: {detail}", error.kind()),
            None => error.kind().to_string(),
        };
        let fault = Fault::failed(words);
        match error.line().and_then(|line| u16::try_from(line).ok()) {
            Some(line) => fault.at(line),
            None => fault,
        }
    };
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(bad)?;
    let template = machinery::parse(&source, "template", syntax).map_err(bad)?;
    use_template(&template)
}

/// Converts a variable, and takes its memory.
fn converted(budget: &Budget, variable: &Variable) -> Run<Value> {
    Ok(match variable {
        Variable::None => Value::None,
        Variable::Bool(truth) => Value::Bool(*truth),
        Variable::Int(number) => Value::Int(*number),
        Variable::Float(number) => Value::Float(*number),
        Variable::Text(text) => Value::text(budget, text.as_str())?,
        Variable::List(items) => {
            Value::list(budget, items.iter().map(|item| converted(budget, item)).collect::<Run<_>>()?)?
        }
        Variable::Map(fields) => {
            let fields =
                fields.iter().map(|(name, value)| Ok((name.as_str().into(), converted(budget, value)?)));
            Value::dict(budget, fields.collect::<Run<Vec<_>>>()?)?
        }
    })
}

#[cfg(test)]
mod tests;
