//! Divides an answer into text and calls, as it arrives.

use super::call::ToolCall;
use super::format::ToolCallFormat;
use super::region::{FENCE, Region, RegionReader};

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerPart {
    /// Text for the reader.
    Text(String),
    /// A call of a tool.
    Call(ToolCall),
}

/// Divides the text of an answer into text and calls of tools.
///
/// ```
/// use kvmodel::{AnswerPart, ToolCall, ToolCallFormat, ToolCallParser};
/// let mut parser = ToolCallParser::new(ToolCallFormat::Tagged);
/// let mut parts = parser.push("I look. <tool");
/// assert_eq!(parts, [AnswerPart::Text("I look.".to_owned())]);
/// parts = parser.push("_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>");
/// let call = ToolCall { name: "add".to_owned(), arguments: "{\"a\":1}".to_owned() };
/// assert_eq!(parts, [AnswerPart::Call(call)]);
/// assert!(parser.finish().is_empty());
/// ```
///
/// Text that may still become a call is held back. A call is returned once it is complete, so that a malformed one can be
/// returned as text. White space beside calls is left out. However the text is divided into pieces, the parts are the
/// same, up to the division of text.
#[derive(Debug)]
pub struct ToolCallParser {
    format: ToolCallFormat,
    /// The text that was not returned yet.
    pending: String,
    /// The reader of the region at the beginning of the pending text, behind white space.
    reader: RegionReader,
    /// True if there was no text since the beginning or since the last call.
    at_start: bool,
    /// True once there was a call.
    called: bool,
}

impl ToolCallParser {
    /// Creates a parser for an answer.
    pub fn new(format: ToolCallFormat) -> Self {
        Self {
            format,
            pending: String::new(),
            reader: RegionReader::default(),
            at_start: true,
            called: false,
        }
    }

