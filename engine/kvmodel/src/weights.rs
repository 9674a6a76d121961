//! Reads weights, unchanged, from one safetensors file or from shards with an index.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use crate::dense::{FileAccess, SharedBytes, StoredType, StoredWeight, WeightFile};
use crate::error::{Error, Result, WeightProblem};
use crate::files::{SmallFile, read_small_file};

/// The name of the weight file if there are no shards.
const SINGLE: &str = "model.safetensors";
/// The name of the file that lists the shards.
const INDEX: &str = "model.safetensors.index.json";

const NO_WEIGHTS: &str = "it has neither model.safetensors nor model.safetensors.index.json; convert weights of another format, \
                          such as pytorch_model.bin, to safetensors";

/// A model's tensors by name, with a hash that identifies them. A tensor's shape is checked when the model
/// takes it.
///
/// Large files are memory-mapped. The model takes the tensors, which are parts of the files, one by one. Dense
/// steps that use weights unchanged keep these parts, so mapped weights are not copied, and processes that run
/// the same model share the memory. [`Model::check_files`](crate::Model::check_files) notices a mapped file that
/// has changed.
#[derive(Debug)]
pub struct Weights {
    source: WeightSource,
    digest: blake3::Hash,
    /// The files that the tensors are parts of.
    files: Vec<WeightFile>,
    /// The names of tensors that no model of the family has.
    unknown: Vec<String>,
}

#[derive(Debug)]
enum WeightSource {
    Stored(BTreeMap<String, StoredWeight>),
    /// Any tensor that is asked for, drawn from this random generator.
    Random(Box<StdRng>),
}

impl Weights {
    /// Reads `model.safetensors`, or the shards that `model.safetensors.index.json` names. Calls `progress`
    /// with the number of bytes read so far and the total number. Files that are mapped ([`FileAccess`]) must not
    /// change while the model is in use.
    ///
    /// # Errors
    /// - Returns [`Error::Io`], with the path, if a file cannot be read.
    /// - Returns [`Error::File`], with the path, if there are no weights, a file is truncated, or its header
    ///   or the index of shards is wrong. The error names a tensor that is truncated or has an unsupported
    ///   element type.
    pub fn from_directory(dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        Self::open_directory(dir, FileAccess::default(), progress)
    }

    /// Reads or maps the weight files of a directory.
    pub(crate) fn open_directory(
        dir: &Path,
        access: FileAccess,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        let single = dir.join(SINGLE);
        // A link without its file is an error when it is opened.
        let files = if single.exists() || single.is_symlink() {
            vec![single]
        } else {
            let index = SmallFile::read_if_there(dir.join(INDEX))?;
            let index = index.ok_or_else(|| Error::Weights(NO_WEIGHTS.to_owned()).in_file(dir))?;
            let names: BTreeSet<String> = index.parse(shards)?.into_values().collect();
            names.into_iter().map(|name| dir.join(name)).collect()
        };
        let size = |path: &Path| std::fs::metadata(path).map_or(0, |m| m.len());
        let total = files.iter().map(|file| size(file)).sum();
        let (mut done, mut hasher) = (0, blake3::Hasher::new());
        let (mut tensors, mut opened) = (BTreeMap::new(), Vec::new());
        for path in files {
            progress(done, total);
            let io = |source| Error::Io { path: path.clone(), source };
            let file = WeightFile::open(&path, access).map_err(io)?;
            let mut reader = FileReader { file: file.bytes().clone(), at: 0, hasher: &mut hasher };
            let mut report = |at: usize| progress(done + at as u64, total);
            tensors.extend(reader.tensors(&mut report).map_err(|error| error.in_file(path))?);
            done += file.bytes().len() as u64;
            opened.push(file);
        }
        progress(done, total);
        Ok(Self {
            source: WeightSource::Stored(tensors),
            digest: hasher.finalize(),
            files: opened,
            unknown: Vec::new(),
        })
    }

