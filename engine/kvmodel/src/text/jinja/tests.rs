//! Compares expressions with Jinja2, and tries templates that exceed their budget.

use rstest::rstest;
use serde::Deserialize;

use super::*;

/// Renders the value of an expression.
pub(super) fn printed(expression: &str) -> Result<String, Fault> {
    render(&format!("{{{{ {expression} }}}}"), &[], &TemplateClock::default())
}

/// The output of `proof/goldens/templates/make.py`.
#[derive(Deserialize)]
struct Goldens {
    variables: Variable,
    expressions: Vec<Expression>,
    templates: Vec<Template>,
}

#[derive(Deserialize)]
struct Expression {
    expression: String,
    /// The value as a text; absent if the expression fails.
    text: Option<String>,
}

#[derive(Deserialize)]
struct Template {
    template: String,
    /// The text; absent if the template fails.
    text: Option<String>,
}

const FILTER: &str = "is not supported in chat templates";
const ATTRIBUTE: &str = "is not supported in chat templates";
const BITS: &str = "outside the range of 128 bits";
const PLUS: &str = "unexpected `+`";
const SAME: &str = "'sameas' is not defined for equal values";
const LOOP: &str = "reserved variable name loop";
const MARKED: &str = "is not supported for a text that 'safe' or 'escape' has marked";

/// The expressions and templates whose values differ from Jinja2's, with words of their refusals.
const REFUSED: [(&str, &str); 57] = [
    ("s | wordwrap(5) is defined", FILTER),
    ("s | wordwrap(5)", FILTER),
    ("(xs | random) is defined", FILTER),
    ("1000 | filesizeformat", FILTER),
    ("'<b>x</b>' | striptags", FILTER),
    ("d | xmlattr", FILTER),
    ("xs | pprint", FILTER),
    ("'http://a.b' | urlize", FILTER),
    ("n.real", ATTRIBUTE),
    ("1.real", ATTRIBUTE),
    ("'abc'.isidentifier()", ATTRIBUTE),
    ("'abc'.encode()", ATTRIBUTE),
    ("self", "the variable 'self' is not supported"),
    ("self is defined", "the variable 'self' is not supported"),
    ("lipsum is defined", "the variable 'lipsum' is not supported"),
    ("+n", PLUS),
    ("+1", PLUS),
    ("+ 1 - +1", PLUS),
    (r"'\N{BULLET}'", "names of characters"),
    (r"'\ud83d' | length", "half of a character"),
    ("(-8) ** 0.5", "complex numbers are not supported"),
    ("(-8) ** (1 / 3)", "complex numbers are not supported"),
    ("2 ** 200", BITS),
    ("170141183460469231731687303715884105727 + 1", BITS),
    ("99999999999999999999999999999999999999999 + 1", "invalid integer (too large)"),
    ("-170141183460469231731687303715884105728 // -1", BITS),
    ("1e300 | int", BITS),
    ("'%d' % 1e39", BITS),
    ("'%i' % -1e300", BITS),
    ("'%d' % 1e308", BITS),
    ("170141183460469231731687303715884105727 | round(-38)", BITS),
    ("range(0, 170141183460469231731687303715884105727, 85070591730234615865843651857942052864)[::1]", BITS),
    ("range(0, 85070591730234615865843651857942052865, 85070591730234615865843651857942052864)[::1]", BITS),
    ("d | items | string is string", "has no text of its own"),
    ("[namespace] | string | length > 0", "has no text of its own"),
    ("{{ namespace }}", "has no text of its own"),
    ("(n + 250) is sameas 257", SAME),
    ("(n - 13) is sameas (0 - 6)", SAME),
    ("1000000 is sameas 1000000", SAME),
    ("(n, 2) is sameas ((n, 2))", SAME),
    ("(1, 2) is sameas ((1, 2))", SAME),
    ("uni[11] is sameas '你'", SAME),
    ("'ab' is sameas 'ab'", SAME),
    ("(s ~ '') is sameas s", SAME),
    ("(f + 0) is sameas f", SAME),
    ("range(n) is sameas range(7)", SAME),
    ("{% set loop = 5 %}{{ loop }}", LOOP),
    ("{% macro f(loop) %}{{ loop }}{% endmacro %}{{ f(3) }}", LOOP),
    ("{% with loop = 3 %}{{ loop }}{% endwith %}", LOOP),
    ("{% set loop = 5 %}{% for x in [1] %}{{ loop.index }}{% endfor %}{{ loop }}", LOOP),
    ("{% autoescape true %}{{ '<' }}{% endautoescape %}", "\"autoescape\" is not supported"),
    ("{% set a = '<b>' | safe %}{{ a.upper() }}", MARKED),
    ("{% set a = '<b>' | safe %}{{ a * 2 }}", MARKED),
    ("{% set a = '<b>' | safe %}{{ a[0] }}", MARKED),
    ("{% set a = '<b>' | safe %}{{ a[1:] }}", MARKED),
    ("{% set a = '<b>' | safe %}{{ a | reverse }}", MARKED),
    ("{% set a = '%s' | safe %}{{ a | format('<') }}{{ a % '<' }}", MARKED),
];

