//! Every case on five CPU variants, with every element type (`cargo xtask conform` runs the others), and the
//! capabilities that each backend lists.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use kvconform::{BACKENDS, Bench, CASES, NamedBackend, skip};
use kvcore::{DType, Error, KvFormat, OPTIONAL};
use rstest::rstest;

/// Returns whether a backend can be tested here, and reports it if not. Missing processor instructions are
/// skipped even in strict runs, because no installation provides them.
fn is_here(named: &NamedBackend) -> bool {
    let NamedBackend { name, variant, .. } = named;
    match (named.make)() {
        Ok(_) => return true,
        Err(reason @ Error::Unsupported { .. }) => println!("SKIPPED: {name} ({variant}): {reason}"),
        Err(reason) => skip(format!("{name} ({variant}): {reason}")),
    }
    false
}

#[rstest]
fn conforms(
    #[values("cpu")] backend: &str,
    #[values("portable", "avx2", "avx512", "reference", "deferred")] variant: &str,
    #[values(DType::F32, DType::F16, DType::BF16)] dtype: DType,
) {
    let named = BACKENDS.iter().find(|b| b.name == backend && b.variant == variant).expect("a known backend");
    if !is_here(named) {
        return;
    }
    let failures: Vec<String> = CASES
        .iter()
        .filter_map(|case| {
            let bench = Bench::new((named.make)().expect("a backend"), dtype).expect("a stream");
            case.run(&bench).err().map(|failure| format!("{}: {failure}", case.name))
        })
        .collect();
    println!("{} cases on {backend} ({variant}), {dtype}", CASES.len());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn capabilities_list_every_element_type_and_format() {
    for named in BACKENDS {
        let backend = match (named.make)() {
            Ok(backend) => backend,
            // The processor lacks these instructions, but the other variants show what the backend supports.
            Err(Error::Unsupported { .. }) if named.name == "cpu" => continue,
            Err(reason) => return skip(format!("{} ({}): {reason}", named.name, named.variant)),
        };
        let capabilities = backend.capabilities();
        assert_eq!(capabilities.dtypes, DType::COMPUTE);
        let formats: &[&str] = if named.name == "ascend" { &["int8"] } else { &KvFormat::QUANTIZED };
        assert_eq!(capabilities.formats, formats, "{}", named.name);
        let lacks_more = capabilities.missing.iter().find(|missing| !OPTIONAL.contains(missing));
        assert_eq!(lacks_more, None, "{}: only optional operations may be missing", named.name);
    }
}