    /// Parses the bytes of one safetensors file.
    ///
    /// # Errors
    /// - Returns [`Error::Weights`] if the bytes are truncated or their header is wrong.
    /// - Returns [`Error::Weight`], with the name, if a tensor has an unsupported element type.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut hasher = blake3::Hasher::new();
        let mut reader = FileReader { file: bytes.to_vec().into(), at: 0, hasher: &mut hasher };
        let tensors = reader.tensors(&mut |_| ())?;
        Ok(Self {
            source: WeightSource::Stored(tensors),
            digest: hasher.finalize(),
            files: Vec::new(),
            unknown: Vec::new(),
        })
    }

    /// Creates weights from tensors that the caller has already read, for example `Q8_0` or `Q4_K` blocks,
    /// which safetensors files cannot contain. If several tensors have the same name, the last one is used.
    pub fn from_stored(tensors: impl IntoIterator<Item = StoredWeight>) -> Self {
        let tensors: BTreeMap<_, _> =
            tensors.into_iter().map(|tensor| (tensor.name().to_owned(), tensor)).collect();
        let mut hasher = blake3::Hasher::new();
        for tensor in tensors.values() {
            // Each length is hashed before its bytes, so different tensors never give the same hash input.
            let head = format!("{:?} {} {:?}", tensor.name(), tensor.dtype(), tensor.shape());
            hasher.update(&(head.len() as u64).to_le_bytes());
            hasher.update(head.as_bytes());
            hasher.update(tensor.bytes());
        }
        Self {
            source: WeightSource::Stored(tensors),
            digest: hasher.finalize(),
            files: Vec::new(),
            unknown: Vec::new(),
        }
    }

    /// Adds a file that the tensors are parts of.
    pub(crate) fn with_file(mut self, file: WeightFile) -> Self {
        self.files.push(file);
        self
    }

    /// Adds the names of tensors that were not read, because no model of the family has them.
    #[must_use]
    pub(crate) fn with_unknown(self, unknown: Vec<String>) -> Self {
        Self { unknown, ..self }
    }

    /// Removes and returns the names of the tensors that have not been taken.
    pub(crate) fn take_rest(&mut self) -> Vec<String> {
        let mut rest = std::mem::take(&mut self.unknown);
        if let WeightSource::Stored(tensors) = &mut self.source {
            rest.extend(std::mem::take(tensors).into_keys());
        }
        rest
    }

    /// Removes and returns the files that the tensors are parts of.
    pub(crate) fn take_files(&mut self) -> Vec<WeightFile> {
        std::mem::take(&mut self.files)
    }

    /// Creates random weights, for benchmarks: any tensor can be taken, with any shape. The elements of
    /// vectors (norms and biases) are near 1, and projections roughly preserve the magnitude of their input.
    pub fn random(seed: u64) -> Self {
        let digest = blake3::hash(&seed.to_le_bytes());
        let source = WeightSource::Random(Box::new(StdRng::seed_from_u64(seed)));
        Self { source, digest, files: Vec::new(), unknown: Vec::new() }
    }

    /// Returns the hash that identifies the weights: the hash of all files, of the given tensors, or of the
    /// random seed. It is part of the model's identity and of its cache keys.
    pub fn digest(&self) -> &[u8; 32] {
        self.digest.as_bytes()
    }

    /// Returns a tensor without removing it, if it was read from a file.
    pub(crate) fn peek(&self, name: &str) -> Option<&StoredWeight> {
        match &self.source {
            WeightSource::Stored(tensors) => tensors.get(name),
            WeightSource::Random(_) => None,
        }
    }

    /// Removes and returns the tensor `name`, which must have `shape`.
    ///
    /// # Errors
    /// Returns [`Error::Weight`], with the name, if the tensor is missing or has the wrong shape.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<StoredWeight> {
        let stored = match &mut self.source {
            WeightSource::Stored(tensors) => tensors.remove(name),
            WeightSource::Random(rng) => Some(random(rng, name, shape)?),
        };
        let missing = || Error::Weight { name: name.to_owned(), problem: WeightProblem::Missing };
        let stored = stored.ok_or_else(missing)?;
        stored.check_shape(shape)?;
        Ok(stored)
    }
}

fn random(rng: &mut StdRng, name: &str, shape: &[usize]) -> Result<StoredWeight> {
    let width = shape.last().copied().unwrap_or(1);
    // Matrix elements are uniform around 0, with variance 1 / width. Vectors, which are norms or biases,
    // are near 1.
    let (centre, spread) = if shape.len() == 1 { (1.0, 0.1) } else { (0.0, (3.0 / width as f32).sqrt()) };
    let values = (0..shape.iter().product()).map(|_| centre + spread * (2.0 * rng.random::<f32>() - 1.0));
    StoredWeight::of_f32(name, shape, &values.collect::<Vec<_>>())
}