/// The expressions that Jinja2 refuses, because its parser does not read tests of tests.
const ACCEPTED: [&str; 2] = ["1 is odd is true", "'a' is string is true"];

#[test]
fn expressions_have_the_values_of_jinja2_and_every_difference_is_refused_by_name() {
    let goldens = include_str!("../../../tests/goldens/jinja_expressions.json");
    let goldens: Goldens = serde_json::from_str(goldens).unwrap();
    let Variable::Map(variables) = goldens.variables else { panic!("no variables") };
    let variables: Vec<(&str, Cow<'_, Variable>)> =
        variables.iter().map(|(name, value)| (name.as_str(), Cow::Borrowed(value))).collect();
    let expressions = goldens
        .expressions
        .into_iter()
        .map(|one| (format!("{{{{ {} }}}}", one.expression), one.expression, one.text));
    let templates = goldens.templates.into_iter().map(|one| (one.template.clone(), one.template, one.text));
    let (mut wrong, mut refused, mut accepted, mut failures) = (Vec::new(), Vec::new(), Vec::new(), 0);
    let all: Vec<_> = expressions.chain(templates).collect();
    assert!(all.len() >= 2030);
    for (source, name, text) in all {
        failures += usize::from(text.is_none());
        let words = REFUSED.iter().find(|(known, _)| *known == name).map(|(_, words)| words);
        match (render(&source, &variables, &TemplateClock::default()), text) {
            (Err(fault), Some(_)) if words.is_some_and(|words| fault.to_string().contains(words)) => {
                refused.push(name);
            }
            (Ok(_), None) if ACCEPTED.contains(&&*name) => accepted.push(name),
            (Ok(got), Some(text)) if got == text => {}
            (Err(_), None) => {}
            (got, text) => wrong.push(format!("{name}: {got:?} in place of {text:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!((refused.len(), accepted.len()), (REFUSED.len(), ACCEPTED.len()), "a difference is no more");
    assert!(failures >= 310, "{failures}");
}

/// Returns the failure of a template without variables.
fn refused(source: &str) -> Fault {
    render(source, &[], &TemplateClock::default()).unwrap_err()
}

/// Templates that would take all memory, all time or the whole stack.
#[rstest]
#[case::itself("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}")]
#[case::itself_as_json("{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}{{ ns.x ~ '' }}")]
#[case::loops("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")]
#[case::doubled(
    "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
)]
#[case::added(
    "{% set ns = namespace(x='a') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
)]
#[case::lists(
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
)]
#[case::shared(
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"
)]
#[case::compared(
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}"
)]
#[case::as_json(
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x | tojson }}"
)]
#[case::deep("{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}")]
#[case::deep_dict(
    "{% set ns = namespace(x={}) %}{% for i in range(99999) %}{% set ns.x = {'a': ns.x} %}{% endfor %}"
)]
#[case::deep_cycler(
    "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = cycler(ns.x) %}{% endfor %}"
)]
#[case::deep_joiner(
    "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = joiner(ns.x) %}{% endfor %}"
)]
#[case::width("{{ '%4000000000d' | format(1) }}")]
#[case::star("{{ '%*d' % (4000000000, 1) }}")]
#[case::precision("{{ '%.4000000000f' | format(1.5) }}")]
#[case::digits("{{ '%.4000000000d' | format(1) }}")]
#[case::field("{{ '{:>4000000000}'.format('a') }}")]
#[case::zeros("{{ '{:04000000000}'.format(1) }}")]
#[case::repeated("{{ 'ab' * 4000000000 }}")]
#[case::repeated_list("{{ [1] * 4000000000 }}")]
#[case::centred("{{ 'a'.center(4000000000) }}")]
#[case::filter_center("{{ 'a' | center(4000000000) }}")]
#[case::filled("{{ 'a'.zfill(4000000000) }}")]
#[case::tabs("{{ '\t'.expandtabs(4000000000) }}")]
#[case::indented("{{ 'a' | indent(4000000000) }}")]
#[case::json_indent("{{ [1] | tojson(indent=4000000000) }}")]
#[case::batch("{{ [1] | batch(4000000000, 0) | list }}")]
#[case::slices("{{ [1] | slice(4000000000) | list }}")]
#[case::range("{{ range(4000000000) }}")]
#[case::power("{{ 10 ** 4000000000 }}")]
#[case::replaced("{% set a = 'a' * 20000 %}{{ a | replace('a', a) }}{{ (a | replace('', a)) | length }}")]
#[case::joined("{% set a = 'a' * 20000 %}{{ a.join(a | list) | length }}")]
#[case::macro_itself("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}")]
#[case::macro_caller(
    "{% macro a() %}{% if caller %}{% endif %}{% call a() %}{% endcall %}{% endmacro %}{{ a() }}"
)]
#[case::loop_itself("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}")]
#[case::output("{% set a = 'a' * 1000000 %}{% for i in range(99999) %}{{ a }}{% endfor %}")]
#[case::captured(
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}"
)]
#[case::searched("{% set a = 'a' * 9000000 %}{% for i in range(99999) %}{{ 'b' in a }}{% endfor %}")]
#[case::counted("{% set a = 'a' * 9000000 %}{% for i in range(99999) %}{{ a | length }}{% endfor %}")]
#[case::element("{% set a = 'a' * 9000000 %}{% for i in range(99999) %}{{ a[5] }}{{ a[-1] }}{% endfor %}")]
#[case::lower("{% set a = 'a' * 9000000 %}{% for i in range(99999) %}{{ a is lower }}{% endfor %}")]
#[case::upper("{% set a = 'A' * 200000 %}{% for i in range(99999) %}{{ a is upper }}{% endfor %}")]
#[case::generators(
    "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] | map('first') %}{% set ns.y = [ns.x] %}{% set ns.x = ns.y %}{% endfor %}{{ ns.x }}"
)]
#[case::views(
    "{% set ns = namespace(x={}) %}{% for i in range(99999) %}{% set ns.x = {1: ns.x}.items() %}{% endfor %}"
)]
#[case::grouped("{{ '{:04000000000,}'.format(1) }}")]
#[case::starred("{{ '%.*f' % (4000000000, 1.5) }}")]
#[case::keys("{% set ns = namespace(x={}) %}{{ dict(range(99999) | batch(2, 0)) | length }}")]
#[case::slice("{% set a = 'a' * 120000000 %}{{ a[:] }}")]
#[case::slice_backwards("{% set a = 'a' * 120000000 %}{{ a[::-1] }}")]
#[case::slice_with_steps("{% set a = 'a' * 120000000 %}{{ a[::2] }}")]
#[case::slices_of_nothing("{% set a = 'a' * 9000000 %}{% for i in range(99999) %}{{ a[5:5] }}{% endfor %}")]
#[case::stripped(
    "{% set a = 'a' * 9000000 %}{% for i in range(99999) %}{{ ''.strip(a) }}{{ '' | trim(a) }}{% endfor %}"
)]
#[case::starts(
    "{% set a = 'a' * 9000000 %}{% set b = (a,) * 9999 %}{% for i in range(99999) %}{{ 'b'.startswith(b) }}{% endfor %}"
)]
fn a_template_without_an_end_is_stopped(#[case] source: &str) {
    is_stopped(source);
}

