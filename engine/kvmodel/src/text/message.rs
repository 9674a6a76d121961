//! Messages of a conversation, in memory and in files.

use std::borrow::Cow;

use serde::{Serialize, Serializer};

use super::variable::{MAX_JSON, Variable};
use crate::error::{Error, Result};

/// The author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The model's operator.
    System,
    /// The author of the application, between the operator and the user.
    Developer,
    /// The user, who asks the model.
    User,
    /// The model.
    Assistant,
    /// A tool that the model called.
    Tool,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 5] = [Self::System, Self::Developer, Self::User, Self::Assistant, Self::Tool];

    /// Returns the name of the role in chat templates.
    pub fn word(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// A message of a conversation: its author, its content and other fields, such as the calls of tools.
///
/// ```
/// use kvmodel::{Message, Role};
/// let messages = Message::list(r#"[{"role": "user", "content": "Why is the sky blue?"}]"#)?;
/// assert_eq!(messages, [Message::new(Role::User, "Why is the sky blue?")]);
/// let parts = r#"[{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]"#;
/// assert_eq!(Message::list(parts)?[0].text(), "Why?");
/// let error = Message::list(r#"[{"role": "user", "content": 5}]"#).unwrap_err();
/// assert!(error.to_string().contains(r#"message 1: field "content""#));
/// # Ok::<(), kvmodel::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    role: Role,
    /// All fields, the role among them, in the order of the file. No field is null.
    fields: Vec<(String, Variable)>,
}

/// The field with the text of a message, or with its parts.
const CONTENT: &str = "content";
/// The form of a list of messages, in errors.
const FORM: &str = "it must be a JSON list of objects with role and content";
/// The names under which clients pass the reasoning of a message. Templates read the first one, or `thinking`.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

