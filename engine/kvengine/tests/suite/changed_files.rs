//! Weight files that change while a model is in use. A small file is in memory, so the answers stay the same. The change
//! of a mapped file is noticed when a request is submitted, whether the file is the only one, a shard or a GGUF file.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use kvbackend_cpu::CpuBackend;
use kvengine::{Engine, EngineConfig, PromptTokens, Request};
use kvmodel::dense::{FileAccess, HostDense};
use kvmodel::{ModelDirectory, WeightFormat};
use rstest::rstest;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

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

/// A mapped weight file of a model.
#[derive(Debug, Clone, Copy)]
enum Mapped {
    Single,
    FirstShard,
    LastShard,
    Gguf,
}

impl Mapped {
    /// Copies a model into a folder. Returns the path of the model, and of the file that changes.
    fn copied(self, to: &Path) -> (PathBuf, PathBuf) {
        match self {
            Self::Single => (to.to_owned(), copied(to)),
            Self::FirstShard => (to.to_owned(), split(&copied(to)).0),
            Self::LastShard => (to.to_owned(), split(&copied(to)).1),
            Self::Gguf => {
                let from =
                    Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvmodel/tests/goldens/gguf/yarn.gguf");
                let path = to.join("model.gguf");
                std::fs::copy(from, &path).unwrap();
                (path.clone(), path)
            }
        }
    }
}

/// Divides weights into two shards with an index, and returns the paths of the shards.
fn split(weights: &Path) -> (PathBuf, PathBuf) {
    let bytes = std::fs::read(weights).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    let (first, last) = tensors.split_at(tensors.len() / 2);
    let mut map = serde_json::Map::new();
    let mut write = |name: &str, tensors: &[(String, TensorView<'_>)]| {
        map.extend(tensors.iter().map(|(tensor, _)| (tensor.clone(), name.into())));
        let path = weights.with_file_name(name);
        std::fs::write(&path, safetensors::serialize(tensors.iter().cloned(), None).unwrap()).unwrap();
        path
    };
    let shards = (write("first.safetensors", first), write("last.safetensors", last));
    let index = serde_json::json!({ "weight_map": map }).to_string();
    std::fs::write(weights.with_file_name("model.safetensors.index.json"), index).unwrap();
    std::fs::remove_file(weights).unwrap();
    shards
}

/// Starts an engine with a model whose files are mapped, and returns a request that it has answered, with the tokens.
/// An hour has passed since the file changed, so that a clock with a coarse resolution shows the next change.
fn answered(model: &Path, file: &Path) -> (Engine, Request, Vec<u32>) {
    let before = SystemTime::now() - Duration::from_secs(3600);
    File::options().write(true).open(file).unwrap().set_modified(before).unwrap();
    let dense = std::sync::Arc::new(HostDense::default());
    let mapped = (WeightFormat::Stored, FileAccess::MapOver(0));
    let ModelDirectory { model, codec, .. } =
        ModelDirectory::load_by(model, mapped, dense, &mut |_, _| ()).unwrap();
    let prompt = codec.encode("alba is red . bora is blue . alba ?", true).unwrap();
    let mut engine = Engine::new(model, CpuBackend::new(), codec.digest(), &EngineConfig::default()).unwrap();
    let request = Request { max_new_tokens: 3, reuse: false, ..Request::new(PromptTokens::Plain(prompt)) };
    let tokens = engine.generate(&request, &mut ()).unwrap().tokens;
    (engine, request, tokens)
}

fn open(path: &Path) -> File {
    File::options().write(true).open(path).unwrap()
}

#[rstest]
#[case::overwritten(|path: &Path| {
    let length = std::fs::metadata(path).unwrap().len() as usize;
    open(path).write_all(&vec![7; length]).unwrap();
})]
#[case::one_byte_overwritten(|path: &Path| {
    let mut file = open(path);
    file.seek(SeekFrom::End(-1)).unwrap();
    file.write_all(&[7]).unwrap();
})]
#[case::longer(|path: &Path| open(path).set_len(std::fs::metadata(path).unwrap().len() + 1).unwrap())]
#[case::shorter(|path: &Path| open(path).set_len(1).unwrap())]
#[case::empty(|path: &Path| open(path).set_len(0).unwrap())]
#[case::written_anew(|path: &Path| std::fs::write(path, [7; 9]).unwrap())]
#[case::later(|path: &Path| open(path).set_modified(SystemTime::now() + Duration::from_secs(5)).unwrap())]
#[case::earlier(|path: &Path| open(path).set_modified(SystemTime::UNIX_EPOCH).unwrap())]
fn a_mapped_weight_file_that_changes_is_named_when_a_request_is_submitted(
    #[case] change: fn(&Path),
    #[values(Mapped::Single, Mapped::FirstShard, Mapped::LastShard, Mapped::Gguf)] kind: Mapped,
) {
    let folder = tempfile::tempdir().unwrap();
    let (model, file) = kind.copied(folder.path());
    let (mut engine, request, _) = answered(&model, &file);
    change(&file);
    for _ in 0..2 {
        let error = engine.submit(request.clone()).map(drop).unwrap_err().to_string();
        assert!(error.contains(file.to_str().unwrap()) && error.contains("changed"), "{error}");
        assert_nothing_held(&engine);
    }
}

/// The mapping keeps the old file, so the answers stay right.
#[rstest]
#[case::replaced(|path: &Path| {
    let new = path.with_extension("new");
    std::fs::write(&new, [7; 100]).unwrap();
    std::fs::rename(&new, path).unwrap();
})]
#[case::removed(|path: &Path| std::fs::remove_file(path).unwrap())]
#[case::renamed(|path: &Path| std::fs::rename(path, path.with_extension("old")).unwrap())]
#[case::folder_removed(|path: &Path| std::fs::remove_dir_all(path.parent().unwrap()).unwrap())]
fn a_mapped_weight_file_may_be_replaced_and_removed(
    #[case] change: fn(&Path),
    #[values(Mapped::Single, Mapped::FirstShard, Mapped::LastShard, Mapped::Gguf)] kind: Mapped,
) {
    let folder = tempfile::tempdir().unwrap();
    let (model, file) = kind.copied(folder.path());
    let (mut engine, request, tokens) = answered(&model, &file);
    change(&file);
    assert_eq!(engine.generate(&request, &mut ()).unwrap().tokens, tokens);
    assert_nothing_held(&engine);
}