/// Repeats a part of a template with the numbers below `count` in place of `#`.
fn numbered(count: usize, part: &str) -> String {
    (0..count).map(|number| part.replace('#', &number.to_string())).collect()
}

/// Templates with few statements that compare many names.
#[rstest]
#[case::variables(&numbered(7000, "{% set a#=1 %}"), "{% for i in range(99999) %}{{ b }}{% endfor %}")]
#[case::variables_that_are_found(
    &numbered(7000, "{% set a#=1 %}"),
    "{% for i in range(99999) %}{% if a0 %}{% endif %}{% endfor %}"
)]
#[case::assignments(
    "{% for i in range(99) %}",
    &format!("{}{{% endfor %}}", numbered(5000, "{% set a#=1 %}"))
)]
#[case::namespace(
    &format!("{{% set ns = namespace() %}}{}", numbered(5000, "{% set ns.a# = 1 %}")),
    "{% for i in range(99999) %}{{ ns.b }}{% endfor %}"
)]
#[case::namespace_assignments(
    &format!("{{% set ns = namespace() %}}{}", numbered(5000, "{% set ns.a# = 1 %}")),
    "{% for i in range(99999) %}{% set ns.a4999 = 1 %}{% endfor %}"
)]
#[case::fields_that_are_no_texts(
    &format!("{{% set d = {{{}}} %}}", numbered(3500, "#:1,")),
    "{% for i in range(99999) %}{{ d[3499] }}{% endfor %}"
)]
#[case::missing_fields(
    &format!("{{% set d = {{{}}} %}}", numbered(3500, "(#,):1,")),
    "{% for i in range(99999) %}{{ d[none] }}{% endfor %}"
)]
#[case::long_fields(
    "{% set d = {'a' * 99999: 1} %}{% set b = 'b' * 99999 %}",
    "{% for i in range(99999) %}{{ b in d }}{% endfor %}"
)]
#[case::named_arguments(
    &format!("{{% set d = {{{}}} %}}{{% set f = '{{a999}}' * 999 %}}", numbered(1000, "'a#':1,")),
    "{% for i in range(999) %}{{ f.format(**d) | length }}{% endfor %}"
)]
#[case::parameters(
    "{% for i in range(99) %}",
    &format!("{{% macro f({}b) %}}{{% endmacro %}}{{% endfor %}}", numbered(5000, "a#,"))
)]
fn names_that_are_compared_take_steps(#[case] names: &str, #[case] uses: &str) {
    is_stopped(&format!("{names}{uses}"));
}

