//! Messages of a conversation, in memory and in files.

use serde::Serialize;
use serde_json::Value;

use crate::error::{Error, Result};

/// The author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The model's operator.
    System,
    /// The user, who asks the model.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 3] = [Self::System, Self::User, Self::Assistant];

    /// Returns the name of the role in chat templates.
    pub fn word(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// A message of a conversation.
///
/// ```
/// use kvmodel::{Message, Role};
/// let messages = Message::list(r#"[{"role": "user", "content": "Why is the sky blue?"}]"#)?;
/// assert_eq!(messages, [Message::new(Role::User, "Why is the sky blue?")]);
/// let error = Message::list(r#"[{"role": "user", "content": 5}]"#).unwrap_err();
/// assert!(error.to_string().contains(r#"message 1: field "content""#));
/// # Ok::<(), kvmodel::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Message {
    /// The author.
    pub role: Role,
    /// The text.
    pub content: String,
}

impl Message {
    /// Creates a message.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into() }
    }

    /// Parses a JSON list of objects with the fields `role` and `content`.
    ///
    /// # Errors
    /// Returns [`Error::Messages`]: with the line if the JSON is malformed, and otherwise with the message
    /// and the field that is wrong.
    pub fn list(json: &str) -> Result<Vec<Self>> {
        let value: Value = serde_json::from_str(json).map_err(|error| {
            Error::Messages(format!("{error}; it must be a JSON list of objects with role and content"))
        })?;
        let Value::Array(messages) = value else {
            return Err(Error::Messages(format!(
                "it is {}; it must be a JSON list of objects with role and content",
                kind(&value)
            )));
        };
        messages.iter().enumerate().map(|(i, message)| Self::of(i + 1, message)).collect()
    }

    /// Checks that a conversation ends with a user's message.
    ///
    /// # Errors
    /// Returns [`Error::Messages`] if the last message is not the user's, or the list is empty.
    pub fn check_answerable(messages: &[Self]) -> Result<()> {
        match messages.last() {
            Some(last) if last.role == Role::User => Ok(()),
            Some(last) => Err(Error::Messages(format!(
                "the last message, {}, has the role {}; it must have the role user",
                messages.len(),
                last.role.word()
            ))),
            None => Err(Error::Messages("the list is empty; add a message with the role user".to_owned())),
        }
    }

    /// Parses message `number`, counted from 1.
    fn of(number: usize, message: &Value) -> Result<Self> {
        let wrong = |what: String| Error::Messages(format!("message {number}: {what}"));
        let Value::Object(fields) = message else {
            return Err(wrong(format!(
                "it is {}; it must be an object with role and content",
                kind(message)
            )));
        };
        let text = |name: &str| match fields.get(name) {
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(wrong(format!("field {name:?} is {}; it must be a string", kind(other)))),
            None => Err(wrong(format!("field {name:?} is missing"))),
        };
        let (word, content) = (text("role")?, text("content")?);
        let role = Role::ALL.into_iter().find(|role| role.word() == word).ok_or_else(|| {
            wrong(format!("field \"role\" is {word:?}; it must be system, user or assistant"))
        })?;
        if let Some(name) = fields.keys().find(|name| !["role", "content"].contains(&name.as_str())) {
            return Err(wrong(format!(
                "field {name:?} is unknown; remove it (the only fields are role and content)"
            )));
        }
        Ok(Self::new(role, content))
    }
}

/// Returns the name for a JSON value's type.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
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
        let expected = [
            Message::new(Role::System, "be brief"),
            Message::new(Role::User, ""),
            Message::new(Role::Assistant, "a\nb"),
        ];
        assert_eq!(Message::list(text).unwrap(), expected);
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
        r#"[{"role": "user", "content": [{"text": "a"}]}]"#,
        "field \"content\" is a list; it must be a string"
    )]
    #[case(
        r#"[{"role": "wizard", "content": "a"}]"#,
        "field \"role\" is \"wizard\"; it must be system, user or assistant"
    )]
    #[case(r#"[{"role": "user", "content": "a", "name": "bo"}]"#, "message 1: field \"name\" is unknown")]
    fn a_wrong_list_names_the_line_or_the_message_and_the_field(#[case] text: &str, #[case] expected: &str) {
        let error = Message::list(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
