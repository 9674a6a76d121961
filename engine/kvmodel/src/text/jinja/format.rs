//! Python's two ways to format texts: `'%s' % x` and `'{}'.format(x)`.

use std::str::Chars;

use super::arguments::{Arguments, count};
use super::arithmetic::truncated;
use super::evaluate::Evaluator;
use super::fault::{Run, fail};
use super::letters::{self, Fill};
use super::value::Value;

/// The layout of a field: the settings of a conversion or of a format specification.
#[derive(Debug, Clone, Copy, Default)]
struct Layout {
    fill: Option<char>,
    /// One of `<`, `>`, `^` and `=`.
    align: Option<char>,
    /// One of `+`, a space and `-`.
    sign: Option<char>,
    alternate: bool,
    width: usize,
    /// A character between groups of digits.
    group: Option<char>,
    precision: Option<usize>,
    /// True if the alignment is that of a zero in front of the width, which only numbers have.
    by_zero: bool,
}

/// Formats a text as the operator `%` does. A tuple is a list of arguments, and a dictionary has them by
/// name.
pub(super) fn percent(run: &Evaluator<'_>, text: &str, arguments: &Value) -> Run<String> {
    let single = [arguments.clone()];
    let list = match arguments {
        Value::Tuple(items) => &items.items[..],
        _ => &single,
    };
    let (mut list, mut named) = (list.iter(), false);
    let mut next = || list.next().map_or_else(|| fail("not enough arguments for format string"), Ok);
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut own = None;
        if chars.as_str().starts_with('(') {
            chars.next();
            let Some((name, rest)) = chars.as_str().split_once(')') else {
                return fail("incomplete format key");
            };
            let Value::Dict(dict) = arguments else { return fail("format requires a mapping") };
            (own, named) = (dict.field(name, run.budget)?.cloned(), true);
            if own.is_none() {
                return fail(format!("the format names '{name}', which the mapping lacks"));
            }
            chars = rest.chars();
        }
        let mut layout = Layout::default();
        while let Some(flag) = peek(&chars).filter(|c| "-+ 0#".contains(*c)) {
            chars.next();
            match flag {
                '-' => layout.align = Some('<'),
                '+' => layout.sign = Some('+'),
                ' ' => layout.sign = layout.sign.or(Some(' ')),
                '0' => layout.fill = Some('0'),
                _ => layout.alternate = true,
            }
        }
        if peek(&chars) == Some('*') {
            chars.next();
            let width = next()?.as_int().map_or_else(|| fail("* wants int"), Ok)?;
            layout.align = if width < 0 { Some('<') } else { layout.align };
            layout.width = count(width.saturating_abs());
        } else {
            layout.width = digits(&mut chars);
        }
        if peek(&chars) == Some('.') {
            chars.next();
            layout.precision = Some(if peek(&chars) == Some('*') {
                chars.next();
                count(next()?.as_int().map_or_else(|| fail("* wants int"), Ok)?)
            } else {
                digits(&mut chars)
            });
        }
        while peek(&chars).is_some_and(|c| "hlL".contains(c)) {
            chars.next();
        }
        let Some(kind) = chars.next() else { return fail("incomplete format") };
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match own {
            Some(value) => value,
            None => next()?.clone(),
        };
        out.push_str(&converted(run, kind, layout, &value)?);
        run.budget.memory(out.len() / 8)?;
    }
    let mapping =
        matches!(arguments, Value::Dict(_) | Value::List(_) | Value::Range { .. } | Value::Undefined(_));
    let unused = matches!(arguments, Value::Tuple(_)) || !(named || mapping);
    if unused && list.next().is_some() {
        return fail("not all arguments converted during string formatting");
    }
    Ok(out)
}

fn peek(chars: &Chars<'_>) -> Option<char> {
    chars.clone().next()
}