/// Evaluates a template, which must exceed its budget, and checks what it has taken until then.
fn is_stopped(source: &str) {
    assert!(source.len() <= MAX_SOURCE, "the source itself is too long");
    let budget_bytes = 256 << 20;
    let (fault, used) = on_own_stack(|| {
        let (budget, clock) = (Budget::new(0), TemplateClock::default());
        let mut fault = None;
        let used = allocation_counter::measure(|| {
            fault = parsed(source, |template| Evaluator::new(&budget, &clock, []).template(template)).err();
        });
        Ok((fault, used))
    })
    .unwrap();
    let fault = fault.unwrap();
    assert_eq!(fault.kind, fault::FaultKind::Limit, "{fault}");
    assert!(used.bytes_max <= 4 * budget_bytes, "{} bytes at once", used.bytes_max);
    assert!(used.bytes_total <= 16 * budget_bytes, "{} bytes in sum", used.bytes_total);
    assert!(used.count_total <= 100_000_000, "{} allocations", used.count_total);
}

#[test]
fn macros_that_are_defined_again_and_again_take_steps() {
    let body = "{{ 1 }}".repeat(9000);
    let source =
        format!("{{% for i in range(99999) %}}{{% macro f() %}}{body}{{% endmacro %}}{{% endfor %}}");
    assert_eq!(refused(&source).kind, fault::FaultKind::Limit);
}

