//! An index over texts that finds where they stand in another text.
//!
//! ```text
//!  at each byte of the text            a hash of the next 64 bytes: does any known text begin so?  (almost never)
//!      at each byte where one does     a binary search over lengths: which known text is the longest beginning?
//!          the text that it names      compared byte by byte; the search goes on behind it
//! ```
//!
//! The binary search is that of Waldvogel and others for the longest prefix of a network address. A text of `n`
//! bytes leaves a *mark* at each length that a binary search for `n` visits on its way up: for 100 = 64 + 32 + 4, the
//! marks have 64, 96 and 100 bytes. Each mark knows the longest known text that it begins with. Therefore, the
//! number of looked-up marks at a byte depends only on the longest known text, and not on the number of known texts
//! that begin alike.

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasherDefault;
use std::ops::{Bound, Range};
use std::sync::Arc;

use super::fingerprint::{Fingerprints, PrefixHashes, SpreadHasher, multiply};

/// The exponent of two of [`HEAD`].
const HEAD_LEVEL: usize = 6;

/// The number of bytes that a known text has at least. The search looks for texts whose first bytes are known.
pub(super) const HEAD: usize = 1 << HEAD_LEVEL;

type SpreadMap<K, V> = HashMap<K, V, BuildHasherDefault<SpreadHasher>>;

/// The number of a text in an index. The numbers of removed texts are used again.
pub(super) type TextNumber = usize;

/// A set of texts of at least [`HEAD`] bytes each.
#[derive(Debug)]
pub(super) struct TextIndex {
    fingerprints: Fingerprints,
    texts: Vec<Option<KnownText>>,
    free: Vec<TextNumber>,
    /// The texts in their order as bytes, in which those that begin with a text directly follow it.
    sorted: BTreeMap<Arc<str>, TextNumber>,
    /// For each hash of a text's first [`HEAD`] bytes, the number of texts that have it.
    heads: SpreadMap<u64, usize>,
    marks: SpreadMap<MarkKey, Mark>,
    /// The number of bits of the longest text's length.
    levels: usize,
}

#[derive(Debug)]
struct KnownText {
    text: Arc<str>,
    head: u64,
    /// The keys of the text's marks, shortest first.
    marks: Vec<MarkKey>,
}

/// A beginning of a text: its length and its hash.
type MarkKey = (usize, u64);

#[derive(Debug)]
struct Mark {
    /// The number of texts that have the mark.
    texts: usize,
    /// The longest text that the mark begins with, or that is the mark.
    best: Option<TextNumber>,
}

/// The work of a search, for tests of its bound.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct SearchWork {
    /// The number of marks that were looked up.
    pub(super) marks: usize,
    /// The number of bytes that were compared.
    pub(super) compared: usize,
}

impl TextIndex {
    pub(super) fn new() -> Self {
        Self::with_fingerprints(Fingerprints::random())
    }

    fn with_fingerprints(fingerprints: Fingerprints) -> Self {
        Self {
            fingerprints,
            texts: Vec::new(),
            free: Vec::new(),
            sorted: BTreeMap::new(),
            heads: SpreadMap::default(),
            marks: SpreadMap::default(),
            levels: 0,
        }
    }

    /// Returns the number of a known text.
    pub(super) fn number(&self, text: &str) -> Option<TextNumber> {
        self.sorted.get(text).copied()
    }

    /// Adds a text of at least [`HEAD`] bytes. Returns its number, or the number that it already has.
    pub(super) fn insert(&mut self, text: &Arc<str>) -> TextNumber {
        if let Some(number) = self.number(text) {
            return number;
        }
        let number = self.free.pop().unwrap_or_else(|| {
            self.texts.push(None);
            self.texts.len() - 1
        });
        self.levels = self.levels.max((usize::BITS - text.len().leading_zeros()) as usize);
        let hashes = self.fingerprints.prefixes(text);
        let marks = self.mark_keys(&hashes);
        for &key in &marks {
            let (length, _) = key;
            let best = (!self.marks.contains_key(&key))
                .then(|| self.longest_beginning(&hashes, 0, length, &mut SearchWork::default()));
            let mark = self.marks.entry(key).or_insert(Mark { texts: 0, best: best.flatten() });
            mark.texts += 1;
        }
        let head = self.head(&hashes, 0);
        *self.heads.entry(head).or_default() += 1;
        self.texts[number] = Some(KnownText { text: Arc::clone(text), head, marks });
        self.sorted.insert(Arc::clone(text), number);
        self.change_marks_behind(text, |mark, length_of| {
            if mark.best.is_none_or(|best| length_of(best) < text.len()) {
                mark.best = Some(number);
            }
        });
        number
    }

