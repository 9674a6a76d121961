//! The forms of sleep, and their names.

use std::fmt;
use std::str::FromStr;

use kvcore::KvFormat;

use crate::error::{Error, Result};

/// The form in which pieces sleep. Its name is `plain`, `compressed`, or the name of a quantised format.
///
/// ```
/// use kvchunk::SleepForm;
/// use kvcore::KvFormat;
/// assert_eq!("compressed".parse(), Ok(SleepForm::Compressed));
/// assert_eq!("int8:64".parse(), Ok(SleepForm::Quantised(KvFormat::Int8 { group: 64 })));
/// assert_eq!(SleepForm::Quantised(KvFormat::Int8 { group: 64 }).to_string(), "int8:64");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SleepForm {
    /// Pieces are stored unchanged, in blocks of a host arena, with a digest. Saving and waking wait for the
    /// stream.
    Plain,
    /// Pieces are compressed without loss. The bytes of the elements are separated into planes, so that signs
    /// and exponents are apart from most mantissa bits, and zstd compresses each plane with a checksum.
    /// Saving waits for the stream.
    Compressed,
    /// Pieces are stored in a quantised format. The contents after waking differ from the contents before
    /// sleep, so hits on the piece are approximate from then on.
    Quantised(KvFormat),
}

impl SleepForm {
    /// Returns whether the woken contents are bit-identical to the saved contents.
    pub fn is_exact(self) -> bool {
        !matches!(self, Self::Quantised(_))
    }
}

impl FromStr for SleepForm {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "plain" => Ok(Self::Plain),
            "compressed" => Ok(Self::Compressed),
            _ => match text.parse::<KvFormat>() {
                Ok(format) if format.is_quantized() => Ok(Self::Quantised(format)),
                _ => Err(Error::UnknownSleepForm(text.to_owned())),
            },
        }
    }
}

impl fmt::Display for SleepForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain => f.write_str("plain"),
            Self::Compressed => f.write_str("compressed"),
            Self::Quantised(format) => format.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_back_and_others_refused() {
        let words = ["plain", "compressed", "int8:32", "int4:16", "fp8-e4m3", "fp8-e5m2:head"];
        let forms = words.map(|word| word.parse::<SleepForm>().unwrap());
        assert_eq!(forms.map(|form| form.to_string()), words);
        assert_eq!(forms.map(SleepForm::is_exact), [true, true, false, false, false, false]);
        for word in ["", "none", "f16", "int8:0", "zstd"] {
            assert_eq!(word.parse::<SleepForm>(), Err(Error::UnknownSleepForm(word.to_owned())));
        }
    }
}
