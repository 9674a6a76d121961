//! The macros of a template.

use minijinja::machinery::ast::{self, Expr};

use super::arguments::Arguments;
use super::budget::Budget;
use super::evaluate::Evaluator;
use super::fault::{Run, fail};
use super::names::are_read;
use super::value::Value;

/// A macro, with the scope in which it was defined.
#[derive(Debug, Clone, Copy)]
pub(super) struct Macro<'t> {
    declaration: &'t ast::Macro<'t>,
    scope: usize,
    /// True for each of `varargs`, `kwargs` and `caller` that the macro reads. Jinja2 refuses arguments that nothing reads.
    takes_more: bool,
    takes_names: bool,
    takes_caller: bool,
}

impl<'t> Macro<'t> {
    /// Creates a macro from its declaration.
    ///
    /// # Errors
    /// Fails if two parameters have one name, or if the parameter `caller` has no default.
    pub(super) fn new(budget: &Budget, declaration: &'t ast::Macro<'t>, scope: usize) -> Run<Self> {
        let names: Vec<&str> = declaration.args.iter().filter_map(name_of).collect();
        budget.compared("", names.len().saturating_mul(names.len()) / 2)?;
        if let Some(twice) = names.iter().enumerate().find(|(i, name)| names[..*i].contains(*name)) {
            return fail(format!("two parameters of a macro have the name '{}'", twice.1));
        }
        let first_default = names.len().saturating_sub(declaration.defaults.len());
        let own_caller = names.iter().position(|name| *name == "caller");
        if own_caller.is_some_and(|at| at < first_default) {
            return fail("the parameter 'caller' of a macro needs a default");
        }
        let reads = |name| are_read(budget, &declaration.body, name);
        Ok(Self {
            declaration,
            scope,
            takes_more: reads("varargs")?,
            takes_names: reads("kwargs")?,
            takes_caller: own_caller.is_none() && reads("caller")?,
        })
    }
}

fn name_of<'t>(parameter: &Expr<'t>) -> Option<&'t str> {
    match parameter {
        Expr::Var(variable) => Some(variable.id),
        _ => None,
    }
}

impl Evaluator<'_> {
    /// Returns a field of a macro.
    pub(super) fn macro_field(
        &self,
        own_name: Option<&str>,
        number: usize,
        name: &str,
    ) -> Run<Option<Value>> {
        let Some(found) = self.macros.get(number) else { return Ok(None) };
        let names = || found.declaration.args.iter().filter_map(name_of).map(Value::from).collect();
        Ok(Some(match name {
            "name" => own_name.map_or(Value::None, Value::from),
            "arguments" => Value::tuple(self.budget, names())?,
            "catch_kwargs" => found.takes_names.into(),
            "catch_varargs" => found.takes_more.into(),
            "caller" => found.takes_caller.into(),
            _ => return Ok(None),
        }))
    }

    /// Calls a macro, and returns its output.
    pub(super) fn call_macro(&mut self, number: usize, arguments: Arguments) -> Run<Value> {
        let Macro { declaration, scope, takes_more, takes_names, takes_caller } = self.macros[number];
        let what = declaration.name;
        let Arguments { positional, mut named } = arguments;
        let mut positional = positional.into_iter();
        let first_default = declaration.args.len().saturating_sub(declaration.defaults.len());
        self.captured(|run| {
            run.scoped(scope, |run| {
                for (i, parameter) in declaration.args.iter().enumerate() {
                    let Expr::Var(parameter) = parameter else { continue };
                    run.budget.compared(parameter.id, named.len())?;
                    let by_name = named.iter().position(|(name, _)| name == parameter.id);
                    let value = match (positional.next(), by_name, i.checked_sub(first_default)) {
                        (Some(_), Some(_), _) => {
                            return fail(format!(
                                "{}() got multiple values for argument '{}'",
                                what, parameter.id
                            ));
                        }
                        (Some(value), ..) => value,
                        (None, Some(at), _) => named.remove(at).1,
                        (None, None, Some(default)) => run.expression(&declaration.defaults[default])?,
                        (None, None, None) => {
                            Value::Undefined(format!("parameter '{}' was not provided", parameter.id).into())
                        }
                    };
                    run.set(parameter.id, value)?;
                }
                let rest: Vec<Value> = positional.collect();
                if !rest.is_empty() && !takes_more {
                    let most = declaration.args.len();
                    return fail(format!("macro '{what}' takes not more than {most} argument(s)"));
                }
                if takes_more {
                    let rest = Value::tuple(run.budget, rest)?;
                    run.set("varargs", rest)?;
                }
                if takes_caller {
                    let at = named.iter().position(|(name, _)| name == "caller");
                    let caller = at.map(|at| named.remove(at).1);
                    run.set(
                        "caller",
                        caller.unwrap_or_else(|| Value::Undefined("No caller defined".into())),
                    )?;
                }
                match named.first() {
                    Some((name, _)) if !takes_names && name == "caller" => {
                        return fail(format!("macro '{what}' is given a block, but does not call 'caller'"));
                    }
                    Some((name, _)) if !takes_names => {
                        return fail(format!("macro '{what}' takes no keyword argument '{name}'"));
                    }
                    _ => {}
                }
                let named = named.into_iter().map(|(name, value)| (Value::from(&*name), value));
                let named = Value::dict(run.budget, named)?;
                run.set("kwargs", named)?;
                run.body(&declaration.body).map(drop)
            })
        })
    }
}