/// Returns the path of the file in `dir` that holds a tensor, or of the index that should name that file.
pub(crate) fn file_of(dir: &Path, tensor: &str) -> PathBuf {
    let (single, index) = (dir.join(SINGLE), dir.join(INDEX));
    if single.exists() {
        return single;
    }
    let text = read_small_file(&index).ok().and_then(|bytes| String::from_utf8(bytes).ok());
    let shards = text.and_then(|text| shards(&text).ok());
    shards.and_then(|shards| shards.get(tensor).map(|name| dir.join(name))).unwrap_or(index)
}

/// Returns the tensor names in an index, each with the name of its shard.
fn shards(text: &str) -> Result<BTreeMap<String, String>> {
    let bad = |what: &str| Error::Weights(what.to_owned());
    let index: serde_json::Value = serde_json::from_str(text).map_err(|e| bad(&e.to_string()))?;
    let map = index.get("weight_map").and_then(|map| map.as_object()).ok_or_else(|| bad("no weight_map"))?;
    let mut shards = BTreeMap::new();
    for (tensor, name) in map {
        let name = name.as_str().ok_or_else(|| bad("a shard's name is not a string"))?;
        if Path::new(name).components().count() != 1 {
            return Err(bad(&format!("shard {name:?} is not a plain file name")));
        }
        shards.insert(tensor.clone(), name.to_owned());
    }
    if shards.is_empty() { Err(bad("no shards")) } else { Ok(shards) }
}

/// A reader that reads the tensors of a safetensors file one after another.
struct FileReader<'a> {
    file: SharedBytes,
    /// The number of bytes read so far.
    at: usize,
    hasher: &'a mut blake3::Hasher,
}

/// The maximum number of bytes to read and hash between two progress reports.
const PART: usize = 16 << 20;

/// Returns the error for a header that does not describe its file.
fn not_safetensors(reason: impl std::fmt::Display) -> Error {
    Error::Weights(format!("not a valid safetensors file: {reason}"))
}

