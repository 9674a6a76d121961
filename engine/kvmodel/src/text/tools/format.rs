//! The forms in which models write calls.

/// The form in which a model writes calls of tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ToolCallFormat {
    /// JSON objects between `<tool_call>` and `</tool_call>`.
    Tagged,
    /// A list of JSON objects after `[TOOL_CALLS]`, or a name and a JSON object after each.
    Mistral,
    /// Names and JSON objects between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`.
    DeepSeek,
    /// JSON objects at the beginning of the answer, or after `<|python_tag|>`.
    #[default]
    Json,
}

pub(super) const TAG: [&str; 2] = ["<tool_call>", "</tool_call>"];
pub(super) const MISTRAL: [&str; 2] = ["[TOOL_CALLS]", "[ARGS]"];
pub(super) const DEEPSEEK: [&str; 2] = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"];
pub(super) const DEEPSEEK_CALL: [&str; 3] =
    ["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"];
pub(super) const PYTHON: &str = "<|python_tag|>";

impl ToolCallFormat {
    /// Returns the form that a chat template shows.
    pub(in crate::text) fn of(template: &str) -> Self {
        let shows = |mark: &str| template.contains(mark);
        match () {
            () if shows(TAG[0]) => Self::Tagged,
            () if shows(MISTRAL[0]) => Self::Mistral,
            () if shows(DEEPSEEK_CALL[0]) => Self::DeepSeek,
            () => Self::Json,
        }
    }

    /// Returns the marks of the form. Where a tokenizer has special tokens for them, the text of an answer lacks them
    /// unless it is decoded with [`TextStream::showing`](crate::TextStream::showing).
    pub fn marks(self) -> Vec<&'static str> {
        match self {
            Self::Tagged => TAG.to_vec(),
            Self::Mistral => MISTRAL.to_vec(),
            Self::DeepSeek => [&DEEPSEEK[..], &DEEPSEEK_CALL[..]].concat(),
            Self::Json => vec![PYTHON],
        }
    }

    /// Returns the marks with which a region of calls begins.
    pub(super) fn openings(self) -> &'static [&'static str] {
        match self {
            Self::Tagged => &TAG[..1],
            Self::Mistral => &MISTRAL[..1],
            Self::DeepSeek => &[DEEPSEEK[0], DEEPSEEK[1], DEEPSEEK_CALL[0]],
            Self::Json => &[PYTHON],
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::text::TextCodec;

    const WORDS: &str = include_str!("../../../tests/words.json");

    #[test]
    fn the_form_is_read_from_the_template() {
        let listed = "{% if tools %}{{ tools | tojson }}{% endif %}";
        for (template, format, takes_tools) in [
            // Qwen's and Hermes' templates describe the tags to the model.
            (format!("{listed}<tool_call>\n{{\"name\": …}}\n</tool_call>"), ToolCallFormat::Tagged, true),
            (
                format!("{listed}{{{{ '[TOOL_CALLS]' + messages[0].content }}}}"),
                ToolCallFormat::Mistral,
                true,
            ),
            (format!("{listed}{{{{ '<｜tool▁call▁begin｜>' }}}}"), ToolCallFormat::DeepSeek, true),
            (format!("{listed}<|python_tag|>"), ToolCallFormat::Json, true),
            (listed.to_owned(), ToolCallFormat::Json, true),
            ("{{ messages[0].content }}".to_owned(), ToolCallFormat::Json, false),
        ] {
            let config = json!({ "chat_template": template }).to_string();
            let codec = TextCodec::from_bytes(WORDS.as_bytes(), Some(config.as_bytes())).unwrap();
            assert_eq!((codec.tool_call_format(), codec.takes_tools()), (format, takes_tools), "{template}");
        }
        let none = TextCodec::from_bytes(WORDS.as_bytes(), None).unwrap();
        assert_eq!((none.tool_call_format(), none.takes_tools()), (ToolCallFormat::Json, false));
    }
}
