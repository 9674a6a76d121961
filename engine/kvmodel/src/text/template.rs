//! Renders conversations with chat templates, as transformers does.
//!
//! The environment is the same as in `apply_chat_template`: `trim_blocks` and `lstrip_blocks`, loop
//! controls, `generation` blocks, `raise_exception`, `strftime_now`, a `tojson` without HTML escapes, the
//! tokenizer's special tokens, and the caller's own variables.

use std::borrow::Cow;

use serde_json::Value;

use super::clock::TemplateClock;
use super::jinja::{self, Fault};
use super::message::{Message, Role};
use super::variable::Variable;
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
    /// The caller's variables.
    own: Vec<(String, Variable)>,
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

/// A mark at the end of a text that the model continues. The template writes the mark, so the prompt ends in
/// front of it. The first character is a private-use character that no template writes. If the template
/// strips the text, the space is missing.
const CONTINUED: &str = "\u{F8FD} ";

impl ChatTemplate {
    /// Reads the template and the special tokens from a `tokenizer_config.json`. Errors name `place`.
    pub(super) fn of(config: &Value, place: &str) -> Self {
        // A special token is a string, or an object whose content is the string.
        let text =
            |value: &Value| value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned);
        let mut special: Vec<(&'static str, Variable)> = SPECIAL_TOKENS
            .into_iter()
            .filter_map(|name| Some((name, Variable::Text(text(config.get(name)?)?))))
            .collect();
        if let Some(more) = config.get(MORE_TOKENS).and_then(Value::as_array) {
            let more = more.iter().filter_map(text).map(Variable::Text).collect();
            special.push((MORE_TOKENS, Variable::List(more)));
        }
        let (source, place) = (TemplateSource::of(config.get("chat_template")), place.to_owned());
        Self { place, source, special, own: Vec::new(), clock: TemplateClock::default() }
    }

    /// Returns the template with its source replaced by `text` from `place`.
    pub(super) fn with_text(self, text: String, place: String) -> Self {
        Self { source: TemplateSource::Text(text), place, ..self }
    }

    /// Returns the source, if there is a template.
    pub(super) fn source(&self) -> Option<&str> {
        match &self.source {
            TemplateSource::Text(text) => Some(text),
            TemplateSource::Missing | TemplateSource::NoDefault(_) => None,
        }
    }

    /// Returns an error about this template.
    pub(super) fn failure(&self, reason: impl Into<String>) -> Error {
        Error::Template { place: self.place.clone(), reason: reason.into() }
    }

    #[cfg(test)]
    pub(super) fn at(self, clock: TemplateClock) -> Self {
        Self { clock, ..self }
    }

    /// Returns the template with more variables of the caller. A variable that is set again has the last
    /// value.
    ///
    /// # Errors
    /// Returns [`Error::Variable`] if a name is no name or is `messages`, or if `tools` or `documents` is not
    /// a list of objects.
    pub(super) fn with_variables(
        mut self,
        variables: impl IntoIterator<Item = (String, Variable)>,
    ) -> Result<Self> {
        let wrong = |reason: String| Err(Error::Variable(reason));
        for (name, value) in variables {
            let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            if !is_name {
                return wrong(format!("{name:?} is not a name; use letters, digits and underscores"));
            }
            let objects = |value: &Variable| match value {
                Variable::None => true,
                Variable::List(items) => items.iter().all(|item| matches!(item, Variable::Map(_))),
                _ => false,
            };
            match name.as_str() {
                "messages" => return wrong("\"messages\" is the conversation itself".to_owned()),
                "add_generation_prompt" if !matches!(value, Variable::Bool(_)) => {
                    return wrong(format!("{name:?} is {}; it must be true or false", value.kind()));
                }
                "tools" | "documents" if !objects(&value) => {
                    return wrong(format!("{name:?} must be a list of objects"));
                }
                _ => {}
            }
            self.own.retain(|(known, _)| *known != name);
            self.own.push((name, value));
        }
        Ok(self)
    }

    /// Renders a conversation, up to the beginning of the model's answer. If the last message is the model's,
    /// the text ends where its text ends, so that the model continues it.
    ///
    /// # Errors
    /// Returns [`Error::Template`] if there is no template, if the template is malformed or fails (with the
    /// line), if it rejects the conversation (with its own message), or if it exceeds its budget.
    pub(super) fn render(&self, messages: &[Message]) -> Result<String> {
        match messages.split_last() {
            Some((last, earlier)) if last.role() == Role::Assistant => {
                let mut messages = earlier.to_vec();
                messages.push(last.with_more_text(CONTINUED));
                let text = self.text_of(&messages, false)?;
                let parts = text.rsplit_once(CONTINUED.trim_end());
                let Some((before, _)) = parts.filter(|(before, _)| before.contains(last.text().trim()))
                else {
                    return Err(self.failure(
                        "it does not write the text of the last message, which the model must continue",
                    ));
                };
                if before.contains(CONTINUED.trim_end()) {
                    return Err(self.failure(
                        "it writes the text of the last message more than once, so that the model cannot continue it",
                    ));
                }
                let whole = text[before.len()..].starts_with(CONTINUED);
                Ok(if whole { before } else { before.trim_end() }.to_owned())
            }
            _ => self.text_of(messages, true),
        }
    }

