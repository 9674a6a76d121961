//! The names of storage formats on the command line and in configs.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvcore::{Error, Fp8Kind, KvFormat, ScaleScope};

#[test]
fn words_round_trip() {
    for word in ["f32", "f16", "bf16", "int8:64", "int4:32", "fp8-e4m3", "fp8-e4m3:head", "fp8-e5m2:head"] {
        let format: KvFormat = word.parse().unwrap();
        assert_eq!(format.to_string(), word);
        assert_eq!(format.is_quantized(), word.len() > 4);
        assert_eq!(format.is_quantized(), KvFormat::QUANTIZED.contains(&format.name()));
    }
    assert_eq!("int4".parse(), Ok(KvFormat::Int4 { group: 32 }));
    assert_eq!("fp8-e5m2".parse(), Ok(KvFormat::Fp8 { kind: Fp8Kind::E5M2, scales: ScaleScope::PerTensor }));
}

#[test]
fn unknown_words_are_refused() {
    for word in ["", "i8", "u8", "f8e4m3", "int8:", "int8:x", "int8:-1", "fp8-e4m3:32", "bf16:32", "int2"] {
        assert!(matches!(word.parse::<KvFormat>(), Err(Error::Unsupported { .. })), "{word:?}");
    }
    assert_eq!("int4:0".parse::<KvFormat>(), Err(Error::Zero { what: "group" }));
}
