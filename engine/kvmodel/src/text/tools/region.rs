//! Reads one region of an answer that may contain calls.

use super::call::ToolCall;
use super::format::{DEEPSEEK, DEEPSEEK_CALL, MISTRAL, PYTHON, TAG, ToolCallFormat};
use super::scanner::JsonScanner;

/// The mark of a block of code.
pub(super) const FENCE: &str = "```";

/// The longest name of a block's language.
const LONGEST_LANGUAGE: usize = 20;

/// The longest text between a name and its arguments: an ID with its marks.
const LONGEST_ID: usize = 100;

/// The keys with which an object that may be a call begins.
const KEYS: [&str; 6] = ["name", "arguments", "parameters", "type", "function", "id"];

/// The contents of a region.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Region {
    /// Calls, in the first bytes.
    Calls(usize, Vec<ToolCall>),
    /// A mark without a call of its own, in the first bytes.
    Mark(usize),
    /// No call: the first bytes are text.
    Text(usize),
    /// Not known before more text arrives.
    Open,
}

/// A reader of one region, which remembers what it has read.
#[derive(Debug, Default)]
pub(super) struct RegionReader {
    scanner: JsonScanner,
    /// The number of bytes in which the end was not found.
    searched: usize,
}

/// The end of a JSON value.
enum JsonEnd {
    /// The value takes the first bytes.
    At(usize),
    Open,
}

impl RegionReader {
    /// Reads a region that begins with one of the format's openings, or with JSON. `text` begins with the text of
    /// earlier calls. If `last` is true, no more text follows.
    pub(super) fn read(&mut self, format: ToolCallFormat, text: &str, last: bool) -> Region {
        let region = match format {
            ToolCallFormat::Tagged => self.tagged(text, last),
            ToolCallFormat::Mistral => self.mistral(text),
            ToolCallFormat::DeepSeek => self.deepseek(text),
            ToolCallFormat::Json => self.json_or_block(text),
        };
        match region {
            Region::Open if last => Region::Text(opening_length(format, text)),
            region => region,
        }
    }

    fn tagged(&mut self, text: &str, last: bool) -> Region {
        let [open, close] = TAG;
        let at = open.len() + space(&text[open.len()..]);
        let no = Region::Text(open.len());
        let end = match self.json_at(text, at, &['{']) {
            Some(JsonEnd::At(end)) => end,
            Some(JsonEnd::Open) => return Region::Open,
            None => return no,
        };
        let behind = end + space(&text[end..]);
        let rest = &text[behind..];
        let length = if rest.starts_with(close) {
            behind + close.len()
        } else if close.starts_with(rest) {
            // Some models end the answer in place of the tag.
            if !last {
                return Region::Open;
            }
            text.len()
        } else {
            return no;
        };
        calls_in(&text[at..end]).map_or(no, |calls| Region::Calls(length, calls))
    }

    fn mistral(&mut self, text: &str) -> Region {
        let [open, arguments] = MISTRAL;
        let at = open.len() + space(&text[open.len()..]);
        let no = Region::Text(open.len());
        if text[at..].is_empty() {
            return Region::Open;
        }
        if text[at..].starts_with(['[', '{']) {
            return match self.json_at(text, at, &['[', '{']) {
                Some(JsonEnd::At(end)) => {
                    calls_in(&text[at..end]).map_or(no, |calls| Region::Calls(end, calls))
                }
                Some(JsonEnd::Open) => Region::Open,
                None => no,
            };
        }
        let is_letter = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        let name = text[at..].find(|c| !is_letter(c)).map_or(text.len(), |length| at + length);
        if name == at {
            return no;
        }
        // Without its special tokens, the text has the arguments directly behind the name.
        let Some(brace) = text[name..].find('{').map(|brace| name + brace) else {
            let between = &text[name..];
            let possible = between.is_empty() || between.starts_with(['[', ' ', '\n']);
            return if possible && between.len() < LONGEST_ID { Region::Open } else { no };
        };
        let between = text[name..brace].trim();
        if brace - name >= LONGEST_ID
            || !(between.is_empty() || between.starts_with('[') && between.ends_with(arguments))
        {
            return no;
        }
        match self.json_at(text, brace, &['{']) {
            Some(JsonEnd::At(end)) => match ToolCall::from_text(&text[at..name], &text[brace..end]) {
                Some(call) => Region::Calls(end, vec![call]),
                None => no,
            },
            _ => Region::Open,
        }
    }