    /// Removes a text. Returns false if it is not known.
    pub(super) fn remove(&mut self, text: &str) -> bool {
        let Some(number) = self.number(text) else { return false };
        let hashes = self.fingerprints.prefixes(text);
        let shorter = self.longest_beginning(&hashes, 0, text.len() - 1, &mut SearchWork::default());
        self.change_marks_behind(text, |mark, _| {
            if mark.best == Some(number) {
                mark.best = shorter;
            }
        });
        let Some(known) = self.texts[number].take() else { return false };
        for key in &known.marks {
            if let Some(mark) = self.marks.get_mut(key) {
                mark.texts -= 1;
                if mark.texts == 0 {
                    self.marks.remove(key);
                }
            }
        }
        if let Some(texts) = self.heads.get_mut(&known.head) {
            *texts -= 1;
            if *texts == 0 {
                self.heads.remove(&known.head);
            }
        }
        self.sorted.remove(text);
        self.free.push(number);
        true
    }

    /// Finds the known texts that stand in `text`, leftmost first. Of texts that begin at the same byte, the
    /// longest is found. The search goes on behind each text that it finds.
    pub(super) fn find(&self, text: &str) -> Vec<(TextNumber, Range<usize>)> {
        self.find_counting(text, &mut SearchWork::default())
    }

    fn find_counting(&self, text: &str, work: &mut SearchWork) -> Vec<(TextNumber, Range<usize>)> {
        let mut found = Vec::new();
        if self.sorted.is_empty() || text.len() < HEAD {
            return found;
        }
        let hashes = self.fingerprints.prefixes(text);
        let mut at = 0;
        while at + HEAD <= text.len() {
            if let Some(number) = self.at(text, &hashes, at, work) {
                let end = at + self.length(number);
                found.push((number, at..end));
                at = end;
            } else {
                at += 1;
            }
        }
        found
    }

    /// Returns the longest known text that stands at `at`.
    fn at(&self, text: &str, hashes: &PrefixHashes, at: usize, work: &mut SearchWork) -> Option<TextNumber> {
        if !self.heads.contains_key(&self.head(hashes, at)) {
            return None;
        }
        let number = self.longest_beginning(hashes, at, text.len() - at, work)?;
        let known = self.texts[number].as_ref()?;
        work.compared += known.text.len();
        // The hashes say that the bytes are equal. They decide, because equal hashes do not prove it.
        text.as_bytes()[at..].starts_with(known.text.as_bytes()).then_some(number)
    }

    /// Returns the longest known text of at most `most` bytes that stands at `at`, going by the hashes alone.
    fn longest_beginning(
        &self,
        hashes: &PrefixHashes,
        at: usize,
        most: usize,
        work: &mut SearchWork,
    ) -> Option<TextNumber> {
        let (mut length, mut power, mut best) = (0, 1, None);
        for level in (0..self.levels).rev() {
            let longer = length + (1 << level);
            if longer > most {
                continue;
            }
            let longer_power = multiply(power, self.fingerprints.power(level));
            work.marks += 1;
            if let Some(mark) = self.marks.get(&(longer, hashes.of(at, longer, longer_power))) {
                (length, power, best) = (longer, longer_power, mark.best);
            }
        }
        best
    }

    /// Returns the keys of a text's marks.
    fn mark_keys(&self, hashes: &PrefixHashes) -> Vec<MarkKey> {
        let (mut length, mut power, mut keys) = (0, 1, Vec::new());
        for level in (0..self.levels).rev().filter(|level| hashes.len() >> level & 1 == 1) {
            length += 1 << level;
            power = multiply(power, self.fingerprints.power(level));
            keys.push((length, hashes.of(0, length, power)));
        }
        keys
    }

