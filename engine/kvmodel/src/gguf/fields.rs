//! Reads the header of a GGUF file: the fields and the descriptions of the tensors. Lengths in the header
//! are checked against the file's length.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io::Read;

use super::failure::{GgufFailure, wrong};

const MAGIC: [u8; 4] = *b"GGUF";

/// The alignment of tensors, in bytes, in a file that does not specify one.
const ALIGNMENT: u64 = 32;

/// The maximum number of bytes in a string.
const TEXT: u64 = 1 << 24;
/// The maximum number of axes per tensor.
const AXES: u32 = 4;
/// The maximum numbers of fields and of tensors. Each takes more memory than in the file.
const ENTRIES: u64 = 1 << 16;
/// The maximum number of elements in a list that is used. The largest vocabularies have about a million tokens.
const ELEMENTS: usize = 1 << 22;

/// GGUF's type ID for strings.
const TEXT_KIND: u32 = 8;
/// GGUF's type ID for lists.
const LIST_KIND: u32 = 9;

/// The value of a field. Integers of all widths share one variant.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum FieldValue {
    Whole(i128),
    Real(f64),
    Bool(bool),
    Text(String),
    Texts(TextList),
    /// A list of numbers or Booleans.
    List {
        /// GGUF's type ID of an element.
        kind: u32,
        /// The elements, as in the file.
        elements: Vec<u8>,
    },
}

/// A list of strings.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct TextList {
    /// All strings in a row.
    text: String,
    /// The offset of each string's end.
    ends: Vec<usize>,
}

static NO_TEXTS: TextList = TextList { text: String::new(), ends: Vec::new() };

/// Returns the number of bytes of a number or Boolean.
fn width(kind: u32, what: &str) -> Result<u64, GgufFailure> {
    Ok(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        other => return wrong(format!("{what} has type {other}, which GGUF does not define")),
    })
}

/// Converts a number or Boolean of [`width`] bytes.
fn scalar(kind: u32, bytes: &[u8]) -> FieldValue {
    let mut eight = [0; 8];
    eight[..bytes.len()].copy_from_slice(bytes);
    let unsigned = u64::from_le_bytes(eight);
    // Shifts the sign bit to the top and back.
    let signed = |bits: u32| (unsigned as i64) << (64 - bits) >> (64 - bits);
    match kind {
        1 => FieldValue::Whole(signed(8).into()),
        3 => FieldValue::Whole(signed(16).into()),
        5 => FieldValue::Whole(signed(32).into()),
        // Recovers the number that the writer meant: the shortest decimal that rounds to this f32.
        6 => FieldValue::Real(f32::from_bits(unsigned as u32).to_string().parse().unwrap_or(f64::NAN)),
        7 => FieldValue::Bool(unsigned != 0),
        11 => FieldValue::Whole((unsigned as i64).into()),
        12 => FieldValue::Real(f64::from_bits(unsigned)),
        _ => FieldValue::Whole(unsigned.into()),
    }
}

/// The description of a tensor in the header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TensorPlace {
    pub(super) name: String,
    /// The shape, outermost axis first.
    pub(super) shape: Vec<usize>,
    /// ggml's ID for the element type.
    pub(super) dtype: u32,
    /// The tensor's offset from the start of the tensor data, in bytes.
    pub(super) offset: u64,
}

/// The header of a file.
#[derive(Debug)]
pub(super) struct Header {
    fields: HashMap<String, FieldValue>,
    /// The names of fields that were asked for.
    read: RefCell<HashSet<String>>,
    pub(super) tensors: Vec<TensorPlace>,
    /// The alignment of tensors, in bytes.
    pub(super) alignment: u64,
    /// The offset of the tensor data from the start of the file, in bytes.
    pub(super) data: u64,
}

/// A reader that starts at the beginning of a file and never reads past its end.
pub(super) struct FieldReader<R> {
    file: std::io::BufReader<R>,
    at: u64,
    length: u64,
}

impl<R: Read> FieldReader<R> {
    pub(super) fn new(file: R, length: u64) -> Self {
        Self { file: std::io::BufReader::new(file), at: 0, length }
    }

    fn left(&self) -> u64 {
        self.length - self.at
    }

    fn bytes(&mut self, count: u64, what: &str) -> Result<Vec<u8>, GgufFailure> {
        if count > self.left() {
            return wrong(format!("{what} has {count} bytes, but only {} are left in the file", self.left()));
        }
        let mut bytes = vec![0; count as usize];
        self.file.read_exact(&mut bytes).map_err(GgufFailure::Io)?;
        self.at += count;
        Ok(bytes)
    }