    fn deepseek(&mut self, text: &str) -> Region {
        let [open, separator, close] = DEEPSEEK_CALL;
        if let Some(mark) = DEEPSEEK.iter().find(|mark| text.starts_with(**mark)) {
            return Region::Mark(mark.len());
        }
        let mut from = self.searched.saturating_sub(close.len()).max(open.len());
        while !text.is_char_boundary(from) {
            from -= 1;
        }
        let Some(end) = text[from..].find(close).map(|end| from + end) else {
            self.searched = text.len();
            return Region::Open;
        };
        let call = text[open.len()..end].split_once(separator).and_then(|(first, rest)| {
            match rest.split_once(FENCE) {
                // The name stands behind the kind of the tool, and the arguments in a block of code.
                Some((name, block)) => {
                    let (_language, arguments) = block.split_once('\n')?;
                    ToolCall::from_text(name, arguments.trim_end().strip_suffix(FENCE)?)
                }
                None => ToolCall::from_text(first, rest),
            }
        });
        call.map_or(Region::Text(open.len()), |call| Region::Calls(end + close.len(), vec![call]))
    }

    fn json_or_block(&mut self, text: &str) -> Region {
        if text.starts_with(FENCE) {
            return self.block(text);
        }
        let mark = if text.starts_with(PYTHON) { PYTHON.len() } else { 0 };
        let at = mark + space(&text[mark..]);
        let no = Region::Text(mark.max(1));
        if text[at..].is_empty() {
            return Region::Open;
        }
        match self.call_at(text, at) {
            Some(JsonEnd::At(end)) => calls_in(&text[at..end]).map_or(no, |calls| Region::Calls(end, calls)),
            Some(JsonEnd::Open) => Region::Open,
            None => no,
        }
    }

    /// Reads a block of code with a call.
    fn block(&mut self, text: &str) -> Region {
        let no = Region::Text(FENCE.len());
        let Some(line) = text[FENCE.len()..].find('\n').map(|line| FENCE.len() + line) else {
            let few = text.len() - FENCE.len() <= LONGEST_LANGUAGE;
            return if few { Region::Open } else { no };
        };
        let at = line + space(&text[line..]);
        if line - FENCE.len() > LONGEST_LANGUAGE {
            return no;
        }
        if text[at..].is_empty() {
            return Region::Open;
        }
        let end = match self.call_at(text, at) {
            Some(JsonEnd::At(end)) => end,
            Some(JsonEnd::Open) => return Region::Open,
            None => return no,
        };
        let behind = end + space(&text[end..]);
        let rest = &text[behind..];
        if rest.starts_with(FENCE) {
            return calls_in(&text[at..end]).map_or(no, |calls| Region::Calls(behind + FENCE.len(), calls));
        }
        if FENCE.starts_with(rest) { Region::Open } else { no }
    }

    /// Returns the end of the JSON value at `at` if it may be a call.
    fn call_at(&mut self, text: &str, at: usize) -> Option<JsonEnd> {
        may_be_call(&text[at..]).then(|| self.json_at(text, at, &['{', '['])).flatten()
    }

    /// Returns the end of the JSON object or list at `at`, or `None` if there is none. `at` is the same in all calls.
    fn json_at(&mut self, text: &str, at: usize, begins: &[char]) -> Option<JsonEnd> {
        let rest = &text[at..];
        if rest.is_empty() {
            return Some(JsonEnd::Open);
        }
        if !rest.starts_with(begins) {
            return None;
        }
        Some(self.scanner.end(rest).map_or(JsonEnd::Open, |length| JsonEnd::At(at + length)))
    }
}

/// Returns the length of the opening that a region begins with.
fn opening_length(format: ToolCallFormat, text: &str) -> usize {
    let marks = format.openings().iter().copied().chain([FENCE]);
    marks.filter(|mark| text.starts_with(mark)).map(str::len).max().unwrap_or(1)
}

/// Returns the number of bytes of white space at the beginning.
fn space(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

fn calls_in(text: &str) -> Option<Vec<ToolCall>> {
    ToolCall::list(&serde_json::from_str(text).ok()?)
}

/// Returns false if the beginning of a JSON value shows that it is no call.
fn may_be_call(text: &str) -> bool {
    let mut rest = text.trim_start();
    if let Some(items) = rest.strip_prefix('[') {
        rest = items.trim_start();
    }
    let Some(fields) = rest.strip_prefix('{').map(str::trim_start) else { return rest.is_empty() };
    let Some(key) = fields.strip_prefix('"') else { return fields.is_empty() };
    match key.split_once('"') {
        Some((key, _)) => KEYS.contains(&key),
        None => KEYS.iter().any(|known| known.starts_with(key)),
    }
}
