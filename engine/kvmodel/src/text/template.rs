//! Renders conversations with chat templates, as transformers does.
//!
//! The environment is the same as in `apply_chat_template`: `trim_blocks` and `lstrip_blocks`, loop
//! controls, `generation` blocks, `raise_exception`, `strftime_now`, a `tojson` without HTML escapes, the
//! methods of Python's strings, lists and dictionaries, and the tokenizer's special tokens. The variables
//! `tools` and `documents` are not available.

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value as Variable};
use serde_json::Value;

use super::clock::TemplateClock;
use super::message::Message;
use super::{generation, json};
use crate::error::{Error, Result};

/// The names of special tokens that templates can use as variables.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The field that lists other special tokens.
const MORE_TOKENS: &str = "additional_special_tokens";

/// A model's chat template, with the variables that do not depend on the conversation.
#[derive(Debug, Clone, Default)]
pub(super) struct ChatTemplate {
    /// The source of the template: the file, and the field if it is not the usual one.
    place: String,
    source: TemplateSource,
    special: Vec<(&'static str, Variable)>,
    clock: TemplateClock,
}

/// A template's source, or the reason why there is none.
#[derive(Debug, Clone, Default)]
enum TemplateSource {
    #[default]
    Missing,
    /// The names of the templates, if there is no template for ordinary chats.
    NoDefault(Vec<String>),
    Text(String),
}

/// The message of a template that rejected a conversation.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct TemplateRefusal(String);

impl ChatTemplate {
    /// Reads the template and the special tokens from a `tokenizer_config.json`. Errors name `place`.
    pub(super) fn of(config: &Value, place: &str) -> Self {
        // A special token is a string, or an object whose content is the string.
        let text =
            |value: &Value| value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned);
        let mut special: Vec<(&'static str, Variable)> = SPECIAL_TOKENS
            .into_iter()
            .filter_map(|name| Some((name, Variable::from(text(config.get(name)?)?))))
            .collect();
        if let Some(more) = config.get(MORE_TOKENS).and_then(Value::as_array) {
            special.push((MORE_TOKENS, more.iter().filter_map(text).collect()));
        }
        let (source, place) = (TemplateSource::of(config.get("chat_template")), place.to_owned());
        Self { place, source, special, clock: TemplateClock::default() }
    }

    /// Returns the template with its source replaced by `text` from `place`.
    pub(super) fn with_text(self, text: String, place: String) -> Self {
        Self { source: TemplateSource::Text(text), place, ..self }
    }

    /// Returns an error about this template.
    pub(super) fn failure(&self, reason: impl Into<String>) -> Error {
        Error::Template { place: self.place.clone(), reason: reason.into() }
    }

    #[cfg(test)]
    pub(super) fn at(self, clock: TemplateClock) -> Self {
        Self { clock, ..self }
    }

    /// Renders a conversation, up to the beginning of the model's answer.
    ///
    /// # Errors
    /// Returns [`Error::Template`] if there is no template, if the template is malformed or fails (with the
    /// line), or if it rejects the conversation (with its own message).
    pub(super) fn render(&self, messages: &[Message]) -> Result<String> {
        let source = match &self.source {
            TemplateSource::Text(text) => generation::as_scopes(text),
            TemplateSource::Missing => {
                return Err(self.failure("this model has no chat template; run it without one"));
            }
            TemplateSource::NoDefault(names) => {
                return Err(self.failure(format!(
                    "this model has several ({}) and none named \"default\"; put the one to use into \
                     chat_template.jinja, next to its tokenizer.json",
                    names.join(", ")
                )));
            }
        };
        let failed = |error: minijinja::Error| self.failure(described(&error));
        let environment = self.environment().map_err(failed)?;
        let template = environment.template_from_str(&source).map_err(failed)?;
        let messages: Variable = messages
            .iter()
            .map(|message| {
                Variable::from_pairs([("role", message.role.word()), ("content", message.content.as_str())])
            })
            .collect();
        let fixed = [
            ("messages", messages),
            ("tools", Variable::from(())),
            ("documents", Variable::from(())),
            ("add_generation_prompt", Variable::from(true)),
        ];
        let variables = Variable::from_pairs(fixed.into_iter().chain(self.special.iter().cloned()));
        template.render(variables).map_err(failed)
    }

