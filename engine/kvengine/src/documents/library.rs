//! The registered documents of one tenant: IDs, texts, and the times until which they are kept.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvcore::Clock;

use super::index::{HEAD, TextIndex, TextNumber};
use crate::error::{Error, Result};

/// The registered documents of one tenant, and an index that finds them in prompts.
///
/// ```
/// use std::sync::Arc;
/// use kvengine::{DocumentLibrary, LibraryLimits, NewDocument};
///
/// let mut library = DocumentLibrary::new(LibraryLimits::default(), Arc::new(kvcore::SystemClock::default()));
/// let text = "The owner of the garden is Alba. She planted the two pear trees behind the house in 1987.\n";
/// library.register(NewDocument::new("garden", text))?;
/// let found = library.find(&format!("Answer briefly.\n{text}Who owns the garden?"));
/// assert_eq!((&*found[0].id, found[0].range.clone()), ("garden", 16..16 + text.len()));
/// # Ok::<(), kvengine::Error>(())
/// ```
///
/// A text has at least [`DocumentLibrary::MIN_BYTES`]; shorter ones stand in prompts by chance. The same text may have
/// several IDs; the ID that was registered first is the one that is found. Registering and removing a document takes
/// time in proportion to its length.
#[derive(Debug)]
pub struct DocumentLibrary {
    limits: LibraryLimits,
    clock: Arc<dyn Clock>,
    index: TextIndex,
    documents: BTreeMap<Arc<str>, Entry>,
    /// The IDs of each text, in the order of their registration.
    owners: HashMap<TextNumber, BTreeMap<u64, Arc<str>>>,
    /// The documents that expire, soonest first.
    expiry: BTreeSet<(u64, Arc<str>)>,
    /// The documents that have expired, until the caller takes them; `None` to forget them.
    expired: Option<Vec<RegisteredDocument>>,
    /// The number of the next registration.
    next: u64,
    bytes: usize,
}

/// The limits of a [`DocumentLibrary`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LibraryLimits {
    /// The maximum number of documents.
    pub documents: usize,
    /// The maximum number of bytes in the IDs, titles and texts of all documents.
    pub bytes: usize,
}

impl Default for LibraryLimits {
    /// Returns limits of 10,000 documents and 64 MiB of text.
    fn default() -> Self {
        Self { documents: 10_000, bytes: 64 << 20 }
    }
}

/// A document to register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewDocument {
    /// The ID. A document that has it already is replaced.
    pub id: String,
    /// The title, for people.
    pub title: Option<String>,
    /// The text to find.
    pub text: String,
    /// The time after which the document is forgotten; `None` to keep it until it is removed.
    pub ttl: Option<Duration>,
}

impl NewDocument {
    /// Creates a document without a title that is kept until it is removed.
    pub fn new(id: impl Into<String>, text: impl Into<String>) -> Self {
        Self { id: id.into(), title: None, text: text.into(), ttl: None }
    }
}

/// A registered document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredDocument {
    /// The ID.
    pub id: Arc<str>,
    /// The title, for people.
    pub title: Option<String>,
    /// The text.
    pub text: Arc<str>,
    /// The time when the document is forgotten, in milliseconds on the library's clock; `None` if it is kept.
    pub expires: Option<u64>,
    /// The costs of the document, once they are known.
    pub costs: Option<DocumentCosts>,
}

impl RegisteredDocument {
    /// Returns the number of bytes of the ID, the title and the text.
    fn size(&self) -> usize {
        bytes_of(&self.id, self.title.as_deref(), &self.text)
    }
}

fn bytes_of(id: &str, title: Option<&str>, text: &str) -> usize {
    id.len() + title.map_or(0, str::len) + text.len()
}

/// The costs of a document's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DocumentCosts {
    /// The number of tokens.
    pub tokens: usize,
    /// The number of bytes of keys and values.
    pub kv_bytes: u64,
    /// The time that their computation took.
    pub computed_in: Duration,
}

/// A registered document that was found in a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundDocument {
    /// The ID of the document; if several documents have the same text, the one that was registered first.
    pub id: Arc<str>,
    /// The bytes of the text that are the document. Both ends are boundaries of characters.
    pub range: Range<usize>,
}