    /// Calls `change` for each mark that begins with `text`. The function that it gets returns the length of a
    /// known text.
    fn change_marks_behind(
        &mut self,
        text: &str,
        mut change: impl FnMut(&mut Mark, &dyn Fn(TextNumber) -> usize),
    ) {
        let Self { texts, sorted, marks, .. } = self;
        let length_of = |number: TextNumber| texts[number].as_ref().map_or(0, |known| known.text.len());
        let from = (Bound::Included(text), Bound::Unbounded);
        for (_, &number) in sorted.range::<str, _>(from).take_while(|(known, _)| known.starts_with(text)) {
            let keys = texts[number].iter().flat_map(|known| &known.marks);
            for key in keys.filter(|(length, _)| *length >= text.len()) {
                if let Some(mark) = marks.get_mut(key) {
                    change(mark, &length_of);
                }
            }
        }
    }

    fn head(&self, hashes: &PrefixHashes, at: usize) -> u64 {
        hashes.of(at, HEAD, self.fingerprints.power(HEAD_LEVEL))
    }

    fn length(&self, number: TextNumber) -> usize {
        self.texts[number].as_ref().map_or(0, |known| known.text.len())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Returns what a plain search finds: at each byte, tries every text.
    fn plain<'a>(known: &'a BTreeSet<Arc<str>>, text: &str) -> Vec<(&'a str, Range<usize>)> {
        let (mut at, mut found) = (0, Vec::new());
        while at < text.len() {
            let here = known.iter().filter(|known| text.as_bytes()[at..].starts_with(known.as_bytes()));
            match here.max_by_key(|known| known.len()) {
                Some(longest) => {
                    found.push((&**longest, at..at + longest.len()));
                    at += longest.len();
                }
                None => at += 1,
            }
        }
        found
    }