    fn text_of(&self, messages: &[Message], answer: bool) -> Result<String> {
        let source = match &self.source {
            TemplateSource::Text(text) => text,
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
        let failed = |fault: Fault| self.failure(fault.to_string());
        let parts = messages.iter().any(Message::has_parts);
        let joined = parts && !jinja::reads_parts(source).map_err(failed)?;
        let messages = messages.iter().map(|message| message.variable(joined)).collect();
        let fixed = [
            ("messages", Variable::List(messages)),
            ("tools", Variable::None),
            ("documents", Variable::None),
            ("add_generation_prompt", Variable::Bool(answer)),
        ];
        // A later variable replaces an earlier one with the same name.
        let mut variables: Vec<(&str, Cow<'_, Variable>)> = Vec::new();
        let special = self.special.iter().map(|(name, value)| (*name, Cow::Borrowed(value)));
        let own = self.own.iter().map(|(name, value)| (name.as_str(), Cow::Borrowed(value)));
        let fixed = fixed.into_iter().map(|(name, value)| (name, Cow::Owned(value)));
        for (name, value) in special.chain(fixed).chain(own) {
            variables.retain(|(known, _)| *known != name);
            variables.push((name, value));
        }
        jinja::render(source, &variables, &self.clock).map_err(failed)
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
        conversations: Vec<Variable>,
        requests: Vec<ChatRequest>,
        templates: Vec<Golden>,
    }

    /// A conversation with the variables of its caller.
    #[derive(Deserialize)]
    struct ChatRequest {
        messages: Variable,
        #[serde(default)]
        tools: Variable,
        #[serde(default)]
        documents: Variable,
        #[serde(default)]
        variables: Variable,
    }

    #[derive(Deserialize)]
    struct Golden {
        name: String,
        template: String,
        /// The result for each conversation: its text, the template's message if it rejected the
        /// conversation, or Jinja2's error.
        rendered: Vec<Rendered>,
        /// The result for each request.
        requested: Vec<Rendered>,
    }

    #[derive(Deserialize)]
    enum Rendered {
        #[serde(rename = "text")]
        Text(String),
        #[serde(rename = "refused")]
        Refused(String),
        #[serde(rename = "failed")]
        Failed(String),
    }

    /// Requests whose texts differ from transformers', because they show its mark at the end of a text to
    /// continue, which is longer than ours.
    const MARKED: [&str; 2] = ["command_r_documents, request 5", "percent_methods, request 5"];

    /// What came of a template, to compare.
    #[derive(Debug, Default)]
    struct Tally {
        texts: usize,
        refused: usize,
        failed: usize,
        wrong: Vec<String>,
    }

    impl Tally {
        fn add(&mut self, name: &str, template: &ChatTemplate, messages: &Variable, expected: Rendered) {
            let messages = Message::list(&serde_json::to_string(messages).unwrap()).unwrap();
            match (template.render(&messages), expected) {
                (Ok(text), Rendered::Text(expected)) if text == expected => self.texts += 1,
                (Err(error), Rendered::Refused(words))
                    if error.to_string().ends_with(&format!(": {words}")) =>
                {
                    self.refused += 1;
                }
                (Err(error), Rendered::Failed(_)) if !error.to_string().contains("rejects") => {
                    self.failed += 1;
                }
                _ if MARKED.contains(&name) => {}
                (Ok(got), Rendered::Text(right) | Rendered::Refused(right) | Rendered::Failed(right)) => {
                    self.wrong.push(format!("{name}: {got:?} in place of {right:?}"));
                }
                (Err(error), Rendered::Text(right) | Rendered::Refused(right) | Rendered::Failed(right)) => {
                    self.wrong.push(format!("{name}: {error} in place of {right:?}"));
                }
            }
        }
    }

    #[test]
    fn conversations_are_rendered_and_refused_as_by_transformers() {
        let goldens: Goldens =
            serde_json::from_str(include_str!("../../tests/goldens/chat_templates.json")).unwrap();
        let time = date(2024, 7, 26).at(9, 5, 3, 0).to_zoned(jiff::tz::TimeZone::UTC).unwrap();
        let mut tally = Tally::default();
        assert_eq!((goldens.templates.len(), goldens.requests.len()), (26, 6));
        for golden in goldens.templates {
            let mut config = goldens.special_tokens.clone();
            config["chat_template"] = Value::String(golden.template);
            let template = of(&config).at(TemplateClock::fixed(time.clone()));
            assert_eq!(golden.rendered.len(), goldens.conversations.len());
            for (conversation, expected) in goldens.conversations.iter().zip(golden.rendered) {
                tally.add(&golden.name, &template, conversation, expected);
            }
            assert_eq!(golden.requested.len(), goldens.requests.len());
            for (number, (request, expected)) in (1..).zip(goldens.requests.iter().zip(golden.requested)) {
                let ChatRequest { messages, tools, documents, variables } = request;
                let more = match variables {
                    Variable::Map(more) => &more[..],
                    _ => &[],
                };
                let given =
                    [("tools".to_owned(), tools.clone()), ("documents".to_owned(), documents.clone())];
                let given = given.into_iter().chain(more.iter().cloned());
                let template = template.clone().with_variables(given).unwrap();
                tally.add(&format!("{}, request {number}", golden.name), &template, messages, expected);
            }
        }
        assert!(tally.wrong.is_empty(), "{}", tally.wrong.join("\n"));
        assert!(tally.texts >= 350 && tally.refused >= 20 && tally.failed >= 5, "{tally:?}");
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
    #[case("a\nb\n{{ messages[0].content.fly() }}", "line 3: 'str object' has no attribute 'fly'")]
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
