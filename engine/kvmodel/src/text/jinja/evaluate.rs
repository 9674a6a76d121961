//! Evaluates the statements of a template.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use minijinja::machinery::ast::{self, Expr, Stmt};

use super::budget::Budget;
use super::fault::{Fault, Run, fail};
use super::macros::Macro;
use super::print::{Namespaces, Printer};
use super::value::{Function, LoopState, Value, deepest};
use crate::text::clock::TemplateClock;

/// Variables that are visible in a part of a template.
#[derive(Debug)]
struct Scope<'t> {
    names: Vec<(&'t str, Value)>,
    parent: Option<usize>,
}

/// The way in which a statement ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    Next,
    Continue,
    Break,
}

/// The state of a template that is being evaluated. Everything that could hold itself (scopes, macros and
/// namespaces) stands in lists here, and values name it by its index.
pub(super) struct Evaluator<'t> {
    pub(super) budget: &'t Budget,
    pub(super) clock: &'t TemplateClock,
    scopes: Vec<Scope<'t>>,
    /// The number of the current scope.
    scope: usize,
    /// The number of scopes that must be kept, because a macro or a loop can be called in them.
    kept: usize,
    pub(super) macros: Vec<Macro<'t>>,
    loops: Vec<&'t ast::ForLoop<'t>>,
    pub(super) namespaces: Namespaces,
    out: String,
}

impl<'t> Evaluator<'t> {
    /// Creates the state for a template with these variables.
    pub(super) fn new(
        budget: &'t Budget,
        clock: &'t TemplateClock,
        variables: impl IntoIterator<Item = (&'t str, Value)>,
    ) -> Self {
        let root = Scope { names: variables.into_iter().collect(), parent: None };
        Self {
            budget,
            clock,
            scopes: vec![root],
            scope: 0,
            kept: 1,
            macros: Vec::new(),
            loops: Vec::new(),
            namespaces: Vec::new(),
            out: String::new(),
        }
    }

    /// Evaluates a whole template, and returns its text.
    pub(super) fn template(mut self, template: &'t Stmt<'t>) -> Run<String> {
        self.statement(template)?;
        Ok(self.out)
    }

    pub(super) fn printer(&self) -> Printer<'_> {
        Printer { budget: self.budget, namespaces: &self.namespaces }
    }

    /// Returns the value of a variable.
    pub(super) fn variable(&self, name: &str) -> Run<Value> {
        let (mut scope, mut compared) = (Some(self.scope), 0);
        let mut found = None;
        while let (Some(at), None) = (scope, &found) {
            let Scope { names, parent } = &self.scopes[at];
            let place = names.iter().rposition(|(known, _)| *known == name);
            found = place.map(|place| names[place].1.clone());
            compared += 1 + names.len() - place.unwrap_or(0);
            scope = *parent;
        }
        self.budget.compared(name, compared)?;
        if let Some(value) = found.or_else(|| super::call::global(name)) {
            return Ok(value);
        }
        self.budget.memory(name.len())?;
        Ok(Value::undefined(name))
    }

    pub(super) fn set(&mut self, name: &'t str, value: Value) -> Run<()> {
        let names = &mut self.scopes[self.scope].names;
        self.budget.compared(name, names.len())?;
        if let Some((_, old)) = names.iter_mut().find(|(known, _)| *known == name) {
            *old = value;
        } else {
            self.budget.memory(64)?;
            names.push((name, value));
        }
        Ok(())
    }

    /// Runs a part of the template in a scope of its own inside `parent`.
    pub(super) fn scoped<T>(&mut self, parent: usize, part: impl FnOnce(&mut Self) -> Run<T>) -> Run<T> {
        self.budget.enter()?;
        let (outer, first) = (self.scope, self.scopes.len());
        self.scopes.push(Scope { names: Vec::new(), parent: Some(parent) });
        self.scope = first;
        let result = part(self);
        self.scope = outer;
        self.scopes.truncate(first.max(self.kept));
        self.budget.leave();
        result
    }

    /// Keeps all scopes of now until the end.
    fn keep_scopes(&mut self) -> Run<()> {
        self.kept = self.scopes.len();
        self.budget.memory(128)
    }

