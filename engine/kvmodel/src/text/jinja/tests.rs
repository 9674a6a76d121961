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
    expressions: Vec<Golden>,
}

#[derive(Deserialize)]
struct Golden {
    expression: String,
    /// The value as a text; absent if the expression fails.
    text: Option<String>,
}

/// The expressions whose values differ from Jinja2's, with the reasons.
const DIFFERENT: [(&str, &str); 5] = [
    ("s | wordwrap(5) is defined", "filters that no chat template uses are refused by name"),
    ("+n", "minijinja's parser has no unary plus"),
    ("n.real", "numbers have no attributes"),
    ("1.5.is_integer", "numbers have no methods"),
    ("self is defined", "templates have no blocks to call"),
];

#[test]
fn expressions_have_the_values_of_jinja2_and_every_difference_is_named() {
    let goldens = include_str!("../../../tests/goldens/jinja_expressions.json");
    let goldens: Goldens = serde_json::from_str(goldens).unwrap();
    let Variable::Map(variables) = goldens.variables else { panic!("no variables") };
    let variables: Vec<(&str, Cow<'_, Variable>)> =
        variables.iter().map(|(name, value)| (name.as_str(), Cow::Borrowed(value))).collect();
    assert!(goldens.expressions.len() >= 430);
    let (mut different, mut failures) = (Vec::new(), 0);
    for Golden { expression, text } in &goldens.expressions {
        let source = format!("{{{{ {expression} }}}}");
        let result = render(&source, &variables, &TemplateClock::default());
        failures += usize::from(text.is_none());
        if result.as_ref().ok() != text.as_ref() {
            different.push((expression.as_str(), format!("{result:?} in place of {text:?}")));
        }
    }
    let named = |(expression, _): &&(&str, String)| !DIFFERENT.iter().any(|(known, _)| known == expression);
    let unnamed: Vec<_> =
        different.iter().filter(named).map(|(expression, what)| format!("{expression}: {what}")).collect();
    assert!(unnamed.is_empty(), "{}", unnamed.join("\n"));
    for (expression, reason) in DIFFERENT {
        assert!(
            different.iter().any(|(known, _)| *known == expression),
            "{expression} is as in Jinja2 now: {reason}"
        );
    }
    assert!(failures >= 30);
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
#[case::macro_caller("{% macro a() %}{% call a() %}{% endcall %}{% endmacro %}{{ a() }}")]
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
#[case::keys("{% set ns = namespace(x={}) %}{{ dict(range(99999) | batch(2, 0)) | length }}")]
fn a_template_without_an_end_is_stopped(#[case] source: &str) {
    let started = std::time::Instant::now();
    let fault = refused(source);
    assert_eq!(fault.kind, fault::FaultKind::Limit, "{fault}");
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
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