    fn environment(&self) -> Result<Environment<'static>, minijinja::Error> {
        let mut environment = Environment::new();
        environment.set_unknown_method_callback(method);
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.add_filter("tojson", json::tojson);
        let clock = self.clock.clone();
        environment.add_function("strftime_now", move |format: &str| clock.strftime(format));
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            let error = minijinja::Error::new(ErrorKind::InvalidOperation, message.clone());
            Err(error.with_source(TemplateRefusal(message)))
        });
        Ok(environment)
    }
}

impl TemplateSource {
    /// Reads the field `chat_template`: a string, or a list of named strings, in which `default` is the
    /// template for ordinary chats.
    fn of(field: Option<&Value>) -> Self {
        match field {
            Some(Value::String(text)) => Self::Text(text.clone()),
            Some(Value::Array(list)) => {
                let named: Vec<(&str, &str)> = list
                    .iter()
                    .filter_map(|entry| {
                        Some((entry.get("name")?.as_str()?, entry.get("template")?.as_str()?))
                    })
                    .collect();
                match named.iter().find(|(name, _)| *name == "default") {
                    Some((_, text)) => Self::Text((*text).to_owned()),
                    None => Self::NoDefault(named.iter().map(|(name, _)| (*name).to_owned()).collect()),
                }
            }
            _ => Self::Missing,
        }
    }
}

