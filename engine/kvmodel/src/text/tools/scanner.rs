//! Finds the end of a JSON object or list in text that arrives in pieces.

/// A scanner over the bytes of a JSON object or list. It counts brackets outside of strings, and leaves the rest to a
/// parser.
#[derive(Debug, Clone, Default)]
pub(super) struct JsonScanner {
    /// The number of bytes that were scanned.
    scanned: usize,
    depth: usize,
    in_string: bool,
    escaped: bool,
    /// The length of the object or list, once it is known.
    end: Option<usize>,
}

impl JsonScanner {
    /// Scans `text`, which begins with the bytes that were scanned before. Returns the length of the object or list once
    /// it is complete.
    pub(super) fn end(&mut self, text: &str) -> Option<usize> {
        if self.end.is_some() {
            return self.end;
        }
        for &byte in text.as_bytes().get(self.scanned..)? {
            self.scanned += 1;
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        self.end = Some(self.scanned);
                        return self.end;
                    }
                }
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_found_whatever_the_pieces_are() {
        for (text, end) in [
            (r#"{"a": "}]\"}", "b": [1, {"c": "\\"}]} rest"#, Some(37)),
            ("[{}, []]", Some(8)),
            (r#"{"a": "unfinished}"#, None),
            ("[[]", None),
        ] {
            assert_eq!(JsonScanner::default().end(text), end, "{text}");
            let mut scanner = JsonScanner::default();
            let found = (0..=text.len()).find_map(|length| scanner.end(&text[..length]));
            assert_eq!((found, scanner.end(text)), (end, end), "{text}");
        }
    }
}