    /// Adds the next piece of the answer. Returns the parts that have become certain.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        self.pending += text;
        self.read(false)
    }

    /// Ends the answer. Returns the parts that were held back.
    pub fn finish(mut self) -> Vec<AnswerPart> {
        self.read(true)
    }

    fn read(&mut self, last: bool) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        while let Some(length) = self.next(last, &mut parts) {
            self.pending.drain(..length);
        }
        parts
    }

    /// Reads the next part. Returns the number of bytes that it takes, or `None` if nothing is certain.
    fn next(&mut self, last: bool, parts: &mut Vec<AnswerPart>) -> Option<usize> {
        let behind_call = self.called && self.at_start;
        let lists = behind_call && self.format == ToolCallFormat::Json;
        let body = self.pending.trim_start_matches(|c: char| c.is_whitespace() || lists && c == ';');
        let lead = self.pending.len() - body.len();
        // White space, and signs between calls, are left out behind a call.
        let from = if behind_call { lead } else { 0 };
        let text = |length: usize| (length > from).then(|| self.pending[from..length].to_owned());
        if body.is_empty() {
            if !last || self.pending.is_empty() {
                return None;
            }
            parts.extend(text(self.pending.len()).map(AnswerPart::Text));
            return Some(self.pending.len());
        }
        if self.begins_region(body) {
            let (length, given) = match self.reader.read(self.format, body, last) {
                Region::Open => return None,
                Region::Calls(length, calls) => {
                    parts.extend(calls.into_iter().map(AnswerPart::Call));
                    (self.at_start, self.called) = (true, true);
                    (lead + length, None)
                }
                Region::Mark(length) => (lead + length, None),
                Region::Text(length) => {
                    let given = text(lead + length);
                    self.at_start = false;
                    (lead + length, given)
                }
            };
            self.reader = RegionReader::default();
            parts.extend(given.map(AnswerPart::Text));
            return Some(length);
        }
        let first = body.chars().next().map_or(0, char::len_utf8);
        let end = match (self.next_opening(&body[first..]), last) {
            (Some(at), _) => body[..first + at].trim_end().len(),
            (None, true) => body.len(),
            (None, false) => self.certain(body),
        };
        if end == 0 {
            return None;
        }
        parts.extend(text(lead + end).map(AnswerPart::Text));
        self.at_start = false;
        Some(lead + end)
    }

    /// Returns true if text begins with a region that may contain calls.
    fn begins_region(&self, text: &str) -> bool {
        self.format.openings().iter().any(|opening| text.starts_with(opening))
            || self.takes_json() && (text.starts_with(['{', '[']) || text.starts_with(FENCE))
    }

    /// Returns true if JSON without a mark is a call here.
    fn takes_json(&self) -> bool {
        self.format == ToolCallFormat::Json && self.at_start
    }

    fn next_opening(&self, text: &str) -> Option<usize> {
        self.format.openings().iter().filter_map(|opening| text.find(opening)).min()
    }

    /// Returns the length of the beginning of a text that is no part of a region, whatever follows.
    fn certain(&self, text: &str) -> usize {
        let json = self.takes_json().then_some(FENCE);
        let held = |mark: &str| {
            let longest = mark.len().min(text.len() + 1) - 1;
            (1..=longest).rev().find(|&n| mark.is_char_boundary(n) && text.ends_with(&mark[..n]))
        };
        let openings = self.format.openings().iter().copied().filter_map(held);
        // A block of code begins an answer as a whole.
        let block = json.and_then(held).filter(|&held| held == text.len());
        let held = openings.chain(block).max().unwrap_or(0);
        text[..text.len() - held].trim_end().len()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use ToolCallFormat::{DeepSeek, Json, Mistral, Tagged};

    /// Returns the parts in brackets, with neighbouring texts joined.
    fn shown(parts: Vec<AnswerPart>) -> String {
        let mut joined: Vec<String> = Vec::new();
        let mut in_text = false;
        for part in parts {
            match part {
                AnswerPart::Text(text) if in_text => *joined.last_mut().unwrap() += &text,
                AnswerPart::Text(text) => joined.push(text),
                AnswerPart::Call(ToolCall { name, arguments }) => {
                    in_text = false;
                    joined.push(format!("{name} <- {arguments}"));
                    continue;
                }
            }
            in_text = true;
        }
        joined.iter().flat_map(|part| ["[", part.as_str(), "]"]).collect()
    }

    fn parsed<'a>(format: ToolCallFormat, pieces: impl IntoIterator<Item = &'a str>) -> String {
        let mut parser = ToolCallParser::new(format);
        let mut parts: Vec<AnswerPart> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
        parts.extend(parser.finish());
        shown(parts)
    }

    #[rstest]
    #[case::no_call(Tagged, "Hello <b>you</b> \n", "[Hello <b>you</b> \n]")]
    #[case::one(
        Tagged,
        "I look.\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"é\"}}\n</tool_call>\n",
        "[I look.][f <- {\"a\":\"é\"}]"
    )]
    #[case::two(
        Tagged,
        "<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n<tool_call>{\"name\":\"g\",\"arguments\":{\"x\":[1,{}]}}</tool_call> done",
        "[f <- {}][g <- {\"x\":[1,{}]}][done]"
    )]
    #[case::tag_in_a_string(
        Tagged,
        "<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":\"</tool_call>\"}}</tool_call>",
        "[f <- {\"a\":\"</tool_call>\"}]"
    )]
    #[case::arguments_as_text(
        Tagged,
        "<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"a\\\": 1}\"}</tool_call>",
        "[f <- {\"a\":1}]"
    )]
    #[case::tag_missing_at_the_end(Tagged, "<tool_call>{\"name\":\"f\",\"arguments\":{}}\n", "[f <- {}]")]
    #[case::malformed(
        Tagged,
        "a <tool_call>{\"name\": f}</tool_call> b",
        "[a <tool_call>{\"name\": f}</tool_call> b]"
    )]
    #[case::malformed_then_a_call(
        Tagged,
        "<tool_call>no<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>",
        "[<tool_call>no][f <- {}]"
    )]
    #[case::cut(Tagged, "x <tool_call>{\"name\": \"f\", \"argu", "[x <tool_call>{\"name\": \"f\", \"argu]")]
    #[case::no_name(
        Tagged,
        "<tool_call>{\"arguments\":{}}</tool_call>",
        "[<tool_call>{\"arguments\":{}}</tool_call>]"
    )]
    #[case::arguments_of_another_type(
        Tagged,
        "<tool_call>{\"name\":\"f\",\"arguments\":[1]}</tool_call>",
        "[<tool_call>{\"name\":\"f\",\"arguments\":[1]}</tool_call>]"
    )]
    #[case::list(
        Mistral,
        "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", \"arguments\": {}}]",
        "[f <- {\"a\":1}][g <- {}]"
    )]
    #[case::names(
        Mistral,
        "ok [TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}",
        "[ok][f <- {\"a\":1}][g <- {}]"
    )]
    #[case::names_without_marks(Mistral, "[TOOL_CALLS]get_it{\"a\": 1}", "[get_it <- {\"a\":1}]")]
    #[case::prose_behind_a_mark(
        Mistral,
        "[TOOL_CALLS] I would call {\"f\"}",
        "[[TOOL_CALLS] I would call {\"f\"}]"
    )]
    #[case::brackets(Mistral, "see [TOOL] and [1]", "[see [TOOL] and [1]]")]
    #[case::v3(
        DeepSeek,
        "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "[Yes.][f <- {\"a\":1}][g <- {}]"
    )]
    #[case::v31(
        DeepSeek,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"b\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "[f <- {\"a\":\"b\"}]"
    )]
    #[case::v3_malformed(
        DeepSeek,
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{no}<｜tool▁call▁end｜>",
        "[<｜tool▁call▁begin｜>f<｜tool▁sep｜>{no}<｜tool▁call▁end｜>]"
    )]
    #[case::llama(Json, "{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "[f <- {\"a\":1}]")]
    #[case::llama_several(
        Json,
        " {\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}\n",
        "[f <- {}][g <- {}]"
    )]
    #[case::python(Json, "Look: <|python_tag|>{\"name\": \"f\", \"parameters\": {}}", "[Look:][f <- {}]")]
    #[case::python_code(Json, "<|python_tag|>print(1)", "[<|python_tag|>print(1)]")]
    #[case::openai(
        Json,
        "[{\"id\": \"1\", \"type\": \"function\", \"function\": {\"name\": \"f\", \"arguments\": \"{}\"}}]",
        "[f <- {}]"
    )]
    #[case::block(
        Json,
        "```json\n{\"name\": \"f\", \"parameters\": {\"b\": 2}}\n```\nDone.",
        "[f <- {\"b\":2}][Done.]"
    )]
    #[case::block_of_code(Json, "```python\nprint({})\n```", "[```python\nprint({})\n```]")]
    #[case::json_answer(Json, "{\"answer\": {\"name\": 1}}", "[{\"answer\": {\"name\": 1}}]")]
    #[case::name_alone(Json, "{\"name\": \"Alba\"}", "[{\"name\": \"Alba\"}]")]
    #[case::json_behind_text(
        Json,
        "Like {\"name\": \"f\", \"parameters\": {}}",
        "[Like {\"name\": \"f\", \"parameters\": {}}]"
    )]
    #[case::list_of_numbers(Json, "[1, 2]", "[[1, 2]]")]
    #[case::a_lonely_sign(Json, "`code` and ; {", "[`code` and ; {]")]
    #[case::space_alone(Json, " \n", "[ \n]")]
    #[case::empty(Json, "", "")]
    fn parts_are_the_same_however_the_answer_arrives(
        #[case] format: ToolCallFormat,
        #[case] answer: &str,
        #[case] expected: &str,
    ) {
        assert_eq!(parsed(format, [answer]), expected);
        let boundaries: Vec<usize> = (0..=answer.len()).filter(|&at| answer.is_char_boundary(at)).collect();
        for &at in &boundaries {
            assert_eq!(parsed(format, [&answer[..at], &answer[at..]]), expected, "divided at {at}");
        }
        let characters = boundaries.windows(2).map(|two| &answer[two[0]..two[1]]);
        assert_eq!(parsed(format, characters), expected, "one by one");
        // Every form of calls is read from every format's text without a panic, and divided alike.
        for format in [Tagged, Mistral, DeepSeek, Json] {
            let whole = parsed(format, [answer]);
            for step in [1, 2, 3, 7] {
                let places: Vec<usize> =
                    boundaries.iter().copied().step_by(step).chain([answer.len()]).collect();
                let pieces = places.windows(2).map(|two| &answer[two[0]..two[1]]);
                assert_eq!(parsed(format, pieces), whole, "{format:?} in steps of {step}");
            }
        }
    }

    /// Answers put together from marks, JSON and text at random.
    #[test]
    fn random_answers_are_divided_alike_and_lose_nothing_but_space_and_marks() {
        let parts = [
            "<tool_call>",
            "</tool_call>",
            "{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
            "{\"name\": \"f\"",
            "}",
            " ",
            "\n",
            "text",
            "[TOOL_CALLS]",
            "[",
            "]",
            "f[ARGS]{}",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "```",
            "json\n",
            "<|python_tag|>",
            "<|",
            "é",
            "\"",
            ";",
            "<",
        ];
        let mut state = 9u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut calls = 0;
        for _ in 0..3000 {
            let answer: String = (0..=random(12)).map(|_| parts[random(parts.len())]).collect();
            for format in [Tagged, Mistral, DeepSeek, Json] {
                let whole = parsed(format, [answer.as_str()]);
                let characters = answer.char_indices().map(|(at, c)| &answer[at..at + c.len_utf8()]);
                assert_eq!(parsed(format, characters), whole, "{format:?}: {answer:?}");
                if whole.contains(" <- ") {
                    calls += 1;
                } else if format != DeepSeek {
                    assert_eq!(whole.trim_matches(['[', ']']), answer.trim_matches(['[', ']']), "{format:?}");
                }
            }
        }
        assert!(calls > 100, "{calls}");
    }

    #[test]
    fn long_arguments_are_read_once() {
        let long = format!(
            "<tool_call>{{\"name\": \"f\", \"arguments\": {{\"a\": \"{}\"}}}}</tool_call>",
            "x".repeat(2_000_000)
        );
        let begun = std::time::Instant::now();
        let pieces = (0..long.len()).step_by(40).map(|at| &long[at..long.len().min(at + 40)]);
        assert!(parsed(Tagged, pieces).starts_with("[f <- {\"a\":\"xxx"));
        assert!(begun.elapsed().as_secs() < 5, "{:?}", begun.elapsed());
    }
}