impl FileReader<'_> {
    /// Returns the number of bytes left to read.
    fn left(&self) -> usize {
        self.file.len() - self.at
    }

    /// Reads the next `len` bytes. Calls `progress` with the number of bytes read so far.
    fn bytes(&mut self, len: u64, progress: &mut dyn FnMut(usize)) -> Result<SharedBytes> {
        let end = usize::try_from(len).ok().and_then(|len| self.at.checked_add(len));
        let Some(bytes) = end.and_then(|end| self.file.part(self.at..end)) else {
            let reason = format!("{len} bytes are expected, but only {} are left", self.left());
            return Err(not_safetensors(reason));
        };
        for part in bytes.chunks(PART) {
            self.hasher.update(part);
            self.at += part.len();
            progress(self.at);
        }
        Ok(bytes)
    }

    /// Reads all tensors of the file.
    fn tensors(&mut self, progress: &mut dyn FnMut(usize)) -> Result<BTreeMap<String, StoredWeight>> {
        let length = self.bytes(8, progress)?;
        let length =
            length[..].try_into().map(u64::from_le_bytes).map_err(|_| not_safetensors("no header"))?;
        let text = self.bytes(length, progress)?;
        // Parsing checks that tensors have as many bytes as their shapes need, and follow one another
        // without gaps.
        let metadata: Metadata = serde_json::from_slice(&text).map_err(not_safetensors)?;
        if self.left() > metadata.data_len() {
            let reason =
                format!("the tensors take {} bytes, but the file has {}", metadata.data_len(), self.left());
            return Err(not_safetensors(reason));
        }
        let mut tensors = BTreeMap::new();
        for name in metadata.offset_keys() {
            let Some(info) = metadata.info(&name) else { continue };
            let dtype = match info.dtype {
                Dtype::F32 => StoredType::F32,
                Dtype::F16 => StoredType::F16,
                Dtype::BF16 => StoredType::BF16,
                other => {
                    let problem = WeightProblem::Type(format!("{other:?}"));
                    return Err(Error::Weight { name, problem });
                }
            };
            let (start, end) = info.data_offsets;
            let expected = end - start;
            if expected > self.left() {
                let problem = WeightProblem::Length { expected, got: self.left() };
                return Err(not_safetensors(format!("{name} {problem}")));
            }
            let bytes = self.bytes(expected as u64, progress)?;
            let stored = StoredWeight::new(&*name, dtype, &info.shape, bytes)?;
            tensors.insert(name, stored);
        }
        Ok(tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_of(dtype: Dtype) -> Vec<u8> {
        let values: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let shape = vec![8 * values.len() / dtype.bitsize()];
        let view = safetensors::tensor::TensorView::new(dtype, shape, &values).unwrap();
        safetensors::serialize([("a", view)], None).unwrap()
    }

    fn file() -> Vec<u8> {
        file_of(Dtype::F32)
    }

    fn problem_of(result: Result<StoredWeight>) -> (String, WeightProblem) {
        match result {
            Err(Error::Weight { name, problem }) => (name, problem),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn truncated_and_lying_files_are_errors() {
        let good = file();
        assert!(Weights::from_bytes(&good).is_ok());
        for cut in [0, 4, 8, good.len() / 2] {
            let error = Weights::from_bytes(&good[..cut]).unwrap_err().to_string();
            assert!(error.contains("safetensors"), "{error}");
        }
        for got in [0, 7] {
            let error = Weights::from_bytes(&good[..good.len() - 8 + got]).unwrap_err().to_string();
            assert!(
                error.ends_with(&format!("file: a has {got} bytes, but its type and shape require 8")),
                "{error}"
            );
        }
        let long = [&good[..], &[0]].concat();
        assert!(Weights::from_bytes(&long).unwrap_err().to_string().contains("but the file has 9"));
        let lying = String::from_utf8_lossy(&good[8..]).replace("[2]", "[9]");
        let lying = [&good[..8], lying.as_bytes()].concat();
        assert!(Weights::from_bytes(&lying).is_err());
        let mut huge = good;
        huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Weights::from_bytes(&huge).is_err());
    }

    #[test]
    fn names_and_shapes_are_checked() {
        let mut weights = Weights::from_bytes(&file()).unwrap();
        assert_eq!(problem_of(weights.take("b", &[2])), ("b".to_owned(), WeightProblem::Missing));
        let problem = WeightProblem::Shape { expected: vec![3], got: vec![2] };
        assert_eq!(problem_of(weights.take("a", &[3])), ("a".to_owned(), problem));
    }

    #[test]
    fn an_unknown_element_type_names_the_tensor() {
        let (name, problem) = problem_of(Weights::from_bytes(&file_of(Dtype::I32)).map(|_| unreachable!()));
        assert_eq!((name, problem), ("a".to_owned(), WeightProblem::Type("I32".to_owned())));
    }

    #[test]
    fn tensors_stay_as_they_are_stored() {
        for (dtype, stored) in
            [(Dtype::F32, StoredType::F32), (Dtype::F16, StoredType::F16), (Dtype::BF16, StoredType::BF16)]
        {
            let file = file_of(dtype);
            let mut weights = Weights::from_bytes(&file).unwrap();
            assert_eq!(weights.digest(), blake3::hash(&file).as_bytes());
            let taken = weights.take("a", &[8 / stored.block_bytes()]).unwrap();
            assert_eq!((taken.dtype(), &taken.bytes()[..]), (stored, &file[file.len() - 8..]));
        }
    }

    #[test]
    fn other_tensors_have_another_digest() {
        let of = |name: &str, shape: &[usize]| {
            let tensor = StoredWeight::of_f32(name, shape, &[1.0, 2.0]).unwrap();
            *Weights::from_stored([tensor]).digest()
        };
        assert_eq!(of("a", &[2]), of("a", &[2]));
        assert!(of("a", &[2]) != of("b", &[2]) && of("a", &[2]) != of("a", &[2, 1]));
    }

    #[test]
    fn an_index_names_plain_files_only() {
        let named = shards(r#"{"weight_map":{"a":"x","b":"y","c":"x"}}"#).unwrap();
        assert_eq!(
            named.into_iter().map(|(tensor, file)| tensor + &file).collect::<Vec<_>>(),
            ["ax", "by", "cx"]
        );
        for bad in [r#"{"weight_map":{"a":"../x"}}"#, r#"{"weight_map":{}}"#, "{}", "["] {
            assert!(shards(bad).is_err());
        }
    }
}