    fn number<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufFailure> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.bytes(N as u64, what)?);
        Ok(bytes)
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufFailure> {
        Ok(u32::from_le_bytes(self.number(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufFailure> {
        Ok(u64::from_le_bytes(self.number(what)?))
    }

    fn text(&mut self, what: &str) -> Result<String, GgufFailure> {
        let length = self.u64(what)?;
        if length > TEXT {
            return wrong(format!("{what} is a string of {length} bytes, more than {TEXT}"));
        }
        match String::from_utf8(self.bytes(length, what)?) {
            Ok(text) => Ok(text),
            Err(error) => wrong(format!("{what} is not valid UTF-8: {error}")),
        }
    }

    fn value(&mut self, kind: u32, what: &str) -> Result<FieldValue, GgufFailure> {
        match kind {
            TEXT_KIND => Ok(FieldValue::Text(self.text(what)?)),
            LIST_KIND => self.list(what),
            _ => {
                let bytes = self.bytes(width(kind, what)?, what)?;
                Ok(scalar(kind, &bytes))
            }
        }
    }

    /// Reads a list, which takes about as much memory as in the file.
    fn list(&mut self, what: &str) -> Result<FieldValue, GgufFailure> {
        let (kind, count) = (self.u32(what)?, self.u64(what)?);
        if kind == LIST_KIND {
            return wrong(format!("{what} is a list of lists"));
        }
        // A string takes eight bytes and its text.
        let each = if kind == TEXT_KIND { 8 } else { width(kind, what)? };
        if count.checked_mul(each).is_none_or(|bytes| bytes > self.left()) {
            return wrong(format!(
                "{what} has {count} elements, but only {} bytes are left in the file",
                self.left()
            ));
        }
        if kind != TEXT_KIND {
            return Ok(FieldValue::List { kind, elements: self.bytes(count * each, what)? });
        }
        let mut list = TextList::default();
        for _ in 0..count {
            list.text += &self.text(what)?;
            list.ends.push(list.text.len());
        }
        Ok(FieldValue::Texts(list))
    }

    fn tensor(&mut self, number: u64) -> Result<TensorPlace, GgufFailure> {
        let name = self.text(&format!("the name of tensor {number}"))?;
        let what = format!("tensor {name:?}");
        let axes = self.u32(&what)?;
        if axes == 0 || axes > AXES {
            return wrong(format!("{what} has {axes} axes (supported: 1 to {AXES})"));
        }
        let mut shape = Vec::new();
        for _ in 0..axes {
            match usize::try_from(self.u64(&what)?) {
                Ok(extent) if extent > 0 => shape.insert(0, extent),
                other => return wrong(format!("{what} has an extent of {}", other.unwrap_or(usize::MAX))),
            }
        }
        Ok(TensorPlace { name, shape, dtype: self.u32(&what)?, offset: self.u64(&what)? })
    }
}

impl Header {
    /// Reads the header of a file.
    pub(super) fn read(reader: &mut FieldReader<impl Read>) -> Result<Self, GgufFailure> {
        if reader.number::<4>("the magic")? != MAGIC {
            return wrong("it does not begin with GGUF");
        }
        let version = reader.u32("the version")?;
        if !(2..=3).contains(&version) {
            return wrong(format!("GGUF version {version} is not supported (supported: 2 and 3)"));
        }
        let (tensors, count) = (reader.u64("the number of tensors")?, reader.u64("the number of fields")?);
        for (what, entries) in [("tensors", tensors), ("fields", count)] {
            if entries > ENTRIES {
                return wrong(format!("it has {entries} {what}, more than {ENTRIES}"));
            }
        }
        let mut fields = HashMap::new();
        for number in 0..count {
            let name = reader.text(&format!("the name of field {number}"))?;
            let kind = reader.u32(&format!("field {name:?}"))?;
            let value = reader.value(kind, &format!("field {name:?}"))?;
            if fields.contains_key(&name) {
                return wrong(format!("field {name:?} occurs twice"));
            }
            fields.insert(name, value);
        }
        let tensors = (0..tensors).map(|number| reader.tensor(number)).collect::<Result<_, _>>()?;
        let read = RefCell::default();
        let mut header = Self { fields, read, tensors, alignment: ALIGNMENT, data: 0 };
        header.alignment = header.whole("general.alignment")?.unwrap_or(ALIGNMENT);
        if !header.alignment.is_power_of_two() {
            return wrong(format!("general.alignment is {}, which is not a power of two", header.alignment));
        }
        let Some(data) = reader.at.checked_next_multiple_of(header.alignment) else {
            return wrong(format!(
                "general.alignment is {}, which is larger than the file",
                header.alignment
            ));
        };
        header.data = data;
        if header.whole("split.count")?.is_some_and(|parts| parts > 1) {
            return wrong(
                "it is one part of a model that is split into several files; join them with llama-gguf-split --merge",
            );
        }
        Ok(header)
    }

    fn of_kind<'a, T>(
        &'a self,
        name: &str,
        kind: &str,
        read: impl FnOnce(&'a FieldValue) -> Option<T>,
    ) -> Result<Option<T>, GgufFailure> {
        let Some(value) = self.fields.get(name) else { return Ok(None) };
        self.read.borrow_mut().insert(name.to_owned());
        match read(value) {
            Some(value) => Ok(Some(value)),
            None => wrong(format!("field {name:?} is not a {kind}")),
        }
    }

    /// Returns the non-negative integer in a field, or `None` if the file lacks the field.
    pub(super) fn whole(&self, name: &str) -> Result<Option<u64>, GgufFailure> {
        self.of_kind(name, "non-negative whole number", |value| match *value {
            FieldValue::Whole(n) => u64::try_from(n).ok(),
            _ => None,
        })
    }

    pub(super) fn real(&self, name: &str) -> Result<Option<f64>, GgufFailure> {
        self.of_kind(name, "finite number", |value| match *value {
            FieldValue::Real(x) => Some(x).filter(|x| x.is_finite()),
            FieldValue::Whole(n) => Some(n as f64),
            _ => None,
        })
    }

    pub(super) fn bool(&self, name: &str) -> Result<Option<bool>, GgufFailure> {
        self.of_kind(name, "boolean", |value| match *value {
            FieldValue::Bool(x) => Some(x),
            _ => None,
        })
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&str>, GgufFailure> {
        self.of_kind(name, "string", |value| match value {
            FieldValue::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    pub(super) fn texts(&self, name: &str) -> Result<Option<Vec<&str>>, GgufFailure> {
        let list = self.of_kind(name, "list of strings", |value| match value {
            FieldValue::Texts(list) => Some(list),
            FieldValue::List { elements, .. } if elements.is_empty() => Some(&NO_TEXTS),
            _ => None,
        })?;
        let Some(TextList { text, ends }) = list else { return Ok(None) };
        few(name, ends.len())?;
        let starts = std::iter::once(&0).chain(ends);
        Ok(Some(starts.zip(ends).map(|(&start, &end)| &text[start..end]).collect()))
    }

    /// Returns the elements of a list, converted by `read`.
    fn list<T>(
        &self,
        name: &str,
        kind: &str,
        read: impl Fn(FieldValue) -> Option<T>,
    ) -> Result<Option<Vec<T>>, GgufFailure> {
        let list = self.of_kind(name, kind, |value| match value {
            FieldValue::List { kind, elements } => Some((*kind, elements.as_slice())),
            FieldValue::Texts(list) if list.ends.is_empty() => Some((0, [].as_slice())),
            _ => None,
        })?;
        let Some((of, elements)) = list else { return Ok(None) };
        let width = width(of, name)? as usize;
        few(name, elements.len() / width)?;
        match elements.chunks_exact(width).map(|bytes| read(scalar(of, bytes))).collect() {
            Some(list) => Ok(Some(list)),
            None => wrong(format!("field {name:?} is not a {kind}")),
        }
    }

    pub(super) fn wholes(&self, name: &str) -> Result<Option<Vec<i64>>, GgufFailure> {
        self.list(name, "list of whole numbers", |value| match value {
            FieldValue::Whole(n) => i64::try_from(n).ok(),
            _ => None,
        })
    }

    pub(super) fn reals(&self, name: &str) -> Result<Option<Vec<f64>>, GgufFailure> {
        self.list(name, "list of finite numbers", |value| match value {
            FieldValue::Real(x) => Some(x).filter(|x| x.is_finite()),
            _ => None,
        })
    }

    /// Returns the names of the fields that were never asked for.
    pub(super) fn unread(&self) -> impl Iterator<Item = &str> {
        let read = self.read.borrow().clone();
        self.fields.keys().map(String::as_str).filter(move |name| !read.contains(*name))
    }

    /// Returns true if the file has a tensor.
    pub(super) fn has(&self, tensor: &str) -> bool {
        self.tensors.iter().any(|place| place.name == tensor)
    }
}

/// Returns the value of a required field.
pub(super) fn required<T>(name: &str, value: Option<T>) -> Result<T, GgufFailure> {
    value.map_or_else(|| wrong(format!("field {name:?} is missing")), Ok)
}

/// Checks that a list that is used has few enough elements.
fn few(name: &str, count: usize) -> Result<(), GgufFailure> {
    if count > ELEMENTS {
        return wrong(format!("field {name:?} has {count} elements, more than {ELEMENTS}"));
    }
    Ok(())
}
