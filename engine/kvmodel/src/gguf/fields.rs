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

/// The value of a field. Integers of all widths share one variant.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum FieldValue {
    Whole(i128),
    Real(f64),
    Bool(bool),
    Text(String),
    List(Vec<FieldValue>),
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
        Ok(match kind {
            0 => FieldValue::Whole(self.number::<1>(what)?[0].into()),
            1 => FieldValue::Whole(i8::from_le_bytes(self.number(what)?).into()),
            2 => FieldValue::Whole(u16::from_le_bytes(self.number(what)?).into()),
            3 => FieldValue::Whole(i16::from_le_bytes(self.number(what)?).into()),
            4 => FieldValue::Whole(self.u32(what)?.into()),
            5 => FieldValue::Whole(i32::from_le_bytes(self.number(what)?).into()),
            // Recovers the number that the writer meant: the shortest decimal that rounds to this f32.
            6 => FieldValue::Real(
                f32::from_le_bytes(self.number(what)?).to_string().parse().unwrap_or(f64::NAN),
            ),
            7 => FieldValue::Bool(self.number::<1>(what)?[0] != 0),
            8 => FieldValue::Text(self.text(what)?),
            9 => self.list(what)?,
            10 => FieldValue::Whole(self.u64(what)?.into()),
            11 => FieldValue::Whole(i64::from_le_bytes(self.number(what)?).into()),
            12 => FieldValue::Real(f64::from_le_bytes(self.number(what)?)),
            other => return wrong(format!("{what} has type {other}, which GGUF does not define")),
        })
    }

    fn list(&mut self, what: &str) -> Result<FieldValue, GgufFailure> {
        let (kind, count) = (self.u32(what)?, self.u64(what)?);
        if kind == 9 {
            return wrong(format!("{what} is a list of lists"));
        }
        // Each element takes at least one byte.
        if count > self.left() {
            return wrong(format!(
                "{what} has {count} elements, but only {} bytes are left in the file",
                self.left()
            ));
        }
        let mut list = Vec::new();
        for _ in 0..count {
            list.push(self.value(kind, what)?);
        }
        Ok(FieldValue::List(list))
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
        let text = |value: &'_ FieldValue| matches!(value, FieldValue::Text(_));
        self.of_kind(name, "list of strings", |value| match value {
            FieldValue::List(list) if list.iter().all(text) => Some(
                list.iter()
                    .filter_map(|value| match value {
                        FieldValue::Text(text) => Some(text.as_str()),
                        _ => None,
                    })
                    .collect(),
            ),
            _ => None,
        })
    }

    pub(super) fn wholes(&self, name: &str) -> Result<Option<Vec<i64>>, GgufFailure> {
        self.of_kind(name, "list of whole numbers", |value| match value {
            FieldValue::List(list) => list
                .iter()
                .map(|value| match *value {
                    FieldValue::Whole(n) => i64::try_from(n).ok(),
                    _ => None,
                })
                .collect(),
            _ => None,
        })
    }

    pub(super) fn reals(&self, name: &str) -> Result<Option<Vec<f64>>, GgufFailure> {
        self.of_kind(name, "list of finite numbers", |value| match value {
            FieldValue::List(list) => list
                .iter()
                .map(|value| match *value {
                    FieldValue::Real(x) => Some(x).filter(|x| x.is_finite()),
                    _ => None,
                })
                .collect(),
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
