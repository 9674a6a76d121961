//! Weight files that change while a model is in use: a small file is in memory, so the answers stay the same, and a
//! mapped file is noticed when a request is submitted.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use kvbackend_cpu::CpuBackend;
use kvengine::{Engine, EngineConfig, PromptTokens, Request};
use kvmodel::dense::{FileAccess, HostDense};
use kvmodel::{ModelDirectory, WeightFormat};
use rstest::rstest;

use crate::failure::assert_nothing_held;

/// Copies the built-in model's files to `to`, and returns the path of the weights.
fn copied(to: &Path) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-rag");
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
    to.join("model.safetensors")
}

#[rstest]
#[case::overwritten(|path: &Path| std::fs::write(path, vec![0; std::fs::metadata(path).unwrap().len() as usize]).unwrap())]
#[case::truncated(|path: &Path| File::options().write(true).open(path).unwrap().set_len(0).unwrap())]
#[case::replaced(|path: &Path| {
    let new = path.with_extension("new");
    std::fs::write(&new, [7; 100]).unwrap();
    std::fs::rename(&new, path).unwrap();
})]
#[case::removed(|path: &Path| std::fs::remove_file(path).unwrap())]
fn a_small_weight_file_may_change_while_its_model_answers(
    #[case] change: fn(&Path),
    #[values(FileAccess::MapLarge, FileAccess::Copy)] access: FileAccess,
    #[values(WeightFormat::Stored, WeightFormat::Q8)] format: WeightFormat,
) {
    let folder = tempfile::tempdir().unwrap();
    let weights = copied(folder.path());
    let dense = std::sync::Arc::new(HostDense::default());
    let ModelDirectory { model, codec, .. } =
        ModelDirectory::load_by(folder.path(), (format, access), dense, &mut |_, _| ()).unwrap();
    let prompt = codec.encode("you answer questions alba is red . bora is blue . alba ?", true).unwrap();
    let mut engine = Engine::new(model, CpuBackend::new(), codec.digest(), &EngineConfig::default()).unwrap();
    let request = Request { max_new_tokens: 3, reuse: false, ..Request::new(PromptTokens::Plain(prompt)) };
    let before = engine.generate(&request, &mut ()).unwrap().tokens;
    change(&weights);
    assert_eq!(engine.generate(&request, &mut ()).unwrap().tokens, before);
    engine.model().check_files().unwrap();
}

#[rstest]
#[case::longer(|file: &File| file.set_len(file.metadata().unwrap().len() + 1).unwrap())]
#[case::shorter(|file: &File| file.set_len(1).unwrap())]
#[case::empty(|file: &File| file.set_len(0).unwrap())]
#[case::later(|file: &File| file.set_modified(SystemTime::now() + Duration::from_secs(5)).unwrap())]
#[case::earlier(|file: &File| file.set_modified(SystemTime::UNIX_EPOCH).unwrap())]
fn a_mapped_weight_file_that_changes_is_named_when_a_request_is_submitted(#[case] change: fn(&File)) {
    let folder = tempfile::tempdir().unwrap();
    let weights = copied(folder.path());
    let dense = std::sync::Arc::new(HostDense::default());
    let mapped = (WeightFormat::Stored, FileAccess::MapOver(0));
    let ModelDirectory { model, codec, .. } =
        ModelDirectory::load_by(folder.path(), mapped, dense, &mut |_, _| ()).unwrap();
    let prompt = codec.encode("you answer questions alba is red . bora is blue . alba ?", true).unwrap();
    let mut engine = Engine::new(model, CpuBackend::new(), codec.digest(), &EngineConfig::default()).unwrap();
    let request = Request { max_new_tokens: 3, reuse: false, ..Request::new(PromptTokens::Plain(prompt)) };
    engine.generate(&request, &mut ()).unwrap();
    change(&File::options().write(true).open(&weights).unwrap());
    for _ in 0..2 {
        let error = engine.submit(request.clone()).map(drop).unwrap_err().to_string();
        assert!(error.contains("model.safetensors") && error.contains("changed"), "{error}");
        assert_nothing_held(&engine);
    }
}
