//! Finds out whether a part of a template reads a variable.

use std::cell::Cell;

use minijinja::machinery::ast::{CallArg, Expr, Stmt};

use super::budget::Budget;
use super::fault::Run;

/// Returns true if one of the statements reads the variable `name`. Takes a step for each statement and
/// expression that is looked at.
pub(super) fn are_read(budget: &Budget, body: &[Stmt<'_>], name: &str) -> Run<bool> {
    let search = Search { name, looked_at: Cell::new(0) };
    let found = search.body(body);
    budget.steps(search.looked_at.get())?;
    Ok(found)
}

/// A search for a variable.
struct Search<'n> {
    name: &'n str,
    looked_at: Cell<usize>,
}

impl Search<'_> {
    fn body(&self, body: &[Stmt<'_>]) -> bool {
        body.iter().any(|statement| self.statement(statement))
    }

    fn statement(&self, statement: &Stmt<'_>) -> bool {
        self.looked_at.update(|count| count + 1);
        let body = |body: &[Stmt<'_>]| self.body(body);
        let expression = |expression: &Expr<'_>| self.expression(expression);
        let call = |called: &Expr<'_>, args: &[CallArg<'_>]| expression(called) || self.arguments(args);
        match statement {
            Stmt::Template(template) => body(&template.children),
            Stmt::EmitExpr(emit) => expression(&emit.expr),
            Stmt::ForLoop(repeat) => {
                expression(&repeat.iter)
                    || repeat.filter_expr.as_ref().is_some_and(expression)
                    || body(&repeat.body)
                    || body(&repeat.else_body)
            }
            Stmt::IfCond(branch) => {
                expression(&branch.expr) || body(&branch.true_body) || body(&branch.false_body)
            }
            Stmt::WithBlock(with) => {
                with.assignments.iter().any(|(_, value)| expression(value)) || body(&with.body)
            }
            Stmt::Set(set) => expression(&set.expr),
            Stmt::SetBlock(set) => set.filter.as_ref().is_some_and(expression) || body(&set.body),
            Stmt::FilterBlock(filter) => expression(&filter.filter) || body(&filter.body),
            Stmt::Macro(declaration) => {
                declaration.defaults.iter().any(expression) || body(&declaration.body)
            }
            Stmt::CallBlock(block) => {
                call(&block.call.expr, &block.call.args) || body(&block.macro_decl.body)
            }
            Stmt::Do(statement) => call(&statement.call.expr, &statement.call.args),
            Stmt::AutoEscape(escape) => body(&escape.body),
            _ => false,
        }
    }

    fn arguments(&self, arguments: &[CallArg<'_>]) -> bool {
        arguments.iter().any(|argument| match argument {
            CallArg::Pos(value)
            | CallArg::Kwarg(_, value)
            | CallArg::PosSplat(value)
            | CallArg::KwargSplat(value) => self.expression(value),
        })
    }

    fn expression(&self, expression: &Expr<'_>) -> bool {
        self.looked_at.update(|count| count + 1);
        let one = |expression: &Expr<'_>| self.expression(expression);
        let maybe = |expression: &Option<Expr<'_>>| expression.as_ref().is_some_and(one);
        match expression {
            Expr::Var(variable) => variable.id == self.name,
            Expr::Const(_) => false,
            Expr::Slice(slice) => {
                one(&slice.expr) || maybe(&slice.start) || maybe(&slice.stop) || maybe(&slice.step)
            }
            Expr::UnaryOp(unary) => one(&unary.expr),
            Expr::BinOp(operation) => one(&operation.left) || one(&operation.right),
            Expr::Compare(comparison) => {
                one(&comparison.expr) || comparison.ops.iter().any(|step| one(&step.expr))
            }
            Expr::IfExpr(choice) => {
                one(&choice.test_expr) || one(&choice.true_expr) || maybe(&choice.false_expr)
            }
            Expr::Filter(filter) => maybe(&filter.expr) || self.arguments(&filter.args),
            Expr::Test(test) => one(&test.expr) || self.arguments(&test.args),
            Expr::GetAttr(field) => one(&field.expr),
            Expr::GetItem(item) => one(&item.expr) || one(&item.subscript_expr),
            Expr::Call(call) => one(&call.expr) || self.arguments(&call.args),
            Expr::List(list) => list.items.iter().any(one),
            Expr::Tuple(tuple) => tuple.items.iter().any(one),
            Expr::Map(map) => map.keys.iter().chain(&map.values).any(one),
        }
    }
}
