//! Rewrites the tags of chat templates into tags that minijinja's parser reads. Line numbers stay the same.
//!
//! The tag `generation` marks the model's own words in training data. When a template is rendered, the block
//! is just a scope, as in transformers if no mask of the model's tokens is requested. The template engine has
//! no custom tags, so the tag names become `with` and `endwith`. Strings get the escapes of [`literals`].

use super::fault::Run;
use super::literals;

// Decision: docs/decisions/models.md#a-generation-block-becomes-a-scope
/// Returns a template's source with `with` and `endwith` in place of the tags `generation` and
/// `endgeneration`, and with strings as minijinja reads them.
///
/// # Errors
/// Returns a fault if a string has an escape that Python does not know, or a character's name.
pub(super) fn rewritten(source: &str) -> Run<String> {
    rewritten_with(source, &mut 0)
}

/// Rewrites a source, and adds the number of bytes that were searched for the ends of tags to `searched`.
fn rewritten_with(source: &str, searched: &mut usize) -> Run<String> {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut raw = false;
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        // Inside a raw block, only `endraw` is a tag. A search for the end of any other tag could read the rest
        // of the source for each tag.
        if raw && !ends_raw(tag) {
            out.push('{');
            rest = &rest[start + 1..];
            continue;
        }
        let end = match tag.get(..2) {
            Some("{%") => expression(tag, "%}"),
            Some("{{") => expression(tag, "}}"),
            Some("{#") => tag.find("#}").map_or(tag.len(), |end| end + 2),
            _ => 1,
        };
        *searched += end;
        let (tag, after) = tag.split_at(end);
        let word = word(tag);
        match word {
            "endraw" => raw = false,
            "raw" => raw = true,
            _ => (),
        }
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            _ if tag.len() > 2 && !tag.starts_with("{#") => {
                let line = |out: &str| u16::try_from(1 + out.matches('\n').count()).unwrap_or(u16::MAX);
                literals::push_tag(&mut out, tag).map_err(|fault| fault.at(line(&out)))?;
            }
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

/// Returns the length of the tag or expression at the start of `text`. A closing mark inside quotes does not
/// end the tag.
fn expression(text: &str, close: &str) -> usize {
    let mut quote = None;
    let mut chars = text.char_indices().skip(2);
    while let Some((at, c)) = chars.next() {
        match quote {
            Some(_) if c == '\\' => {
                chars.next();
            }
            Some(open) if c == open => quote = None,
            None if c == '"' || c == '\'' => quote = Some(c),
            None if text[at..].starts_with(close) => return at + close.len(),
            Some(_) | None => (),
        }
    }
    text.len()
}

/// Returns true if `text` starts with the tag `endraw`.
fn ends_raw(text: &str) -> bool {
    fn unmarked(text: &str) -> &str {
        text.strip_prefix(['-', '+']).unwrap_or(text)
    }
    let inner = text.strip_prefix("{%").map(|inner| unmarked(inner).trim_start());
    let after = inner.and_then(|inner| inner.strip_prefix("endraw"));
    after.is_some_and(|after| unmarked(after.trim_start()).starts_with("%}"))
}

/// Returns the text inside a tag, without the tag's marks, or an empty string if the tag is incomplete.
fn word(tag: &str) -> &str {
    let Some(inner) = tag.strip_prefix("{%").and_then(|tag| tag.strip_suffix("%}")) else { return "" };
    inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("a{% generation %}b{%- endgeneration -%}c", "a{% with %}b{%- endwith -%}c")]
    #[case("{%-generation+%}\n{%\ngeneration\n%}", "{%-with+%}\n{%\nwith\n%}")]
    #[case(
        "{{ '{% generation %}' }} {# {% generation %} #}",
        "{{ '{% generation %}' }} {# {% generation %} #}"
    )]
    #[case(r#"{{ "\"{% generation %}" }}{% generation %}"#, r#"{{ "\"{% generation %}" }}{% with %}"#)]
    #[case(
        "{% set generation = '%}' %}{% if generation %}",
        "{% set generation = '%}' %}{% if generation %}"
    )]
    #[case(
        "{% raw %}{{ ' {% generation %}{% endraw %}{% generation %}",
        "{% raw %}{{ ' {% generation %}{% endraw %}{% with %}"
    )]
    #[case(
        r#"{{ "\"{% generation %}" ~ 'a\x41\d' }}\x41{# '\x41' #}"#,
        r#"{{ "\"{% generation %}" ~ 'aA\\d' }}\x41{# '\x41' #}"#
    )]
    #[case("{{ 'a\\\nb' }}", "{{ 'ab'\n }}")]
    #[case("{% raw %}{{ '\\x41' }}{% endraw %}", "{% raw %}{{ '\\x41' }}{% endraw %}")]
    #[case("{ é {{ 1", "{ é {{ 1")]
    #[case("{% generation", "{% generation")]
    #[case("{", "{")]
    #[case(
        "{% raw %}{% raw %}{% endraw{%-  endraw -%}{% generation %}",
        "{% raw %}{% raw %}{% endraw{%-  endraw -%}{% with %}"
    )]
    fn only_the_tags_change(#[case] source: &str, #[case] expected: &str) {
        assert_eq!(rewritten(source).unwrap(), expected);
    }

    /// Sources whose tags have no ends. Each byte may be searched once for an end.
    #[rstest]
    #[case::in_raw("{% raw %}", "{%")]
    #[case::in_raw_with_spaces("{% raw %}", "{%- ")]
    #[case::quotes_in_raw("{% raw %}", "{% '")]
    #[case::expressions_in_raw("{% raw %}", "{{")]
    #[case::nearly_endraw("{% raw %}", "{% endraw ")]
    #[case::tags("", "{%")]
    #[case::expressions("", "{{ '")]
    #[case::comments("", "{# ")]
    fn the_search_for_the_ends_of_tags_is_linear(#[case] start: &str, #[case] part: &str) {
        let source = start.to_owned() + &part.repeat(4000);
        let mut searched = 0;
        rewritten_with(&source, &mut searched).unwrap();
        assert!(searched <= source.len(), "{searched} of {} bytes", source.len());
    }
}