/// Sources that nest as deeply as they are long.
#[rstest]
#[case::minus("{{ ", "-", "1 }}")]
#[case::not("{{ ", "not ", "1 }}")]
#[case::parentheses("{{ ", "(", "1 }}")]
#[case::lists("{{ ", "[", "1 }}")]
#[case::filters("{{ 1", "|e", " }}")]
#[case::attributes("{{ a", ".b", " }}")]
#[case::items("{{ a", "[0]", " }}")]
#[case::calls("{{ a", "()", " }}")]
#[case::concatenated("{{ 1", "~1", " }}")]
#[case::summed("{{ 1", "+1", " }}")]
#[case::powers("{{ 1", "**1", " }}")]
#[case::or("{{ 0", " or 0", " }}")]
#[case::conditions("{{ 1", " if 0 else 1", " }}")]
#[case::tests("{{ 1", " is odd", " }}")]
#[case::branches("{% if 1 %}", "{% elif 1 %}", "{% endif %}")]
#[case::nested("", "{% if 1 %}", "")]
#[case::loops("", "{% for a in [1] %}", "")]
#[case::blocks("", "{% filter e %}", "")]
#[case::braces("{{ ", "{1:", "1 }}")]
fn a_deeply_nested_source_is_no_overflow(#[case] start: &str, #[case] level: &str, #[case] end: &str) {
    let levels = (MAX_SOURCE - start.len() - end.len()) / level.len();
    let _ = render(&format!("{start}{}{end}", level.repeat(levels)), &[], &TemplateClock::default());
    let longer = format!("{start}{}{end}", level.repeat(levels + 40));
    assert_eq!(refused(&longer).kind, fault::FaultKind::Limit, "it is longer than any template");
}

/// Objects of JSON with many fields, such as the schemas of tools. Each use takes steps in proportion to their number.
#[rstest]
#[case::fields("{{ d.a0 }} {{ d['a7'] }} {{ d.a49999 }} {{ d.b is defined }}", "0 7 49999 False")]
#[case::items(
    "{% for name, value in d.items() %}{% if d[name] == 9 %}{{ name }}{% endif %}{% endfor %}",
    "a9"
)]
#[case::json("{{ (d | tojson)[:9] }} {{ (d | tojson(sort_keys=true))[-9:] }}", "{\"a0\": 0, 9\": 9999}")]
#[case::equal("{{ d == e }} {{ d == dict(e, a0=1) }} {{ dict(d) == d.copy() }}", "True False True")]
#[case::sorted("{{ (d | dictsort)[1] }} {{ (d | dictsort(by='value'))[1] }}", "('a1', 1) ('a1', 1)")]
#[case::unique(
    "{{ d | unique | list | length }} {{ (d | list + e | list) | unique | list | length }}",
    "50000 50000"
)]
#[case::formatted("{{ '%(a7)s' % d }} {{ '{a8}'.format(**d) }}", "7 8")]
#[case::nested("{{ {'all': d, 'more': [d, e]} | tojson | length }}", "2483363")]
fn objects_with_many_fields_are_within_the_budget(#[case] source: &str, #[case] expected: &str) {
    let fields = |order: &mut dyn Iterator<Item = i128>| {
        Variable::Map(order.map(|number| (format!("a{number}"), Variable::Int(number))).collect())
    };
    let variables =
        [("d", Cow::Owned(fields(&mut (0..50_000)))), ("e", Cow::Owned(fields(&mut (0..50_000).rev())))];
    assert_eq!(render(source, &variables, &TemplateClock::default()).unwrap(), expected);
}

#[test]
fn an_exceeded_budget_names_the_limit_and_what_to_do() {
    for (source, expected) in [
        (
            "{% set a = 'a' * 9000000 %}{% for i in range(99999) %}{% if 'b' in a %}{% endif %}{% endfor %}",
            "more than 20000000 steps; ",
        ),
        ("{% set d = dict(range(99999) | batch(2, 0)) %}", "more than 20000000 steps; "),
        ("{{ 'a' * 300000000 }}", "more than 256 MiB; "),
        ("{{ [1] * 300000000 }}", "more than 256 MiB; "),
    ] {
        let words = refused(source).to_string();
        let remedy = "use another template, or shorten the messages, tools and documents";
        assert!(words.ends_with(&format!("{expected}{remedy}")), "{words}");
    }
}

#[test]
fn an_ordinary_long_conversation_is_within_the_budget() {
    let message = |i: usize| {
        let role = if i.is_multiple_of(2) { "user" } else { "assistant" };
        Variable::Map(vec![
            ("role".to_owned(), role.into()),
            ("content".to_owned(), Variable::Text("word ".repeat(100))),
        ])
    };
    let messages = Variable::List((0..4000).map(message).collect());
    let source = "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' and not ns.last %}{% set ns.last = loop.index %}{% endif %}{% endfor %}\
        {% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% if loop.index0 > 0 and messages[loop.index0 - 1].role == m.role %}!{% endif %}{% endfor %}";
    let text = render(source, &[("messages", Cow::Owned(messages))], &TemplateClock::default()).unwrap();
    assert!(text.len() > 4000 * 500);
}
