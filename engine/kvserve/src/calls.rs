//! Reads calls of tools from a sample while it is computed.

use kvmodel::{AnswerPart, ToolCallParser};

use crate::shape::CallReading;

/// A reader of one sample.
#[derive(Debug)]
pub(crate) struct CallReader {
    reading: CallReading,
    /// `None` once the sample has ended.
    parser: Option<ToolCallParser>,
    called: bool,
}

impl CallReader {
    pub(crate) fn new(reading: CallReading) -> Self {
        Self { reading, parser: Some(ToolCallParser::new(reading.format)), called: false }
    }

    /// Adds new text. Returns the text and the calls that have become certain.
    pub(crate) fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        let parts = self.parser.as_mut().map(|parser| parser.push(text)).unwrap_or_default();
        self.kept(parts)
    }

    /// Ends the sample. Returns what was held back, except the beginning of a call of an answer that is not `whole`.
    pub(crate) fn finish(&mut self, whole: bool) -> Vec<AnswerPart> {
        let mut parts = self.parser.take().map(ToolCallParser::finish).unwrap_or_default();
        if !whole {
            let marks = self.reading.format.marks();
            let begins = |text: &str| marks.iter().any(|mark| text.trim_start().starts_with(mark));
            let begun = parts.iter().position(|part| matches!(part, AnswerPart::Text(text) if begins(text)));
            parts.truncate(begun.unwrap_or(parts.len()));
        }
        self.kept(parts)
    }

    /// Returns true if there was a call.
    pub(crate) fn has_called(&self) -> bool {
        self.called
    }

    /// Returns true if there was a call, and no other may follow.
    pub(crate) fn is_complete(&self) -> bool {
        self.called && !self.reading.several
    }

    /// Leaves out what an answer may not have: text where it is calls alone, and calls behind the only one.
    fn kept(&mut self, parts: Vec<AnswerPart>) -> Vec<AnswerPart> {
        let mut kept = Vec::new();
        for part in parts {
            let fits = match &part {
                AnswerPart::Text(_) => !self.reading.forced && !self.is_complete(),
                AnswerPart::Call(_) => !self.is_complete(),
            };
            if fits {
                self.called |= matches!(part, AnswerPart::Call(_));
                kept.push(part);
            }
        }
        kept
    }
}

#[cfg(test)]
mod tests {
    use kvmodel::ToolCallFormat;

    use super::*;

    const CALL: &str = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";

    fn read(several: bool, forced: bool, whole: bool, answer: &str) -> String {
        let mut reader = CallReader::new(CallReading { format: ToolCallFormat::Tagged, several, forced });
        let mut parts: Vec<AnswerPart> =
            answer.chars().flat_map(|c| reader.push(c.encode_utf8(&mut [0; 4]))).collect();
        parts.extend(reader.finish(whole));
        let text = |part| match part {
            AnswerPart::Text(text) => text,
            AnswerPart::Call(call) => format!("[{}]", call.name),
        };
        parts.into_iter().map(text).collect()
    }

    #[test]
    fn an_answer_has_only_what_it_may_have() {
        let two = format!("See. {CALL}\n{CALL} Done.");
        assert_eq!(read(true, false, true, &two), "See.[f][f]Done.");
        assert_eq!(read(false, false, true, &two), "See.[f]");
        assert_eq!(read(true, true, true, &two), "[f][f]");
    }

    #[test]
    fn the_beginning_of_a_call_is_text_only_in_a_whole_answer() {
        for end in [12, 15, 30, CALL.find("\n</").unwrap() - 1] {
            let cut = format!("See. {}", &CALL[..end]);
            assert_eq!(read(true, false, false, &cut).trim(), "See.", "{end}");
            assert_eq!(read(true, true, false, &cut), "", "{end}");
        }
        let malformed = "See. <tool_call>\n{\"name\"";
        assert_eq!(read(true, false, true, malformed), malformed);
        // A sign that begins a mark is text, whether or not there is more.
        assert_eq!(read(true, false, false, "a < b"), "a < b");
    }
}