impl Message {
    /// Creates a message with a text.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        let fields = [("role", role.word().into()), (CONTENT, Variable::Text(content.into()))];
        Self { role, fields: fields.map(|(name, value): (&str, Variable)| (name.to_owned(), value)).to_vec() }
    }

    /// Returns the author.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Returns the text of the message. The texts of several parts are joined by line breaks.
    pub fn text(&self) -> Cow<'_, str> {
        match self.field(CONTENT) {
            Some(Variable::Text(text)) => Cow::Borrowed(text),
            Some(Variable::List(parts)) => {
                let texts = parts.iter().filter_map(|part| match part.field("text") {
                    Some(Variable::Text(text)) => Some(text.as_str()),
                    _ => None,
                });
                Cow::Owned(texts.collect::<Vec<_>>().join("\n"))
            }
            _ => Cow::Borrowed(""),
        }
    }

    /// Parses a JSON list of objects with the fields `role` and `content`, as clients of `OpenAI`'s interface
    /// write them. The content may be a string, null, or a list of parts with texts. Other fields, such as
    /// `tool_calls`, `tool_call_id`, `name` and `reasoning_content`, are passed on to the chat template.
    /// Arguments of tool calls may be JSON in a string. The text may have up to 16 MiB.
    ///
    /// # Errors
    /// Returns [`Error::Messages`]: with the line if the JSON is malformed, and otherwise with the message
    /// and the field that is wrong.
    pub fn list(json: &str) -> Result<Vec<Self>> {
        if json.len() > MAX_JSON {
            return Err(Error::Messages(format!(
                "{} bytes of JSON, more than {MAX_JSON}; shorten it",
                json.len()
            )));
        }
        let value = match serde_json::from_str(json.trim_start_matches('\u{FEFF}')) {
            Ok(value) => value,
            Err(error) => return Err(Error::Messages(format!("{error}; {FORM}"))),
        };
        Self::from_variable(value)
    }

    /// Converts a list that is parsed already, like [`list`](Self::list).
    ///
    /// # Errors
    /// Returns [`Error::Messages`] with the message and the field that is wrong.
    pub fn from_variable(list: Variable) -> Result<Vec<Self>> {
        match list {
            Variable::List(messages) => {
                (1..).zip(messages).map(|(number, message)| Self::of(number, message)).collect()
            }
            other => Err(Error::Messages(format!("it is {}; {FORM}", other.kind()))),
        }
    }

    /// Checks that a model can answer a conversation: it ends with a message of the user or of a tool, or
    /// with the beginning of the model's own answer.
    ///
    /// # Errors
    /// Returns [`Error::Messages`] if the list is empty, or if the last message has another role or, as the
    /// beginning of an answer, no text.
    pub fn check_answerable(messages: &[Self]) -> Result<()> {
        let Some(last) = messages.last() else {
            return Err(Error::Messages("the list is empty; add a message with the role user".to_owned()));
        };
        let number = messages.len();
        match last.role {
            Role::User | Role::Tool => Ok(()),
            Role::Assistant if !last.text().is_empty() => Ok(()),
            Role::Assistant => Err(Error::Messages(format!(
                "the last message, {number}, has the role assistant and no text to continue; add a message with the role \
                 user"
            ))),
            role => Err(Error::Messages(format!(
                "the last message, {number}, has the role {}; it must have the role user or tool, or assistant to continue \
                 its text",
                role.word()
            ))),
        }
    }

    /// Returns the texts of the parts if the content is a list of parts.
    pub fn part_texts(&self) -> Option<Vec<&str>> {
        let Some(Variable::List(parts)) = self.field(CONTENT) else { return None };
        let text = |part| match Variable::field(part, "text") {
            Some(Variable::Text(text)) => Some(text.as_str()),
            _ => None,
        };
        Some(parts.iter().filter_map(text).collect())
    }

    /// Returns the message as one of another author.
    #[must_use]
    pub fn with_role(&self, role: Role) -> Self {
        let mut message = Self { role, ..self.clone() };
        set(&mut message.fields, "role", role.word().into());
        message
    }

    /// Returns the message with another text in place of its content. Other fields stay.
    #[must_use]
    pub fn with_text(&self, text: impl Into<String>) -> Self {
        let mut message = self.clone();
        set(&mut message.fields, CONTENT, Variable::Text(text.into()));
        message
    }

    /// Returns the message with `mark` at byte `at` of its text or, if it has parts, of its first text. `None` if the
    /// text has no such byte.
    pub(super) fn with_mark(&self, mark: &str, at: usize) -> Option<Self> {
        let mut message = self.clone();
        let (_, content) = message.fields.iter_mut().find(|(name, _)| name == CONTENT)?;
        let text = match content {
            Variable::List(parts) => parts.iter_mut().find_map(|part| match part {
                Variable::Map(fields) => {
                    fields.iter_mut().find(|(name, _)| name == "text").map(|(_, text)| text)
                }
                _ => None,
            })?,
            other => other,
        };
        let Variable::Text(text) = text else { return None };
        if !text.is_char_boundary(at) {
            return None;
        }
        text.insert_str(at, mark);
        Some(message)
    }

    /// Returns the message with `more` at the end of its text.
    pub(super) fn with_more_text(&self, more: &str) -> Self {
        let mut message = self.clone();
        for (name, value) in &mut message.fields {
            if name != CONTENT {
                continue;
            }
            if let Variable::Text(text) = value {
                text.push_str(more);
            }
            let Variable::List(parts) = value else { continue };
            let texts = parts.iter_mut().rev().filter_map(|part| match part {
                Variable::Map(fields) => fields.iter_mut().find(|(name, _)| name == "text"),
                _ => None,
            });
            if let Some((_, Variable::Text(text))) = texts.into_iter().next() {
                text.push_str(more);
            }
        }
        message
    }

    /// Returns true if a text of some field has the character.
    pub(super) fn contains(&self, c: char) -> bool {
        self.fields.iter().any(|(_, value)| value.contains(c))
    }

    /// Returns true if the content is a list of parts.
    pub(super) fn has_parts(&self) -> bool {
        matches!(self.field(CONTENT), Some(Variable::List(_)))
    }

    /// Returns the message as chat templates see it. If `joined`, a list of parts becomes one text.
    pub(super) fn variable(&self, joined: bool) -> Variable {
        let mut fields = self.fields.clone();
        if joined && self.has_parts() {
            let text = self.text().into_owned();
            set(&mut fields, CONTENT, Variable::Text(text));
        }
        // Templates read the reasoning of earlier answers under one of two names.
        if let Some(reasoning) = REASONING.iter().find_map(|name| self.field(name)) {
            if self.field(REASONING[1]).is_none() {
                fields.insert(0, (REASONING[1].to_owned(), reasoning.clone()));
            }
            set(&mut fields, REASONING[0], reasoning.clone());
        }
        Variable::Map(fields)
    }

    fn field(&self, name: &str) -> Option<&Variable> {
        self.fields.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    /// Parses message `number`, counted from 1.
    fn of(number: usize, message: Variable) -> Result<Self> {
        let wrong = |what: String| Error::Messages(format!("message {number}: {what}"));
        let Variable::Map(given) = message else {
            let kind = message.kind();
            return Err(wrong(format!("it is {kind}; it must be an object with role and content")));
        };
        let has_content = given.iter().any(|(name, _)| name == CONTENT);
        let mut fields = Vec::with_capacity(given.len());
        for (name, value) in given {
            if value != Variable::None {
                set(&mut fields, &name, value);
            }
        }
        let mut message = Self { role: Role::User, fields };
        let words = Role::ALL.map(Role::word).join(", ");
        message.role = match message.field("role") {
            Some(Variable::Text(word)) => Role::ALL
                .into_iter()
                .find(|role| role.word() == word)
                .ok_or_else(|| wrong(format!("field \"role\" is {word:?}; it must be one of {words}")))?,
            Some(other) => {
                return Err(wrong(format!("field \"role\" is {}; it must be a string", other.kind())));
            }
            None => return Err(wrong("field \"role\" is missing".to_owned())),
        };
        match message.field(CONTENT) {
            Some(Variable::Text(_)) => {}
            Some(Variable::List(parts)) => {
                parts.iter().enumerate().try_for_each(|(i, part)| check_part(i + 1, part)).map_err(wrong)?;
            }
            Some(other) => {
                let kind = other.kind();
                return Err(wrong(format!(
                    "field \"content\" is {kind}; it must be a string, null or a list of parts"
                )));
            }
            None if has_content || message.role == Role::Assistant => {}
            None => return Err(wrong("field \"content\" is missing".to_owned())),
        }
        message.parse_calls();
        Ok(message)
    }

    /// Parses the arguments of tool calls that are JSON in a string: templates expect objects.
    fn parse_calls(&mut self) {
        let calls = self.fields.iter_mut().filter(|(name, _)| name == "tool_calls");
        for (_, calls) in calls {
            let Variable::List(calls) = calls else { continue };
            for call in calls {
                let Variable::Map(call) = call else { continue };
                for (_, function) in call.iter_mut().filter(|(name, _)| name == "function") {
                    let Variable::Map(function) = function else { continue };
                    for (_, arguments) in function.iter_mut().filter(|(name, _)| name == "arguments") {
                        let Variable::Text(text) = arguments else { continue };
                        if let Ok(parsed @ Variable::Map(_)) = Variable::from_json(text) {
                            *arguments = parsed;
                        }
                    }
                }
            }
        }
    }
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.fields.iter().map(|(name, value)| (name, value)))
    }
}