/// Reads a number; without digits, it is 0.
fn digits(chars: &mut Chars<'_>) -> usize {
    let mut number: usize = 0;
    while let Some(digit) = peek(chars).and_then(|c| c.to_digit(10)) {
        chars.next();
        number = number.saturating_mul(10).saturating_add(digit as usize);
    }
    number
}

/// Returns an argument as the conversion `kind` of the operator `%`.
fn converted(run: &Evaluator<'_>, kind: char, mut layout: Layout, value: &Value) -> Run<String> {
    let number =
        |kind: char| fail(format!("%{kind} format: a real number is required, not {}", value.kind()));
    if "sra".contains(kind) {
        layout.fill = None;
        layout.align = layout.align.or(Some('>'));
        let text = match kind {
            's' => run.printer().text(value)?.into_owned(),
            'r' => run.printer().repr(value)?,
            _ => super::print::ascii(&run.printer().repr(value)?),
        };
        return laid_out(run, text, &layout);
    }
    // A field with zeros is filled up behind its sign, unless it is aligned to the left.
    match (layout.fill, layout.align) {
        (Some(_), Some('<')) => layout.fill = None,
        (Some(_), _) => layout.align = Some('='),
        _ => layout.align = layout.align.or(Some('>')),
    }
    match (kind, value.as_int(), value.as_float()) {
        ('d' | 'i' | 'u', Some(n), _) => whole(run, n, 'd', &layout),
        ('d' | 'i' | 'u', None, Some(x)) => whole(run, truncated(x)?, 'd', &layout),
        ('x' | 'X' | 'o', Some(n), _) => whole(run, n, kind, &layout),
        ('e' | 'E' | 'f' | 'F' | 'g' | 'G', _, Some(x)) => real(run, x, kind, &layout),
        ('c', Some(n), _) => match u32::try_from(n).ok().and_then(char::from_u32) {
            Some(c) => laid_out(run, c.to_string(), &layout),
            None => fail("%c arg not in range(0x110000)"),
        },
        ('c', ..) if value.len() == Some(1) && value.as_text().is_some() => {
            laid_out(run, value.as_text().unwrap_or_default().to_owned(), &layout)
        }
        ('d' | 'i' | 'u' | 'x' | 'X' | 'o' | 'e' | 'E' | 'f' | 'F' | 'g' | 'G' | 'c', ..) => number(kind),
        _ => fail(format!("unsupported format character '{kind}'")),
    }
}

/// The way in which the fields of a text name the positions of their arguments.
#[derive(Debug, Clone, Copy)]
enum Numbering {
    Unknown,
    /// Fields without a number, of which this many were read.
    Automatic(usize),
    Manual,
}

/// Formats a text as `str.format` does.
pub(super) fn braces(run: &Evaluator<'_>, text: &str, arguments: &Arguments) -> Run<String> {
    fields(run, text, arguments, &mut Numbering::Unknown, 0)
}

fn fields(
    run: &Evaluator<'_>,
    text: &str,
    arguments: &Arguments,
    next: &mut Numbering,
    depth: usize,
) -> Run<String> {
    if depth > 2 {
        return fail("Max string recursion exceeded");
    }
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let (brace, after) = (&rest[at..=at], &rest[at + 1..]);
        if let Some(after) = after.strip_prefix(brace) {
            out.push_str(brace);
            rest = after;
            continue;
        }
        if brace == "}" {
            return fail("Single '}' encountered in format string");
        }
        let mut open = 1;
        let close = after.find(|c| {
            open += i32::from(c == '{') - i32::from(c == '}');
            open == 0
        });
        let Some(close) = close else { return fail("expected '}' before end of string") };
        let field = &after[..close];
        rest = &after[close + 1..];
        let (name, spec) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = name.split_once('!').map_or((name, None), |(name, c)| (name, Some(c)));
        let value = argument(run, name, arguments, next)?;
        let spec = fields(run, spec, arguments, next, depth + 1)?;
        let value = match conversion {
            None => value,
            Some("s") => Value::text(run.budget, run.printer().text(&value)?)?,
            Some("r") => Value::text(run.budget, run.printer().repr(&value)?)?,
            Some("a") => Value::text(run.budget, super::print::ascii(&run.printer().repr(&value)?))?,
            Some(other) => return fail(format!("Unknown conversion specifier {other}")),
        };
        out.push_str(&by_specification(run, &value, &spec)?);
        run.budget.memory(out.len() / 8)?;
    }
    out.push_str(rest);
    Ok(out)
}

