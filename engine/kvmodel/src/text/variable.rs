//! Variables for chat templates: JSON, with the fields of objects in the order of the file.

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::{Serialize, Serializer};

use crate::error::{Error, Result};

/// The maximum length of a JSON text, in bytes. Its values take up to sixteen times as much memory.
pub(super) const MAX_JSON: usize = 16 << 20;

/// The value of a chat template's variable. Unlike `serde_json::Value`, it keeps the order of an object's
/// fields, which templates write into the prompt.
///
/// ```
/// use kvmodel::Variable;
/// let tool = Variable::from_json(r#"{"name": "now", "args": [1, true]}"#)?;
/// assert_eq!(tool.field("name"), Some(&Variable::Text("now".to_owned())));
/// # Ok::<(), kvmodel::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Variable {
    /// JSON's null, Python's None.
    #[default]
    None,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i128),
    /// Any other number.
    Float(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Variable>),
    /// An object, as its fields in their order.
    Map(Vec<(String, Variable)>),
}

impl Variable {
    /// Parses JSON of up to 16 MiB, with up to 127 levels of lists and objects.
    ///
    /// # Errors
    /// Returns [`Error::Variable`] if the text is not JSON, with the line and column, or exceeds a limit.
    pub fn from_json(text: &str) -> Result<Self> {
        if text.len() > MAX_JSON {
            let bytes = text.len();
            return Err(Error::Variable(format!("{bytes} bytes of JSON, more than {MAX_JSON}; shorten it")));
        }
        serde_json::from_str(text.trim_start_matches('\u{FEFF}'))
            .map_err(|error| Error::Variable(format!("{error}; it must be JSON")))
    }

    /// Parses JSON, or takes the text itself if it is not JSON, as on a command line.
    pub fn from_argument(text: &str) -> Self {
        Self::from_json(text).unwrap_or_else(|_| Self::Text(text.to_owned()))
    }

    /// Returns a field of an object.
    pub fn field(&self, name: &str) -> Option<&Self> {
        match self {
            Self::Map(fields) => fields.iter().find(|(known, _)| known == name).map(|(_, value)| value),
            _ => None,
        }
    }

    /// Returns the size in memory, in bytes, roughly.
    pub(crate) fn size(&self) -> usize {
        match self {
            Self::None | Self::Bool(_) | Self::Int(_) | Self::Float(_) => 32,
            Self::Text(text) => 32 + text.len(),
            Self::List(items) => 32 + items.iter().map(Self::size).sum::<usize>(),
            Self::Map(fields) => {
                32 + fields.iter().map(|(name, value)| 32 + name.len() + value.size()).sum::<usize>()
            }
        }
    }

    /// Returns true if a text in the value has the character.
    pub(super) fn contains(&self, c: char) -> bool {
        match self {
            Self::Text(text) => text.contains(c),
            Self::List(items) => items.iter().any(|item| item.contains(c)),
            Self::Map(fields) => fields.iter().any(|(name, value)| name.contains(c) || value.contains(c)),
            _ => false,
        }
    }

    /// Returns the name for the type of the value.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::None => "null",
            Self::Bool(_) => "a truth value",
            Self::Int(_) | Self::Float(_) => "a number",
            Self::Text(_) => "a string",
            Self::List(_) => "a list",
            Self::Map(_) => "an object",
        }
    }
}

impl From<&str> for Variable {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<bool> for Variable {
    fn from(truth: bool) -> Self {
        Self::Bool(truth)
    }
}

impl Serialize for Variable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_unit(),
            Self::Bool(truth) => serializer.serialize_bool(*truth),
            Self::Int(number) => serializer.serialize_i128(*number),
            Self::Float(number) => serializer.serialize_f64(*number),
            Self::Text(text) => serializer.serialize_str(text),
            Self::List(items) => serializer.collect_seq(items),
            Self::Map(fields) => serializer.collect_map(fields.iter().map(|(name, value)| (name, value))),
        }
    }
}

impl<'de> Deserialize<'de> for Variable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyVariable)
    }
}

/// Reads any JSON value.
struct AnyVariable;

impl<'de> Visitor<'de> for AnyVariable {
    type Value = Variable;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Variable, E> {
        Ok(Variable::None)
    }

    fn visit_bool<E>(self, truth: bool) -> Result<Variable, E> {
        Ok(Variable::Bool(truth))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Variable, E> {
        Ok(Variable::Int(number.into()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Variable, E> {
        Ok(Variable::Int(number.into()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Variable, E> {
        Ok(Variable::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Variable, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Variable, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Variable::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Variable, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = object.next_entry()? {
            fields.push(field);
        }
        Ok(Variable::Map(fields))
    }
}

#[cfg(test)]
mod tests {
    use allocation_counter::measure;

    use super::*;

    /// A tool's parameters are a JSON schema, which comes from a client.
    #[test]
    fn a_schema_has_limits() {
        let nested = |levels: usize, open: &str, close: &str| {
            format!("{}1{}", open.repeat(levels), close.repeat(levels))
        };
        for (open, close) in [("[", "]"), (r#"{"properties":"#, "}"), (r#"{"items":["#, "]}")] {
            let each = open.matches(['[', '{']).count();
            assert!(Variable::from_json(&nested(127 / each, open, close)).is_ok());
            for levels in [128, 100_000] {
                let error = Variable::from_json(&nested(levels, open, close)).unwrap_err().to_string();
                assert!(error.contains("recursion limit exceeded"), "{error}");
            }
        }
        for (element, text) in [("0,", "["), ("{},", "["), (r#""","#, "["), (r#""":0,"#, "{")] {
            let close = if text == "[" { "0]" } else { r#""":0}"# };
            let large = format!("{text}{}{close}", element.repeat(MAX_JSON / element.len()));
            let used = measure(|| {
                let error = Variable::from_json(&large).unwrap_err().to_string();
                assert!(error.contains("more than 16777216; shorten it"), "{error}");
            });
            assert!(used.bytes_max < 1 << 12, "{}", used.bytes_max);
            let fits = format!("{text}{}{close}", element.repeat((MAX_JSON - 8) / element.len()));
            let used = measure(|| assert!(Variable::from_json(&fits).is_ok()));
            // A vector that grows is copied, so that it is there twice for a moment.
            assert!(used.bytes_max < 40 * MAX_JSON as u64, "{} for {element:?}", used.bytes_max);
        }
    }
}