#[derive(Debug)]
struct Entry {
    document: RegisteredDocument,
    text: TextNumber,
    registration: u64,
}

impl DocumentLibrary {
    /// The least number of bytes of a document's text.
    pub const MIN_BYTES: usize = HEAD;

    /// Creates a library without documents.
    pub fn new(limits: LibraryLimits, clock: Arc<dyn Clock>) -> Self {
        Self {
            limits,
            clock,
            index: TextIndex::new(),
            documents: BTreeMap::new(),
            owners: HashMap::new(),
            expiry: BTreeSet::new(),
            expired: None,
            next: 0,
            bytes: 0,
        }
    }

    /// Returns the library as one that keeps documents that expire until [`take_expired`](Self::take_expired) is called.
    #[must_use]
    pub fn keeping_expired(self) -> Self {
        Self { expired: Some(self.expired.unwrap_or_default()), ..self }
    }

    /// Checks that a document can be registered.
    ///
    /// # Errors
    /// Returns the errors of [`register`](Self::register).
    pub fn check(&mut self, document: &NewDocument) -> Result<()> {
        self.expire();
        let NewDocument { id, title, text, .. } = document;
        if text.len() < Self::MIN_BYTES {
            return Err(Error::ShortDocument { id: id.clone(), bytes: text.len(), least: Self::MIN_BYTES });
        }
        if text.trim().is_empty() {
            return Err(kvchunk::Error::EmptyPart { part: format!("document {id}") }.into());
        }
        let (others, bytes) = match self.documents.get(id.as_str()) {
            Some(before) => (self.documents.len() - 1, self.bytes - before.document.size()),
            None => (self.documents.len(), self.bytes),
        };
        let full = |what, asked, limit| Err(Error::LibraryFull { what, asked, limit });
        if others >= self.limits.documents {
            return full("documents", others + 1, self.limits.documents);
        }
        let size = bytes_of(id, title.as_deref(), text);
        if bytes + size > self.limits.bytes {
            return full("bytes", bytes + size, self.limits.bytes);
        }
        Ok(())
    }

