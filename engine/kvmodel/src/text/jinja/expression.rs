//! Evaluates the expressions of a template.

use std::cmp::Ordering;

use minijinja::machinery::ast::{self, BinOpKind, CallArg, CompareOpKind, Expr, UnaryOpKind};
use minijinja::value::ValueKind;

use super::arguments::{Arguments, named_by};
use super::evaluate::Evaluator;
use super::fault::{Run, fail};
use super::operate::{self, Operator, binary, compare, contains, defined};
use super::value::Value;
use super::{filters, format, predicates};

impl<'t> Evaluator<'t> {
    /// Returns the value of an expression.
    pub(super) fn expression(&mut self, expression: &'t Expr<'t>) -> Run<Value> {
        self.budget.steps(1)?;
        self.budget.enter()?;
        let value = self.value_of(expression);
        self.budget.leave();
        value.map_err(|fault| fault.at(expression.span().start_line))
    }

    fn value_of(&mut self, expression: &'t Expr<'t>) -> Run<Value> {
        match expression {
            Expr::Var(variable) => match self.variable(variable.id)? {
                Value::Undefined(_) if ["self", "lipsum"].contains(&variable.id) => {
                    fail(format!("the variable '{}' is not supported in chat templates", variable.id))
                }
                value => Ok(value),
            },
            Expr::Const(constant) => constant_of(&constant.value),
            Expr::Slice(slice) => {
                let value = self.expression(&slice.expr)?;
                let mut bound = |bound: &'t Option<Expr<'t>>| -> Run<Option<i128>> {
                    let Some(bound) = bound else { return Ok(None) };
                    match self.expression(bound)? {
                        Value::None => Ok(None),
                        bound => match defined(&bound)?.as_int() {
                            Some(bound) => Ok(Some(bound)),
                            None => fail("slice indices must be integers or None"),
                        },
                    }
                };
                let (start, stop, step) = (bound(&slice.start)?, bound(&slice.stop)?, bound(&slice.step)?);
                operate::slice(self.budget, &value, start, stop, step)
            }
            Expr::UnaryOp(unary) => {
                let value = self.expression(&unary.expr)?;
                match unary.op {
                    UnaryOpKind::Not => Ok(Value::Bool(!value.is_true())),
                    UnaryOpKind::Neg => operate::negative(&value),
                }
            }
            Expr::BinOp(operation) => self.operation(operation),
            Expr::Compare(comparison) => {
                let mut left = self.expression(&comparison.expr)?;
                for step in &comparison.ops {
                    let right = self.expression(&step.expr)?;
                    if !self.holds(step.op, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Ok(Value::Bool(true))
            }
            Expr::IfExpr(choice) => {
                if self.expression(&choice.test_expr)?.is_true() {
                    self.expression(&choice.true_expr)
                } else if let Some(other) = &choice.false_expr {
                    self.expression(other)
                } else {
                    Ok(Value::Undefined("the inline if-expression evaluated to false and has no else".into()))
                }
            }
            Expr::Filter(filter) => match &filter.expr {
                Some(inner) => {
                    let value = self.expression(inner)?;
                    let arguments = self.arguments(&filter.args)?;
                    filters::apply(self, filter.name, value, arguments)
                }
                None => fail("a filter has no value"),
            },
            Expr::Test(test) => {
                let value = self.expression(&test.expr)?;
                let arguments = self.arguments(&test.args)?;
                predicates::holds(self, test.name, &value, &arguments.positional).map(Value::Bool)
            }
            Expr::GetAttr(field) => {
                let value = self.expression(&field.expr)?;
                self.attribute(&value, field.name)
            }
            Expr::GetItem(item) => {
                let value = self.expression(&item.expr)?;
                let key = self.expression(&item.subscript_expr)?;
                self.item(&value, &key)
            }
            Expr::Call(call) => self.call_with(call, None),
            Expr::List(list) => {
                let items = self.all(&list.items)?;
                Value::list(self.budget, items)
            }
            Expr::Tuple(tuple) => {
                let items = self.all(&tuple.items)?;
                Value::tuple(self.budget, items)
            }
            Expr::Map(map) => {
                let (keys, values) = (self.all(&map.keys)?, self.all(&map.values)?);
                Value::dict(self.budget, keys.into_iter().zip(values))
            }
        }
    }

    fn all(&mut self, items: &'t [Expr<'t>]) -> Run<Vec<Value>> {
        items.iter().map(|item| self.expression(item)).collect()
    }

    fn operation(&mut self, operation: &'t ast::BinOp<'t>) -> Run<Value> {
        let left = self.expression(&operation.left)?;
        match operation.op {
            BinOpKind::ScAnd if !left.is_true() => return Ok(left),
            BinOpKind::ScOr if left.is_true() => return Ok(left),
            _ => {}
        }
        let right = self.expression(&operation.right)?;
        let holds = |op| self.holds(op, &left, &right).map(Value::Bool);
        let number = |op| binary(self.budget, op, &left, &right);
        match operation.op {
            BinOpKind::ScAnd | BinOpKind::ScOr => Ok(right),
            BinOpKind::Eq => holds(CompareOpKind::Eq),
            BinOpKind::Ne => holds(CompareOpKind::Ne),
            BinOpKind::Lt => holds(CompareOpKind::Lt),
            BinOpKind::Lte => holds(CompareOpKind::Lte),
            BinOpKind::Gt => holds(CompareOpKind::Gt),
            BinOpKind::Gte => holds(CompareOpKind::Gte),
            BinOpKind::In => holds(CompareOpKind::In),
            BinOpKind::Add => number(Operator::Add),
            BinOpKind::Sub => number(Operator::Sub),
            BinOpKind::Mul => number(Operator::Mul),
            BinOpKind::Div => number(Operator::Div),
            BinOpKind::FloorDiv => number(Operator::FloorDiv),
            BinOpKind::Pow => number(Operator::Pow),
            BinOpKind::Rem => match &left {
                Value::Text(text) => Value::text(self.budget, format::percent(self, text, &right)?),
                _ => number(Operator::Rem),
            },
            BinOpKind::Concat => {
                let (left, right) = (self.printer().text(&left)?, self.printer().text(&right)?);
                self.budget.memory(left.len() + right.len())?;
                Value::text(self.budget, [left, right].concat())
            }
        }
    }

    fn holds(&self, op: CompareOpKind, left: &Value, right: &Value) -> Run<bool> {
        let order = || compare(self.budget, left, right);
        Ok(match op {
            CompareOpKind::Eq => left.equals(right, self.budget)?,
            CompareOpKind::Ne => !left.equals(right, self.budget)?,
            CompareOpKind::Lt => order()? == Some(Ordering::Less),
            CompareOpKind::Lte => order()?.is_some_and(Ordering::is_le),
            CompareOpKind::Gt => order()? == Some(Ordering::Greater),
            CompareOpKind::Gte => order()?.is_some_and(Ordering::is_ge),
            CompareOpKind::In => contains(self.budget, right, left)?,
            CompareOpKind::NotIn => !contains(self.budget, right, left)?,
        })
    }

    /// Applies the filters of a block, whose innermost filter has no value of its own.
    pub(super) fn filtered(&mut self, filter: &'t Expr<'t>, text: Value) -> Run<Value> {
        let Expr::Filter(filter) = filter else { return fail("the filter of a block is none") };
        let value = match &filter.expr {
            Some(inner) => self.filtered(inner, text)?,
            None => text,
        };
        let arguments = self.arguments(&filter.args)?;
        filters::apply(self, filter.name, value, arguments)
            .map_err(|fault| fault.at(filter.span().start_line))
    }

    /// Evaluates the arguments of a call.
    pub(super) fn arguments(&mut self, arguments: &'t [CallArg<'t>]) -> Run<Arguments> {
        let mut all = Arguments::default();
        for argument in arguments {
            match argument {
                CallArg::Pos(value) => all.positional.push(self.expression(value)?),
                CallArg::Kwarg(name, value) => all.named.push(((*name).to_owned(), self.expression(value)?)),
                CallArg::PosSplat(values) => {
                    let values = self.expression(values)?;
                    all.positional.extend(values.items(self.budget)?);
                }
                CallArg::KwargSplat(values) => {
                    let values = self.expression(values)?;
                    all.named.extend(named_by(&values)?);
                }
            }
        }
        Ok(all)
    }

    /// Calls what a call names. The statement `call` adds its `caller`.
    pub(super) fn call_with(&mut self, call: &'t ast::Call<'t>, caller: Option<Value>) -> Run<Value> {
        let callee = self.expression(&call.expr)?;
        let mut arguments = self.arguments(&call.args)?;
        arguments.named.extend(caller.map(|caller| ("caller".to_owned(), caller)));
        self.call(&callee, arguments).map_err(|fault| fault.at(call.expr.span().start_line))
    }
}

/// Converts a literal of the parser.
fn constant_of(value: &minijinja::Value) -> Run<Value> {
    Ok(match value.kind() {
        ValueKind::None => Value::None,
        ValueKind::Bool => Value::Bool(value.is_true()),
        ValueKind::String => Value::from(value.as_str().unwrap_or_default()),
        ValueKind::Number if value.is_integer() => match i128::try_from(value.clone()) {
            Ok(number) => Value::Int(number),
            Err(_) => return fail(format!("the number {value} is outside the range of 128 bits")),
        },
        ValueKind::Number => Value::Float(f64::try_from(value.clone()).unwrap_or(f64::NAN)),
        other => return fail(format!("a literal is {other}")),
    })
}