/// Returns the argument for a field's name: a number, a name or nothing, and indices or attributes.
fn argument(run: &Evaluator<'_>, name: &str, arguments: &Arguments, next: &mut Numbering) -> Run<Value> {
    let end = name.find(['.', '[']).unwrap_or(name.len());
    let (first, mut rest) = name.split_at(end);
    let mut value = match (first, first.parse::<usize>(), *next) {
        ("", _, Numbering::Manual) | (_, Ok(_), Numbering::Automatic(_)) => {
            return fail("a format has fields with a number and fields without one");
        }
        ("", _, known) => {
            let at = if let Numbering::Automatic(at) = known { at } else { 0 };
            *next = Numbering::Automatic(at + 1);
            arguments.positional.get(at).cloned()
        }
        (_, Ok(number), _) => {
            *next = Numbering::Manual;
            arguments.positional.get(number).cloned()
        }
        (name, Err(_), _) => {
            run.budget.compared(name, arguments.named.len())?;
            arguments.named.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
        }
    }
    .map_or_else(|| fail(format!("the format names the argument '{first}', which is missing")), Ok)?;
    while !rest.is_empty() {
        let (key, after) = if let Some(inside) = rest.strip_prefix('[') {
            match inside.split_once(']') {
                Some((key, after)) => {
                    (key.parse().map_or_else(|_| Value::from(key), |at: usize| at.into()), after)
                }
                None => return fail("Missing ']' in format string"),
            }
        } else {
            let end = rest[1..].find(['.', '[']).map_or(rest.len(), |end| end + 1);
            (Value::from(&rest[1..end]), &rest[end..])
        };
        value = run.item(&value, &key)?;
        rest = after;
    }
    Ok(value)
}

