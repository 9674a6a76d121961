//! The lines of a journal that are still needed: the last one of each document that is registered.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::line::Registration;
use crate::leisure::Place;

/// The lines of the registered documents.
#[derive(Debug, Default)]
pub(super) struct Entries {
    all: HashMap<Place, Entry>,
    /// The documents that expire, soonest first.
    expiry: BTreeSet<(u64, Place)>,
    /// The bytes of all these lines.
    bytes: u64,
    /// The bytes of the system prompts of each tenant's documents.
    systems: HashMap<Option<Arc<str>>, usize>,
    /// The number of the next document.
    next: u64,
}

/// The line of a document.
#[derive(Debug)]
struct Entry {
    /// The place of the document among others with the same text.
    order: u64,
    span: Span,
    /// The digest of the text.
    text: [u8; 32],
    system_bytes: usize,
    expires: Option<u64>,
}

/// The bytes of a line in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) start: u64,
    pub(super) bytes: u64,
}

impl Entries {
    /// Adds the line of a document, instead of the one that it had. A document with its old text keeps its place.
    pub(super) fn register(&mut self, document: &Registration<'_>, span: Span) {
        let place: Place = (document.tenant.as_deref().map(Arc::from), document.id.clone().into_owned());
        let text = *blake3::hash(document.text.as_bytes()).as_bytes();
        let before = self.remove(&place);
        let order = before.filter(|before| before.text == text).map_or(self.next, |before| before.order);
        self.next += 1;
        let system_bytes = document.system.as_ref().map_or(0, |system| system.len());
        self.bytes += span.bytes;
        *self.systems.entry(place.0.clone()).or_default() += system_bytes;
        if let Some(expires) = document.expires {
            self.expiry.insert((expires, place.clone()));
        }
        self.all.insert(place, Entry { order, span, text, system_bytes, expires: document.expires });
    }

    /// Returns whether there is a line of a document.
    pub(super) fn has(&self, place: &Place) -> bool {
        self.all.contains_key(place)
    }

    /// Removes the line of a document.
    pub(super) fn forget(&mut self, place: &Place) {
        self.remove(place);
    }

    fn remove(&mut self, place: &Place) -> Option<Entry> {
        let entry = self.all.remove(place)?;
        self.bytes -= entry.span.bytes;
        if let Some(bytes) = self.systems.get_mut(&place.0) {
            *bytes -= entry.system_bytes;
        }
        if let Some(expires) = entry.expires {
            self.expiry.remove(&(expires, place.clone()));
        }
        Some(entry)
    }

    /// Removes the lines of documents that have expired at a time in milliseconds since 1970.
    pub(super) fn expire(&mut self, now: u64) {
        while let Some((_, place)) = self.expiry.first().filter(|(expires, _)| *expires <= now).cloned() {
            self.remove(&place);
        }
    }

    /// Returns the bytes of all lines that are needed.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes of the system prompts of a tenant's documents other than this one.
    pub(super) fn system_bytes_beside(&self, place: &Place) -> usize {
        let all = self.systems.get(&place.0).copied().unwrap_or(0);
        all - self.all.get(place).map_or(0, |entry| entry.system_bytes)
    }

    /// Returns the lines that are needed, in the order in which the documents were registered.
    pub(super) fn in_order(&self) -> Vec<Span> {
        let mut all: Vec<(u64, Span)> = self.all.values().map(|entry| (entry.order, entry.span)).collect();
        all.sort_unstable_by_key(|(order, _)| *order);
        all.into_iter().map(|(_, span)| span).collect()
    }

    /// Records that the lines stand one after another, in their order, from a byte on.
    pub(super) fn move_together(&mut self, mut start: u64) {
        let mut all: Vec<&mut Entry> = self.all.values_mut().collect();
        all.sort_unstable_by_key(|entry| entry.order);
        for entry in all {
            entry.span.start = start;
            start += entry.span.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(id: &str, text: &str, expires: Option<u64>) -> Registration<'static> {
        Registration {
            tenant: None,
            id: id.to_owned().into(),
            title: None,
            text: text.to_owned().into(),
            system: Some("1234".into()),
            expires,
            ttl: None,
        }
    }

    #[test]
    fn the_last_line_of_a_document_counts_and_the_same_text_keeps_its_place() {
        let mut entries = Entries::default();
        let span = |start| Span { start, bytes: 10 };
        for (at, (id, text)) in (0..).zip([("a", "one"), ("b", "one"), ("c", "two"), ("a", "one")]) {
            entries.register(&document(id, text, None), span(10 * at));
        }
        let starts = |entries: &Entries| entries.in_order().iter().map(|span| span.start).collect::<Vec<_>>();
        assert_eq!((starts(&entries), entries.bytes()), (vec![30, 10, 20], 30));
        entries.register(&document("a", "other", None), span(40));
        assert_eq!(starts(&entries), [10, 20, 40]);
        entries.move_together(5);
        assert_eq!(starts(&entries), [5, 15, 25]);
        assert_eq!(entries.system_bytes_beside(&(None, "a".to_owned())), 8);
        entries.forget(&(None, "b".to_owned()));
        assert_eq!((starts(&entries), entries.bytes()), (vec![15, 25], 20));
    }

    #[test]
    fn the_line_of_a_document_is_needed_until_it_expires() {
        let mut entries = Entries::default();
        let span = Span { start: 0, bytes: 10 };
        entries.register(&document("a", "one", Some(5)), span);
        entries.register(&document("a", "one", Some(9)), span);
        entries.register(&document("b", "one", None), span);
        for (now, bytes) in [(5, 20), (8, 20), (9, 10), (u64::MAX, 10)] {
            entries.expire(now);
            assert_eq!(entries.bytes(), bytes, "{now}");
        }
        assert_eq!(entries.system_bytes_beside(&(None, "a".to_owned())), 4);
    }
}