    /// Registers a document. Returns the document that had the ID before. If its text was the same, its costs are
    /// kept, and so is its place among documents with the same text.
    ///
    /// # Errors
    /// Returns [`Error::ShortDocument`] if the text has fewer than [`MIN_BYTES`](Self::MIN_BYTES) bytes,
    /// [`kvchunk::Error::EmptyPart`] if it contains only white space, and [`Error::LibraryFull`] if the document
    /// exceeds a limit. The library is unchanged in these cases.
    pub fn register(&mut self, document: NewDocument) -> Result<Option<RegisteredDocument>> {
        self.check(&document)?;
        let NewDocument { id, title, text, ttl } = document;
        let size = bytes_of(&id, title.as_deref(), &text);
        let before = self.documents.get(id.as_str());
        let same = before.filter(|before| *before.document.text == text);
        let (registration, costs) = match same {
            Some(same) => (same.registration, same.document.costs),
            None => (self.next, None),
        };
        let before = self.remove(&id);
        self.next += 1;
        let now = self.clock.millis();
        let expires = ttl.map(|ttl| now.saturating_add(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)));
        let (id, text): (Arc<str>, Arc<str>) = (id.into(), text.into());
        let number = self.index.insert(&text);
        self.bytes += size;
        self.owners.entry(number).or_default().insert(registration, Arc::clone(&id));
        if let Some(expires) = expires {
            self.expiry.insert((expires, Arc::clone(&id)));
        }
        let document = RegisteredDocument { id: Arc::clone(&id), title, text, expires, costs };
        self.documents.insert(id, Entry { document, text: number, registration });
        Ok(before)
    }

    /// Records the costs of a document. Returns false if there is no such document.
    pub fn set_costs(&mut self, id: &str, costs: DocumentCosts) -> bool {
        self.expire();
        let entry = self.documents.get_mut(id);
        entry.map(|entry| entry.document.costs = Some(costs)).is_some()
    }

    /// Removes a document.
    pub fn remove(&mut self, id: &str) -> Option<RegisteredDocument> {
        let Entry { document, text, registration } = self.documents.remove(id)?;
        self.bytes -= document.size();
        if let Some(expires) = document.expires {
            self.expiry.remove(&(expires, Arc::clone(&document.id)));
        }
        if let Some(owners) = self.owners.get_mut(&text) {
            owners.remove(&registration);
            if owners.is_empty() {
                self.owners.remove(&text);
                self.index.remove(&document.text);
            }
        }
        Some(document)
    }

    /// Finds registered documents in a text, leftmost first. Of documents that begin at the same byte, the longest is
    /// found. Found documents do not overlap: the search goes on behind each of them.
    ///
    /// Every byte of a found document is compared with its text. The time is in proportion to the length of `text`,
    /// whatever documents are registered. A document may be overlooked if secret hashes collide, with a probability of
    /// about one in a billion if documents have some kilobytes.
    pub fn find(&mut self, text: &str) -> Vec<FoundDocument> {
        self.expire();
        let found = self.index.find(text).into_iter();
        found
            .filter_map(|(number, range)| {
                let id = self.owners.get(&number)?.values().next()?;
                Some(FoundDocument { id: Arc::clone(id), range })
            })
            .collect()
    }

    /// Returns a document.
    pub fn get(&mut self, id: &str) -> Option<&RegisteredDocument> {
        self.expire();
        self.documents.get(id).map(|entry| &entry.document)
    }

    /// Returns all documents, in the order of their IDs.
    pub fn documents(&mut self) -> impl Iterator<Item = &RegisteredDocument> {
        self.expire();
        self.documents.values().map(|entry| &entry.document)
    }

    /// Returns the number of bytes in the IDs, titles and texts of all documents.
    pub fn bytes(&mut self) -> usize {
        self.expire();
        self.bytes
    }

    /// Returns the documents that have expired since the last call, if the library
    /// [keeps](Self::keeping_expired) them, for callers that release their keys and values.
    pub fn take_expired(&mut self) -> Vec<RegisteredDocument> {
        self.expire();
        self.expired.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Removes the documents whose time is over.
    fn expire(&mut self) {
        let now = self.clock.millis();
        while let Some((_, id)) = self.expiry.first().filter(|(expires, _)| *expires <= now).cloned() {
            let expired = self.remove(&id);
            if let Some(kept) = &mut self.expired {
                kept.extend(expired);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvcore::ManualClock;

    use super::*;

    fn text(word: &str) -> String {
        format!("{word} ").repeat(20)
    }

    fn library(limits: LibraryLimits) -> (DocumentLibrary, ManualClock) {
        let clock = ManualClock::default();
        (DocumentLibrary::new(limits, Arc::new(clock.clone())), clock)
    }

    fn ids(library: &mut DocumentLibrary, text: &str) -> Vec<String> {
        library.find(text).iter().map(|found| found.id.to_string()).collect()
    }

    #[test]
    fn the_first_of_equal_texts_is_found_and_then_the_next() {
        let (mut library, _) = library(LibraryLimits::default());
        for id in ["z", "b", "a"] {
            library.register(NewDocument::new(id, text("same"))).unwrap();
        }
        let prompt = format!("- {}", text("same"));
        assert_eq!(ids(&mut library, &prompt), ["z"]);
        // The same text again keeps its place; another text and back loses it.
        library.register(NewDocument::new("z", text("same"))).unwrap();
        assert_eq!(ids(&mut library, &prompt), ["z"]);
        library.register(NewDocument::new("z", text("other"))).unwrap();
        assert_eq!(ids(&mut library, &prompt), ["b"]);
        library.register(NewDocument::new("z", text("same"))).unwrap();
        assert!(library.remove("b").is_some() && library.remove("b").is_none());
        assert_eq!(ids(&mut library, &prompt), ["a"]);
        library.remove("a");
        library.remove("z");
        assert!(ids(&mut library, &prompt).is_empty());
        assert_eq!(library.bytes(), 0);
    }

    #[test]
    fn a_document_is_found_until_its_time_is_over() {
        let (library, clock) = library(LibraryLimits::default());
        let mut library = library.keeping_expired();
        let short = NewDocument { ttl: Some(Duration::from_secs(5)), ..NewDocument::new("a", text("one")) };
        library.register(short.clone()).unwrap();
        library.register(NewDocument::new("b", text("two"))).unwrap();
        let prompt = text("one") + &text("two");
        assert_eq!(ids(&mut library, &prompt), ["a", "b"]);
        clock.advance(Duration::from_secs(4));
        library.register(short).unwrap();
        clock.advance(Duration::from_secs(4));
        assert_eq!(ids(&mut library, &prompt), ["a", "b"], "registered again");
        assert!(library.take_expired().is_empty());
        clock.advance(Duration::from_secs(1));
        assert_eq!(ids(&mut library, &prompt), ["b"]);
        assert!(library.get("a").is_none() && !library.set_costs("a", DocumentCosts::default()));
        let expired: Vec<_> = library.take_expired().iter().map(|one| one.id.to_string()).collect();
        assert_eq!(expired, ["a"]);
        assert!(library.take_expired().is_empty());
        assert_eq!(library.bytes(), "b".len() + text("two").len());
    }

    #[test]
    fn nothing_of_a_document_stays_after_its_time_unless_asked() {
        let (mut library, clock) = library(LibraryLimits::default());
        let weak: Vec<_> = (0..100)
            .map(|i| {
                let ttl = Some(Duration::from_millis(1));
                let new = NewDocument { ttl, ..NewDocument::new("a", text(&format!("word{i}"))) };
                library.register(new).unwrap();
                let weak = Arc::downgrade(&library.get("a").unwrap().text);
                clock.advance(Duration::from_secs(1));
                assert!(library.get("a").is_none());
                weak
            })
            .collect();
        assert!(weak.iter().all(|text| text.upgrade().is_none()));
        assert!(library.take_expired().is_empty());
        assert_eq!(library.bytes(), 0);
    }

    #[test]
    fn costs_belong_to_a_text() {
        let (mut library, _) = library(LibraryLimits::default());
        let costs = DocumentCosts { tokens: 40, kv_bytes: 1 << 20, computed_in: Duration::from_millis(3) };
        library.register(NewDocument::new("a", text("one"))).unwrap();
        assert!(library.set_costs("a", costs));
        let titled = NewDocument { title: Some("One".to_owned()), ..NewDocument::new("a", text("one")) };
        assert_eq!(library.register(titled).unwrap().unwrap().costs, Some(costs));
        let known = library.get("a").unwrap();
        assert_eq!((known.costs, known.title.as_deref()), (Some(costs), Some("One")));
        library.register(NewDocument::new("a", text("two"))).unwrap();
        assert_eq!(library.documents().map(|one| one.costs).collect::<Vec<_>>(), [None]);
    }

    #[test]
    fn documents_that_cannot_be_found_or_have_no_room_are_refused() {
        let (mut library, _) = library(LibraryLimits { documents: 2, bytes: 302 });
        for short in ["", "a", &"é".repeat(31)] {
            let error = library.register(NewDocument::new("a", short)).unwrap_err();
            assert!(matches!(error, Error::ShortDocument { least: 64, bytes, .. } if bytes == short.len()));
        }
        let error = library.register(NewDocument::new("a", " \n".repeat(40))).unwrap_err();
        assert!(error.to_string().contains("document a"), "{error}");
        library.register(NewDocument::new("a", "a".repeat(150))).unwrap();
        let error = library.register(NewDocument::new("b", "b".repeat(151))).unwrap_err();
        assert!(matches!(error, Error::LibraryFull { what: "bytes", asked: 303, limit: 302 }));
        // A title takes memory like a text.
        let titled = NewDocument { title: Some("b".repeat(100)), ..NewDocument::new("b", "b".repeat(64)) };
        let error = library.register(titled).unwrap_err();
        assert!(matches!(error, Error::LibraryFull { what: "bytes", asked: 316, limit: 302 }));
        library.register(NewDocument::new("b", "b".repeat(100))).unwrap();
        let error = library.register(NewDocument::new("c", "c".repeat(64))).unwrap_err();
        assert!(matches!(error, Error::LibraryFull { what: "documents", asked: 3, limit: 2 }));
        // A document makes room for its own new text.
        library.register(NewDocument::new("a", "c".repeat(200))).unwrap();
        assert_eq!(ids(&mut library, &("b".repeat(100) + &"c".repeat(200))), ["b", "a"]);
    }
}