    fn found<'a>(index: &'a TextIndex, text: &str) -> Vec<(&'a str, Range<usize>)> {
        let text_of = |number: TextNumber| &*index.texts[number].as_ref().unwrap().text;
        index.find(text).into_iter().map(|(number, range)| (text_of(number), range)).collect()
    }

    fn index_of(texts: &[String]) -> TextIndex {
        let mut index = TextIndex::new();
        for text in texts {
            index.insert(&Arc::from(text.as_str()));
        }
        index
    }

    /// Texts that begin alike, contain each other and repeat themselves, some with characters of several bytes.
    fn texts() -> impl Strategy<Value = String> {
        let heads = prop_oneof![Just("a".repeat(64)), Just("ab".repeat(32)), Just("né".repeat(22))];
        let piece = prop_oneof![
            Just("a".to_owned()),
            Just("b".to_owned()),
            Just("é".to_owned()),
            Just("a".repeat(63)),
            Just("a".repeat(64)),
            Just("ab".repeat(40)),
        ];
        (heads, prop::collection::vec(piece, 0..6)).prop_map(|(head, tail)| head + &tail.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

        #[test]
        fn what_is_found_equals_a_plain_search_after_any_insertions_and_removals(
            operations in prop::collection::vec((any::<bool>(), texts()), 1..40),
            parts in prop::collection::vec((0usize..60, texts(), 0usize..4), 1..8),
        ) {
            let (mut index, mut known) = (TextIndex::new(), BTreeSet::new());
            for (number, (adds, text)) in operations.iter().enumerate() {
                let text: Arc<str> = Arc::from(text.as_str());
                // Removals of texts that were never added would hardly test anything.
                let text = known.iter().nth(number % 7).filter(|_| !adds).cloned().unwrap_or(text);
                if *adds {
                    index.insert(&text);
                    known.insert(text);
                } else {
                    prop_assert_eq!(index.remove(&text), known.remove(&text));
                }
            }
            let mut prompt = String::new();
            for (which, other, filling) in &parts {
                prompt += &"a".repeat(*filling);
                prompt += known.iter().nth(*which).map_or(other.as_str(), |text| text);
            }
            let found = found(&index, &prompt);
            prop_assert_eq!(&found, &plain(&known, &prompt));
            for (_, range) in found {
                prop_assert!(prompt.is_char_boundary(range.start) && prompt.is_char_boundary(range.end));
            }
            for text in &known {
                prop_assert!(index.remove(text));
            }
            prop_assert!(index.marks.is_empty() && index.heads.is_empty() && index.sorted.is_empty());
        }

        /// With these bases, most strings collide.
        #[test]
        fn a_collision_never_finds_a_text_that_is_not_there(
            base in 0u64..2,
            known in prop::collection::vec(texts(), 1..20),
            parts in prop::collection::vec(texts(), 1..8),
        ) {
            let mut index = TextIndex::with_fingerprints(Fingerprints::with_base(base));
            for text in &known {
                index.insert(&Arc::from(text.as_str()));
            }
            let prompt = parts.concat();
            for (text, range) in found(&index, &prompt) {
                prop_assert_eq!(&prompt[range], text);
            }
            for text in &known {
                index.remove(text);
            }
            prop_assert!(index.sorted.is_empty());
        }
    }

    #[test]
    fn the_longest_text_is_found_whatever_the_order_of_insertion() {
        let chain: Vec<String> = [64, 65, 100, 127, 128, 129, 1000].map(|n| "x".repeat(n)).into();
        let prompt = format!("{}y{}", "x".repeat(500), "x".repeat(1001));
        for order in [chain.clone(), chain.iter().rev().cloned().collect()] {
            let mut index = index_of(&order);
            let lengths = |index: &TextIndex| -> Vec<usize> {
                found(index, &prompt).into_iter().map(|(text, _)| text.len()).collect()
            };
            assert_eq!(lengths(&index), [129, 129, 129, 100, 1000]);
            index.remove(&chain[5]);
            assert_eq!(lengths(&index), [128, 128, 128, 100, 1000]);
            index.remove(&chain[2]);
            index.remove(&chain[6]);
            assert_eq!(lengths(&index), [128, 128, 128, 65, 128, 128, 128, 128, 128, 128, 128, 65]);
        }
    }

    #[test]
    fn the_work_is_bounded_if_thousands_of_texts_begin_alike() {
        let head = "Copyright 2026, all rights reserved; see the file LICENSE for more. ".repeat(3);
        let alike: Vec<String> =
            (0..3000).map(|n| format!("{head}{}{n}", "a long preface ".repeat(n % 40))).collect();
        // The prompt repeats beginnings of the texts, of which none is complete.
        let prompt = format!("{head}a long preface a long prefix ").repeat(100) + &alike[2999];
        let mut work = SearchWork::default();
        let found = index_of(&alike).find_counting(&prompt, &mut work);
        assert_eq!(found.last().map(|(_, range)| range.len()), Some(alike[2999].len()));
        assert!(work.compared <= prompt.len(), "{work:?}");
        assert!(work.marks <= 16 * 3 * 101, "{work:?}");
    }

    #[test]
    fn the_work_is_linear_if_every_byte_begins_a_text_that_does_not_end() {
        // Every byte of the prompt begins all texts, and none of them is there.
        let hostile: Vec<String> = (0..500).map(|n| "a".repeat(4000 + n) + "b").collect();
        let prompt = "a".repeat(20_000);
        let mut work = SearchWork::default();
        assert!(index_of(&hostile).find_counting(&prompt, &mut work).is_empty());
        assert_eq!(work.compared, 0);
        assert!(work.marks <= prompt.len() * 14, "{work:?}");
    }

    #[test]
    fn every_byte_counts() {
        let text: String = (0..3000u32).map(|n| char::from(b'a' + (n * n % 23) as u8)).collect();
        let index = index_of(std::slice::from_ref(&text));
        assert_eq!(found(&index, &format!("- {text} -")), [(text.as_str(), 2..3002)]);
        for at in [0, 63, 64, 1024, 2047, 2048, 2998, 2999] {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = b'!';
            assert!(index.find(std::str::from_utf8(&bytes).unwrap()).is_empty(), "byte {at}");
        }
        assert!(index.find(&text[..2999]).is_empty() && index.find("").is_empty());
    }
}