/// Formats a value as a specification says: `[[fill]align][sign][#][0][width][,][.precision][type]`.
fn by_specification(run: &Evaluator<'_>, value: &Value, spec: &str) -> Run<String> {
    if spec.is_empty() {
        return Ok(run.printer().text(value)?.into_owned());
    }
    let is_align = |c: Option<char>| c.filter(|c| "<>=^".contains(*c));
    let mut layout = Layout::default();
    let mut chars = spec.chars();
    let mut ahead = spec.chars();
    let (first, second) = (ahead.next(), ahead.next());
    if let Some(align) = is_align(second) {
        (layout.fill, layout.align) = (first, Some(align));
        chars = ahead;
    } else if let Some(align) = is_align(first) {
        layout.align = Some(align);
        chars.next();
    }
    if let Some(sign) = peek(&chars).filter(|c| "+- ".contains(*c)) {
        layout.sign = Some(sign);
        chars.next();
    }
    if peek(&chars) == Some('#') {
        layout.alternate = true;
        chars.next();
    }
    if peek(&chars) == Some('0') {
        layout.fill = layout.fill.or(Some('0'));
        layout.by_zero = layout.align.is_none();
        layout.align = layout.align.or(Some('='));
        chars.next();
    }
    layout.width = digits(&mut chars);
    if let Some(group) = peek(&chars).filter(|c| ",_".contains(*c)) {
        layout.group = Some(group);
        chars.next();
    }
    if peek(&chars) == Some('.') {
        chars.next();
        layout.precision = Some(digits(&mut chars));
    }
    let kind = chars.next();
    let unknown = || fail(format!("Invalid format specifier '{spec}' for object of type '{}'", value.kind()));
    if chars.next().is_some() {
        return unknown();
    }
    match (kind, value) {
        (None | Some('s'), Value::Text(_)) if layout.group.is_some() || layout.sign.is_some() => unknown(),
        (None | Some('s'), Value::Text(_)) if layout.align == Some('=') && !layout.by_zero => {
            fail("'=' alignment not allowed in string format specifier")
        }
        (None | Some('s'), Value::Text(text)) => laid_out(run, text.to_string(), &left(layout)),
        (None | Some('x' | 'X' | 'o' | 'b' | 'n' | 'd' | 'c'), value)
            if value.as_int().is_some() && layout.precision.is_some() =>
        {
            fail("Precision not allowed in integer format specifier")
        }
        (Some('c'), value)
            if value.as_int().is_some()
                && (layout.sign.is_some() || layout.group.is_some() || layout.alternate) =>
        {
            fail("a sign, '#' and ',' are not allowed with integer format specifier 'c'")
        }
        (Some('c'), value) if value.as_int().is_some() => {
            match value.as_int().and_then(|n| u32::try_from(n).ok()).and_then(char::from_u32) {
                Some(c) => laid_out(run, c.to_string(), &right(layout)),
                None => fail("%c arg not in range(0x110000)"),
            }
        }
        (kind @ (None | Some('x' | 'X' | 'o' | 'b' | 'n' | 'd')), value) if value.as_int().is_some() => {
            whole(run, value.as_int().unwrap_or(0), kind.unwrap_or('d'), &right(layout))
        }
        (Some(kind @ ('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%')), value) if value.as_float().is_some() => {
            real(run, value.as_float().unwrap_or(0.0), kind, &right(layout))
        }
        (None, Value::Float(x)) if layout.precision.is_some() => real(run, *x, 'g', &right(layout)),
        (None, Value::Float(x)) => signed(
            run,
            x.is_sign_negative() && !x.is_nan(),
            "",
            (super::print::float(x.abs()), 3),
            &right(layout),
        ),
        _ => unknown(),
    }
}

/// Aligns texts to the left, unless the layout says otherwise.
fn left(layout: Layout) -> Layout {
    Layout { align: layout.align.filter(|_| !layout.by_zero).or(Some('<')), ..layout }
}

/// Aligns numbers to the right, unless the layout says otherwise.
fn right(layout: Layout) -> Layout {
    Layout { align: layout.align.or(Some('>')), ..layout }
}

/// Writes a whole number.
fn whole(run: &Evaluator<'_>, number: i128, kind: char, layout: &Layout) -> Run<String> {
    let size = number.unsigned_abs();
    let (prefix, digits) = match kind {
        'x' => ("0x", format!("{size:x}")),
        'X' => ("0X", format!("{size:X}")),
        'o' => ("0o", format!("{size:o}")),
        'b' => ("0b", format!("{size:b}")),
        _ => ("", size.to_string()),
    };
    let least = layout.precision.unwrap_or(0);
    run.budget.memory(least)?;
    let digits = letters::fill(&digits, least, '0', Fill::Left);
    let prefix = if layout.alternate { prefix } else { "" };
    let each = if "xXob".contains(kind) { 4 } else { 3 };
    signed(run, number < 0, prefix, (digits, each), layout)
}

