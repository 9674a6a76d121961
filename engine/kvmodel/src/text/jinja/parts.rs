//! Finds out whether a template reads the contents of messages as lists of parts.

use minijinja::machinery::ast::{Expr, Stmt};

/// Returns true if a statement has a loop over a message's content.
pub(super) fn are_read(statement: &Stmt<'_>) -> bool {
    let any = |body: &[Stmt<'_>]| body.iter().any(are_read);
    match statement {
        Stmt::Template(template) => any(&template.children),
        Stmt::ForLoop(repeat) => is_content(&repeat.iter) || any(&repeat.body) || any(&repeat.else_body),
        Stmt::IfCond(branch) => any(&branch.true_body) || any(&branch.false_body),
        Stmt::WithBlock(with) => any(&with.body),
        Stmt::SetBlock(set) => any(&set.body),
        Stmt::Block(block) => any(&block.body),
        Stmt::FilterBlock(filter) => any(&filter.body),
        Stmt::Macro(declaration) => any(&declaration.body),
        Stmt::CallBlock(call) => any(&call.macro_decl.body),
        _ => false,
    }
}

/// Returns true if an expression is a message's content: a variable, an attribute or an item `content`, also
/// behind filters.
fn is_content(expression: &Expr<'_>) -> bool {
    match expression {
        Expr::Var(variable) => variable.id == "content",
        Expr::GetAttr(field) => field.name == "content",
        Expr::GetItem(item) => {
            matches!(&item.subscript_expr, Expr::Const(key) if key.value.as_str() == Some("content"))
        }
        Expr::Filter(filter) => filter.expr.as_ref().is_some_and(is_content),
        _ => false,
    }
}