    /// Runs a part of the template, and returns its output.
    pub(super) fn captured(&mut self, part: impl FnOnce(&mut Self) -> Run<()>) -> Run<Value> {
        let outer = std::mem::take(&mut self.out);
        let result = part(self);
        let text = std::mem::replace(&mut self.out, outer);
        result?;
        Value::text(self.budget, text)
    }

    fn write(&mut self, text: &str) -> Run<()> {
        self.budget.memory(text.len())?;
        self.out.push_str(text);
        Ok(())
    }

    pub(super) fn body(&mut self, body: &'t [Stmt<'t>]) -> Run<Flow> {
        for statement in body {
            match self.statement(statement)? {
                Flow::Next => {}
                flow => return Ok(flow),
            }
        }
        Ok(Flow::Next)
    }

    fn statement(&mut self, statement: &'t Stmt<'t>) -> Run<Flow> {
        self.budget.steps(1)?;
        self.budget.enter()?;
        let flow = self.one(statement);
        self.budget.leave();
        flow
    }

    fn one(&mut self, statement: &'t Stmt<'t>) -> Run<Flow> {
        match statement {
            Stmt::Template(template) => return self.body(&template.children),
            Stmt::EmitRaw(raw) => self.write(raw.raw)?,
            Stmt::EmitExpr(emit) => {
                let value = self.expression(&emit.expr)?;
                let text = self.printer().text(&value)?;
                self.budget.memory(text.len())?;
                self.out.push_str(&text);
            }
            Stmt::IfCond(branch) => {
                let chosen = self.expression(&branch.expr)?.is_true();
                return self.body(if chosen { &branch.true_body } else { &branch.false_body });
            }
            Stmt::ForLoop(repeat) => {
                let items = self.expression(&repeat.iter)?;
                let items =
                    items.items(self.budget).map_err(|fault| fault.at(repeat.iter.span().start_line))?;
                self.repeat(repeat, items, 0, self.scope)?;
            }
            Stmt::WithBlock(with) => {
                return self.scoped(self.scope, |run| {
                    let outer = run.scopes[run.scope].parent.unwrap_or(0);
                    for (target, value) in &with.assignments {
                        let inner = std::mem::replace(&mut run.scope, outer);
                        let value = run.expression(value);
                        run.scope = inner;
                        run.assign(target, value?)?;
                    }
                    run.body(&with.body)
                });
            }
            Stmt::Set(set) => {
                let value = self.expression(&set.expr)?;
                self.assign(&set.target, value)?;
            }
            Stmt::SetBlock(set) => {
                let text = self.inner_text(&set.body)?;
                let value = match &set.filter {
                    Some(filter) => self.filtered(filter, text)?,
                    None => text,
                };
                self.assign(&set.target, value)?;
            }
            Stmt::FilterBlock(filter) => {
                let text = self.inner_text(&filter.body)?;
                let value = self.filtered(&filter.filter, text)?;
                let text = self.printer().text(&value)?.into_owned();
                self.write(&text)?;
            }
            Stmt::Macro(declaration) => {
                let value = self.define(declaration, false)?;
                self.set(declaration.name, value)?;
            }
            Stmt::CallBlock(block) => {
                let caller = self.define(&block.macro_decl, true)?;
                let value = self.call_with(&block.call, Some(caller))?;
                let text = self.printer().text(&value)?.into_owned();
                self.write(&text)?;
            }
            Stmt::Do(_) => return unsupported("do"),
            Stmt::Block(block) => {
                // Nothing extends a chat template. A block sees the variables of the template, not of loops.
                return self.scoped(0, |run| run.body(&block.body));
            }
            Stmt::Continue(_) => return Ok(Flow::Continue),
            Stmt::Break(_) => return Ok(Flow::Break),
            Stmt::AutoEscape(_) => return unsupported("autoescape"),
            Stmt::Import(_) | Stmt::FromImport(_) => return unsupported("import"),
            Stmt::Include(_) => return unsupported("include"),
            Stmt::Extends(_) => return unsupported("extends"),
        }
        Ok(Flow::Next)
    }

    fn inner_text(&mut self, body: &'t [Stmt<'t>]) -> Run<Value> {
        self.captured(|run| run.scoped(run.scope, |run| run.body(body).map(drop)))
    }

    /// Runs a loop over items, in scopes inside `parent`. `depth` counts the recursive calls around it.
    fn repeat(
        &mut self,
        repeat: &'t ast::ForLoop<'t>,
        items: Vec<Value>,
        depth: usize,
        parent: usize,
    ) -> Run<()> {
        let items = match &repeat.filter_expr {
            None => items,
            Some(condition) => {
                let mut kept = Vec::new();
                for item in items {
                    let keep = self.scoped(parent, |run| {
                        run.assign(&repeat.target, item.clone())?;
                        Ok(run.expression(condition)?.is_true())
                    })?;
                    kept.extend(keep.then_some(item));
                }
                kept
            }
        };
        if items.is_empty() {
            self.scoped(parent, |run| run.body(&repeat.else_body))?;
            return Ok(());
        }
        let recursive = if repeat.recursive {
            self.keep_scopes()?;
            self.loops.push(repeat);
            Some((self.loops.len() - 1, parent))
        } else {
            None
        };
        let (index, seen) = (Cell::new(0), RefCell::new(None));
        let levels = 1 + deepest(&items);
        let state = Rc::new(LoopState { items, levels, index, depth, recursive, seen });
        for (i, item) in state.items.iter().enumerate() {
            self.budget.steps(1)?;
            state.index.set(i);
            let flow = self.scoped(parent, |run| {
                run.set("loop", Value::Loop(Rc::clone(&state)))?;
                run.assign(&repeat.target, item.clone())?;
                run.body(&repeat.body)
            })?;
            if flow == Flow::Break {
                break;
            }
        }
        Ok(())
    }

    /// Runs a recursive loop again, over other items, and returns its output.
    pub(super) fn repeat_again(&mut self, state: &LoopState, items: &Value) -> Run<Value> {
        let Some((number, scope)) = state.recursive else {
            return fail("The loop must have the 'recursive' marker to be called recursively.");
        };
        let (repeat, items) = (self.loops[number], items.items(self.budget)?);
        let line = repeat.iter.span().start_line;
        self.captured(|run| run.repeat(repeat, items, state.depth + 1, scope).map_err(|fault| fault.at(line)))
    }

    /// Assigns a value to a name, to names in parentheses, or to a field of a namespace.
    fn assign(&mut self, target: &'t Expr<'t>, value: Value) -> Run<()> {
        let assigned = match target {
            Expr::Var(name) => self.set(name.id, value),
            Expr::List(list) => self.unpack(&list.items, &value),
            Expr::Tuple(tuple) => self.unpack(&tuple.items, &value),
            Expr::GetAttr(field) => match self.expression(&field.expr)? {
                Value::Namespace(number) => self.set_field(number, field.name, value),
                _ => fail("cannot assign attribute on non-namespace object"),
            },
            other => fail(format!("cannot assign to {}", other.description())),
        };
        assigned.map_err(|fault| fault.at(target.span().start_line))
    }

    fn unpack(&mut self, targets: &'t [Expr<'t>], value: &Value) -> Run<()> {
        let items = value.items(self.budget)?;
        if items.len() != targets.len() {
            let (wanted, got) = (targets.len(), items.len());
            return fail(format!("{got} values cannot be assigned to {wanted} names"));
        }
        targets.iter().zip(items).try_for_each(|(target, item)| self.assign(target, item))
    }

    /// Sets a field of a namespace.
    pub(super) fn set_field(&mut self, number: usize, name: &str, value: Value) -> Run<()> {
        if name.starts_with('_') {
            return fail(format!(
                "a namespace cannot have the attribute '{name}', which starts with an underscore"
            ));
        }
        let Some(fields) = self.namespaces.get_mut(number) else { return Ok(()) };
        self.budget.compared(name, fields.len())?;
        if let Some((_, old)) = fields.iter_mut().find(|(known, _)| known == name) {
            *old = value;
        } else {
            self.budget.memory(64 + name.len())?;
            fields.push((name.to_owned(), value));
        }
        Ok(())
    }

    fn define(&mut self, declaration: &'t ast::Macro<'t>, is_caller: bool) -> Run<Value> {
        self.keep_scopes()?;
        self.macros.push(Macro::new(self.budget, declaration, self.scope)?);
        let name = (!is_caller).then(|| declaration.name.into());
        Ok(Value::Function(Rc::new(Function::Macro(name, self.macros.len() - 1))))
    }
}

fn unsupported<T>(statement: &str) -> Run<T> {
    Err(Fault::failed(format!("the statement {statement:?} is not supported in chat templates")))
}
