//! Weights from safetensors: one file or an index with shards, as f32 on the host.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use safetensors::{Dtype, SafeTensors};

use crate::error::{Error, Result};

/// The tensors of a model by name, with a hash that identifies them. Each is checked against the expected
/// shape.
#[derive(Debug)]
pub struct Weights {
    source: Source,
    digest: blake3::Hash,
    /// The bytes of the tensors taken so far, in the format in which they are held.
    held: usize,
}

#[derive(Debug)]
enum Source {
    Files(BTreeMap<String, Tensor>),
    /// Returns a tensor for every name, drawn from this generator.
    Random(Box<StdRng>),
}

impl Weights {
    /// Reads `model.safetensors`, or the shards that `model.safetensors.index.json` names. Calls `progress`
    /// with the bytes read so far and in total.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if a file cannot be read. Returns [`Error::Weights`] if a file is truncated or
    /// its header is wrong.
    pub fn from_directory(dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        let single = dir.join("model.safetensors");
        let files = if single.exists() {
            vec![single]
        } else {
            let index = dir.join("model.safetensors.index.json");
            let text = std::fs::read_to_string(&index).map_err(|source| Error::Io { path: index, source })?;
            shards(&text)?.into_iter().map(|name| dir.join(name)).collect()
        };
        let size = |path: &Path| std::fs::metadata(path).map_or(0, |m| m.len());
        let total = files.iter().map(|file| size(file)).sum();
        let (mut done, mut hasher) = (0, blake3::Hasher::new());
        let mut tensors = BTreeMap::new();
        for path in files {
            progress(done, total);
            let io = |source| Error::Io { path: path.clone(), source };
            let mut file = std::fs::File::open(&path).map_err(io)?;
            let mut bytes = Vec::with_capacity(size(&path) as usize);
            // Reads in parts, so that progress shows within a file, too.
            while Read::take(&mut file, 16 << 20).read_to_end(&mut bytes).map_err(io)? > 0 {
                progress(done + bytes.len() as u64, total);
            }
            done += bytes.len() as u64;
            hasher.update(&bytes);
            let named = |e: Error| Error::Weights(format!("{}: {e}", path.display()));
            tensors.extend(parse(&bytes).map_err(named)?);
        }
        progress(done, total);
        Ok(Self { source: Source::Files(tensors), digest: hasher.finalize(), held: 0 })
    }

    /// Reads the bytes of one safetensors file.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Ok(Self { source: Source::Files(parse(bytes)?), digest: blake3::hash(bytes), held: 0 })
    }

    /// Creates random weights of every shape, for benchmarks. Vectors (norms and biases) are near 1.
    /// Projections keep the size of their input.
    pub fn random(seed: u64) -> Self {
        let digest = blake3::hash(&seed.to_le_bytes());
        Self { source: Source::Random(Box::new(StdRng::seed_from_u64(seed))), digest, held: 0 }
    }

    /// Returns the hash of all files, which is part of the model's identity in keys.
    pub fn digest(&self) -> &[u8; 32] {
        self.digest.as_bytes()
    }

    /// Returns the bytes of all tensors taken so far, in the format in which the model holds them.
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Adds the bytes of a copy in another format, which is held, too.
    pub(crate) fn hold(&mut self, bytes: usize) {
        self.held += bytes;
    }

    /// Replaces the bytes of a taken tensor by those of the format in which it is held.
    pub(crate) fn held_as(&mut self, taken: &Tensor, bytes: usize) {
        self.held = self.held + bytes - self::bytes(taken);
    }

    /// Takes the tensor `name`, which must have `shape`.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let tensor = match &mut self.source {
            Source::Files(tensors) => tensors.remove(name),
            Source::Random(rng) => Some(random(rng, shape)?),
        };
        let tensor = tensor.ok_or_else(|| Error::Weights(format!("{name} is missing")))?;
        if tensor.dims() == shape {
            self.held += bytes(&tensor);
            Ok(tensor)
        } else {
            Err(Error::Weights(format!(
                "{name} has shape {:?}, the config asks for {shape:?}",
                tensor.dims()
            )))
        }
    }
}

/// Returns the bytes of a tensor.
pub(crate) fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

fn random(rng: &mut StdRng, shape: &[usize]) -> Result<Tensor> {
    let width = shape.last().copied().unwrap_or(1);
    // The numbers are uniform, with variance 1 / width. Vectors are norms or biases.
    let (centre, spread) = if shape.len() == 1 { (1.0, 0.1) } else { (0.0, (3.0 / width as f32).sqrt()) };
    let values = (0..shape.iter().product()).map(|_| centre + spread * (2.0 * rng.random::<f32>() - 1.0));
    Ok(Tensor::from_vec(values.collect::<Vec<_>>(), shape, &Device::Cpu)?)
}

/// Returns the distinct names of the shards of an index.
fn shards(text: &str) -> Result<Vec<String>> {
    let bad = |what: &str| Error::Weights(format!("model.safetensors.index.json: {what}"));
    let index: serde_json::Value = serde_json::from_str(text).map_err(|e| bad(&e.to_string()))?;
    let map = index.get("weight_map").and_then(|map| map.as_object()).ok_or_else(|| bad("no weight_map"))?;
    let mut names = Vec::new();
    for name in map.values() {
        let name = name.as_str().ok_or_else(|| bad("a shard's name is no string"))?;
        if Path::new(name).components().count() != 1 {
            return Err(bad(&format!("shard {name:?} is not a plain file name")));
        }
        names.push(name.to_owned());
    }
    names.sort();
    names.dedup();
    if names.is_empty() { Err(bad("no shards")) } else { Ok(names) }
}

fn parse(bytes: &[u8]) -> Result<BTreeMap<String, Tensor>> {
    let file = SafeTensors::deserialize(bytes)
        .map_err(|e| Error::Weights(format!("not a valid safetensors file: {e}")))?;
    file.iter()
        .map(|(name, view)| {
            let dtype = match view.dtype() {
                Dtype::F32 => DType::F32,
                Dtype::F16 => DType::F16,
                Dtype::BF16 => DType::BF16,
                other => {
                    return Err(Error::Weights(format!(
                        "{name} has element type {other:?} (f32, f16, bf16 are read)"
                    )));
                }
            };
            let raw = Tensor::from_raw_buffer(view.data(), dtype, view.shape(), &Device::Cpu)?;
            Ok((name.to_owned(), raw.to_dtype(DType::F32)?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> Vec<u8> {
        let values: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let view = safetensors::tensor::TensorView::new(Dtype::F32, vec![2], &values).unwrap();
        safetensors::serialize([("a", view)], None).unwrap()
    }

    #[test]
    fn truncated_and_lying_files_are_errors() {
        let good = file();
        assert!(Weights::from_bytes(&good).is_ok());
        for cut in [0, 4, 8, good.len() / 2, good.len() - 1] {
            let error = Weights::from_bytes(&good[..cut]).unwrap_err().to_string();
            assert!(error.contains("safetensors"), "{error}");
        }
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
        assert!(weights.take("b", &[2]).unwrap_err().to_string().contains("b is missing"));
        assert!(weights.take("a", &[3]).unwrap_err().to_string().contains("[3]"));
    }

    #[test]
    fn an_index_names_plain_files_only() {
        assert_eq!(shards(r#"{"weight_map":{"a":"x","b":"y","c":"x"}}"#).unwrap(), ["x", "y"]);
        for bad in [r#"{"weight_map":{"a":"../x"}}"#, r#"{"weight_map":{}}"#, "{}", "["] {
            assert!(shards(bad).is_err());
        }
    }
}