/// Writes a float in the form `e`, `f`, `g` or `%`.
fn real(run: &Evaluator<'_>, number: f64, kind: char, layout: &Layout) -> Run<String> {
    let precision = layout.precision.unwrap_or(6);
    run.budget.memory(precision)?;
    if precision > 1000 {
        return fail("precision too large");
    }
    let size = number.abs();
    let text = match kind.to_ascii_lowercase() {
        _ if !size.is_finite() => super::print::float(size),
        'e' => scientific(size, precision),
        'g' => {
            let precision = precision.max(1);
            let power: i32 = scientific(size, precision - 1)
                .split_once('e')
                .and_then(|(_, p)| p.parse().ok())
                .unwrap_or(0);
            let trimmed = |text: String| {
                if text.contains('.') && !layout.alternate {
                    text.trim_end_matches('0').trim_end_matches('.').to_owned()
                } else {
                    text
                }
            };
            if power < -4 || power >= precision as i32 {
                let text = scientific(size, precision - 1);
                let (digits, power) = text.split_once('e').unwrap_or((&text, "+00"));
                format!("{}e{power}", trimmed(digits.to_owned()))
            } else {
                trimmed(format!("{size:.*}", (precision as i32 - 1 - power).max(0) as usize))
            }
        }
        '%' => format!("{:.precision$}%", size * 100.0),
        _ => format!("{size:.precision$}"),
    };
    let text = if kind.is_ascii_uppercase() { text.to_uppercase() } else { text };
    signed(run, number.is_sign_negative() && !number.is_nan(), "", (text, 3), layout)
}

/// Writes a number with an exponent of at least two digits.
fn scientific(size: f64, precision: usize) -> String {
    let text = format!("{size:.precision$e}");
    let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
    let power: i32 = power.parse().unwrap_or(0);
    format!("{digits}e{}{:02}", if power < 0 { '-' } else { '+' }, power.abs())
}

/// Adds the sign, the prefix and the groups of `each` digits, and fills the field up.
fn signed(
    run: &Evaluator<'_>,
    negative: bool,
    prefix: &str,
    (digits, each): (String, usize),
    layout: &Layout,
) -> Run<String> {
    let sign = match (negative, layout.sign) {
        (true, _) => "-",
        (false, Some('+')) => "+",
        (false, Some(' ')) => " ",
        _ => "",
    };
    let digits = match layout.group {
        None => digits,
        Some(group) => {
            let is_digit = |c: char| if each == 4 { c.is_ascii_hexdigit() } else { c.is_ascii_digit() };
            let end = digits.find(|c: char| !is_digit(c)).unwrap_or(digits.len());
            let (whole, rest) = digits.split_at(end);
            // Zeros that fill the field up are grouped like other digits, and no field begins with a separator.
            let zeros = layout.align == Some('=') && layout.fill == Some('0');
            let room = layout.width.saturating_sub(sign.len() + prefix.len() + rest.len());
            let least = if zeros { (room / (each + 1)) * each + (room % (each + 1)).max(1) } else { 0 };
            run.budget.memory(2 * least)?;
            let whole = letters::fill(whole, least, '0', Fill::Left);
            let mut grouped = String::new();
            for (i, c) in whole.chars().enumerate() {
                if i > 0 && (whole.len() - i).is_multiple_of(each) {
                    grouped.push(group);
                }
                grouped.push(c);
            }
            grouped + rest
        }
    };
    if layout.align == Some('=') {
        run.budget.memory(layout.width)?;
        let width = layout.width.saturating_sub(sign.len() + prefix.len());
        return Ok(format!(
            "{sign}{prefix}{}",
            letters::fill(&digits, width, layout.fill.unwrap_or(' '), Fill::Left)
        ));
    }
    laid_out(run, format!("{sign}{prefix}{digits}"), &Layout { precision: None, ..*layout })
}

/// Cuts a text to the precision and fills it up to the width.
fn laid_out(run: &Evaluator<'_>, text: String, layout: &Layout) -> Run<String> {
    let text = match layout.precision {
        Some(most) => text.chars().take(most).collect(),
        None => text,
    };
    run.budget.memory(layout.width.saturating_mul(layout.fill.map_or(1, char::len_utf8)))?;
    let side = match layout.align {
        Some('<') => Fill::Right,
        Some('^') => Fill::Both { odd: false },
        _ => Fill::Left,
    };
    Ok(letters::fill(&text, layout.width, layout.fill.unwrap_or(' '), side))
}