/// Calls a method on a value as Python would, for methods that the template engine lacks.
fn method(
    state: &mut minijinja::State,
    value: &Variable,
    method: &str,
    arguments: &[Variable],
) -> Result<Variable, minijinja::Error> {
    if let (Some(text), [fix]) = (value.as_str(), arguments)
        && let Some(fix) = fix.as_str()
    {
        match method {
            "removeprefix" => return Ok(text.strip_prefix(fix).unwrap_or(text).into()),
            "removesuffix" => return Ok(text.strip_suffix(fix).unwrap_or(text).into()),
            _ => (),
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)
}

/// Describes a template's error, with its line.
fn described(error: &minijinja::Error) -> String {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let (mut line, mut refusal) = (error.line(), None);
    while let Some(inner) = cause {
        if let Some(inner) = inner.downcast_ref::<minijinja::Error>() {
            line = inner.line().or(line);
        }
        refusal = inner.downcast_ref::<TemplateRefusal>().or(refusal);
        cause = inner.source();
    }
    let place = line.map(|line| format!("line {line}: ")).unwrap_or_default();
    match (refusal, error.detail()) {
        (Some(TemplateRefusal(words)), _) => format!("{place}it rejects the conversation: {words}"),
        (None, Some(detail)) => format!("{place}{}: {detail}", error.kind()),
        (None, None) => format!("{place}{}", error.kind()),
    }
}

#[cfg(test)]
mod tests {
    use jiff::civil::date;
    use rstest::rstest;
    use serde::Deserialize;
    use serde_json::json;

    use super::*;
    use crate::text::message::Role;

    fn of(config: &Value) -> ChatTemplate {
        ChatTemplate::of(config, "a/tokenizer_config.json")
    }

    fn template(text: &str) -> ChatTemplate {
        of(&json!({ "chat_template": text }))
    }

    fn hello() -> [Message; 1] {
        [Message::new(Role::User, "hello")]
    }

    /// The output of `proof/goldens/templates/make.py`.
    #[derive(Deserialize)]
    struct Goldens {
        special_tokens: Value,
        conversations: Vec<Value>,
        templates: Vec<Golden>,
    }

    #[derive(Deserialize)]
    struct Golden {
        name: String,
        template: String,
        /// The result for each conversation: its text, or the template's message if it rejected the
        /// conversation.
        rendered: Vec<Rendered>,
    }

    #[derive(Deserialize)]
    enum Rendered {
        #[serde(rename = "text")]
        Text(String),
        #[serde(rename = "refused")]
        Refused(String),
    }

    #[test]
    fn conversations_are_rendered_and_refused_as_by_transformers() {
        let goldens: Goldens =
            serde_json::from_str(include_str!("../../tests/goldens/chat_templates.json")).unwrap();
        let time = date(2024, 7, 26).at(9, 5, 3, 0).to_zoned(jiff::tz::TimeZone::UTC).unwrap();
        let (mut texts, mut refused) = (0, 0);
        assert_eq!(goldens.templates.len(), 10);
        for golden in goldens.templates {
            let mut config = goldens.special_tokens.clone();
            config["chat_template"] = Value::String(golden.template);
            let template = of(&config).at(TemplateClock::fixed(time.clone()));
            assert_eq!(golden.rendered.len(), goldens.conversations.len());
            for (conversation, expected) in goldens.conversations.iter().zip(golden.rendered) {
                let messages = Message::list(&conversation.to_string()).unwrap();
                let name = &golden.name;
                match (template.render(&messages), expected) {
                    (Ok(text), Rendered::Text(expected)) => {
                        assert_eq!(text, expected, "{name}: {conversation}");
                        texts += 1;
                    }
                    (Err(error), Rendered::Refused(words)) => {
                        assert!(error.to_string().ends_with(&format!(": {words}")), "{name}: {error}");
                        refused += 1;
                    }
                    (Ok(text), Rendered::Refused(words)) => panic!("{name}: {text:?} in place of {words}"),
                    (Err(error), Rendered::Text(_)) => panic!("{name}: {conversation}: {error}"),
                }
            }
        }
        assert!(texts >= 60 && refused >= 10, "{texts} texts, {refused} refusals");
    }

    #[test]
    fn a_refusal_has_the_words_of_the_template_and_the_line() {
        let text = "{% macro check(m) %}\n{% if m.role == 'user' %}\n{{ raise_exception('no users, please') }}\n{% endif %}\n{% endmacro %}\n{{ check(messages[0]) }}";
        let error = template(text).render(&hello()).unwrap_err().to_string();
        assert_eq!(
            error,
            "chat template of a/tokenizer_config.json: line 3: it rejects the conversation: no users, please"
        );
        let moved = template("").with_text(text.to_owned(), "a/chat_template.jinja".to_owned());
        let error = moved.render(&hello()).unwrap_err().to_string();
        assert!(error.starts_with("chat template of a/chat_template.jinja: line 3: "), "{error}");
    }

    #[rstest]
    #[case("a\n{% if x %}", "line 2: syntax error")]
    #[case("{% unheard %}", "line 1: syntax error: unknown statement unheard")]
    #[case("a\nb\n{{ messages[0].content.fly() }}", "line 3: unknown method")]
    #[case("{{ strftime_now('%Q%') }}", "strftime_now(\"%Q%\")")]
    #[case("{{ messages | unheard }}", "unheard")]
    fn a_broken_template_names_the_line_and_the_reason(#[case] text: &str, #[case] expected: &str) {
        let error = template(text).render(&hello()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn of_named_templates_the_default_is_taken_and_its_absence_is_said() {
        let named = |name: &str| {
            let list =
                json!([{ "name": "tool_use", "template": "tools" }, { "name": name, "template": "chat" }]);
            of(&json!({ "chat_template": list })).render(&hello())
        };
        assert_eq!(named("default").unwrap(), "chat");
        let error = named("rag").unwrap_err().to_string();
        assert!(error.contains("tool_use, rag") && error.contains("chat_template.jinja"), "{error}");
    }

    #[test]
    fn special_tokens_that_the_tokenizer_lacks_are_undefined() {
        let config = json!({
            "bos_token": { "content": "<s>" }, "pad_token": null, "unk_token": "<unk>",
            "additional_special_tokens": ["<a>", { "content": "<b>" }],
            "chat_template": "{{ bos_token }}{{ eos_token is defined }}{{ pad_token is defined }}{{ unk_token }}{{ additional_special_tokens[1] }}{{ tools is none }}{{ documents is none }}",
        });
        assert_eq!(of(&config).render(&hello()).unwrap(), "<s>FalseFalse<unk><b>TrueTrue");
    }

    #[test]
    fn the_time_is_the_local_one_of_today() {
        let year: i16 = template("{{ strftime_now('%Y') }}").render(&hello()).unwrap().parse().unwrap();
        assert!((2024..2200).contains(&year));
    }
}