/// Sets a field. Of equal names, the last value counts, at the first place.
fn set(fields: &mut Vec<(String, Variable)>, name: &str, value: Variable) {
    match fields.iter_mut().find(|(known, _)| known == name) {
        Some((_, old)) => *old = value,
        None => fields.push((name.to_owned(), value)),
    }
}

/// Checks that a part of a content is a text.
fn check_part(number: usize, part: &Variable) -> Result<(), String> {
    let kind = match part.field("type") {
        Some(Variable::Text(kind)) => kind.as_str(),
        _ => "text",
    };
    match part.field("text") {
        Some(Variable::Text(_)) if kind == "text" => Ok(()),
        _ if kind != "text" => {
            Err(format!("part {number} has the type {kind:?}; only parts with the type text are supported"))
        }
        _ => Err(format!("part {number} has no string under \"text\"")),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn messages_are_read_in_order() {
        let text = r#"[{"content": "be brief", "role": "system"}, {"role": "user", "content": ""},
                       {"role": "assistant", "content": "a\nb"}]"#;
        let messages = Message::list(text).unwrap();
        let seen: Vec<_> = messages.iter().map(|message| (message.role(), message.text())).collect();
        let expected = [(Role::System, "be brief"), (Role::User, ""), (Role::Assistant, "a\nb")];
        assert_eq!(seen, expected.map(|(role, text)| (role, text.into())));
        assert_eq!(Message::list("[]").unwrap(), []);
    }

    #[rstest]
    #[case("[{]", "line 1 column 3")]
    #[case("[\n{\"role\": \"user\" \"content\": \"a\"}]", "line 2")]
    #[case("", "line 1")]
    #[case(r#"{"role": "user", "content": "a"}"#, "it is an object; it must be a JSON list")]
    #[case(r#"["a"]"#, "message 1: it is a string; it must be an object")]
    #[case(
        r#"[{"role": "user", "content": "a"}, {"role": "user"}]"#,
        "message 2: field \"content\" is missing"
    )]
    #[case(r#"[{"content": "a"}]"#, "message 1: field \"role\" is missing")]
    #[case(
        r#"[{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]"#,
        "message 1: part 1 has the type \"image_url\""
    )]
    #[case(
        r#"[{"role": "wizard", "content": "a"}]"#,
        "field \"role\" is \"wizard\"; it must be one of system, developer, user, assistant, tool"
    )]
    #[case(r#"[{"role": "user", "content": true}]"#, "a truth value; it must be a string, null or a list")]
    #[case(r#"[{"role": 5, "content": "a"}]"#, "field \"role\" is a number; it must be a string")]
    #[case(r#"[{"role": "user", "content": [{"type": "text"}]}]"#, "part 1 has no string under \"text\"")]
    #[case(r#"[{"role": "user", "content": ["a"]}]"#, "part 1 has no string under \"text\"")]
    fn a_wrong_list_names_the_line_or_the_message_and_the_field(#[case] text: &str, #[case] expected: &str) {
        let error = Message::list(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn messages_are_read_as_clients_write_them() {
        let text = "\u{FEFF}[{\"role\":\"developer\",\"content\":null},
            {\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"text\":\"b\"}]},
            {\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"z\\\":1,\\\"a\\\":2}\"}}]},
            {\"role\":\"tool\",\"tool_call_id\":\"1\",\"content\":\"c\"}]";
        let messages = Message::list(text).unwrap();
        let roles: Vec<Role> = messages.iter().map(Message::role).collect();
        assert_eq!(roles, [Role::Developer, Role::User, Role::Assistant, Role::Tool]);
        assert_eq!(messages[0].variable(false), Variable::Map(vec![("role".to_owned(), "developer".into())]));
        assert_eq!((messages[1].text(), messages[3].text()), ("a\nb".into(), "c".into()));
        let Some(Variable::List(calls)) = messages[2].field("tool_calls") else { panic!("no calls") };
        let arguments = calls[0].field("function").and_then(|function| function.field("arguments"));
        let expected = [("z", 1), ("a", 2)].map(|(name, n)| (name.to_owned(), Variable::Int(n))).to_vec();
        assert_eq!(arguments, Some(&Variable::Map(expected)), "in the order of the string");
    }

    #[test]
    fn the_text_of_a_message_is_replaced_and_its_other_fields_stay() {
        let list = r#"[{"role":"user","name":"n","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]"#;
        let list: Variable = serde_json::from_str(list).unwrap();
        let [message] = &Message::from_variable(list).unwrap()[..] else { panic!("not one message") };
        assert_eq!(message.part_texts(), Some(vec!["a", "b"]));
        let other = message.with_text("c");
        assert_eq!((other.text(), other.part_texts()), ("c".into(), None));
        assert_eq!(other.field("name"), Some(&"n".into()));
        let marked = message.with_mark("|", 1).unwrap();
        assert_eq!(marked.part_texts(), Some(vec!["a|", "b"]), "in the first text");
        assert_eq!(other.with_mark("|", 0).unwrap().text(), "|c");
        for (message, at) in [(&other, 2), (&Message::new(Role::User, "é"), 1)] {
            assert_eq!(message.with_mark("|", at), None);
        }
        let silent = Message::list(r#"[{"role":"user","content":null}]"#).unwrap();
        assert_eq!((silent[0].part_texts(), silent[0].with_mark("|", 0)), (None, None));
    }

    #[test]
    fn reasoning_has_the_two_names_that_templates_read() {
        let names = |field: &str| {
            let list = format!(r#"[{{"role":"assistant","content":"a","{field}":"r"}}]"#);
            let Variable::Map(fields) = Message::list(&list).unwrap()[0].variable(false) else { panic!() };
            fields
                .into_iter()
                .filter(|(_, value)| *value == "r".into())
                .map(|(name, _)| name)
                .collect::<Vec<_>>()
        };
        assert_eq!(names("thinking"), ["thinking", "reasoning_content"]);
        assert_eq!(names("reasoning_content"), ["thinking", "reasoning_content"]);
        assert_eq!(names("reasoning"), ["thinking", "reasoning", "reasoning_content"]);
        assert_eq!(names("mood"), ["mood"]);
    }

    #[test]
    fn a_conversation_ends_with_a_question_a_result_or_the_beginning_of_an_answer() {
        let ending = |role| Message::check_answerable(&[Message::new(role, "a")]);
        for role in Role::ALL {
            let answerable = ![Role::System, Role::Developer].contains(&role);
            assert_eq!(ending(role).is_ok(), answerable, "{role:?}");
        }
        assert!(Message::check_answerable(&[Message::new(Role::Assistant, "")]).is_err());
        assert!(Message::check_answerable(&[]).is_err());
    }
}
