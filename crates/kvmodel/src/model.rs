//! The forward pass: dense layers on the host, KV and attention on the backend.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use kvcore::kernels::{ApplyRope, Attend, AttendRows, MergeGroup, QueryRow, Scatter};
use kvcore::{
    Backend, DType, KvArena, KvExtents, KvFormat, Logits, MemoryKind, Profiler, Rope, SequenceInput,
    SlotMapping, Stream, TensorView, allocate_tensor,
};

use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::layers::{Layer, Linear, RmsNorm, WeightFormat};
use crate::weights::Weights;

/// A decoder-only transformer.
#[derive(Debug)]
pub struct Model {
    config: ModelConfig,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    rope: Arc<Rope>,
    revision: [u8; 32],
}

/// Told how a request advances. Both methods do nothing unless implemented; `()` is the observer
/// that does not care.
pub trait Observer {
    /// `done` of `total` layers of the prefill are computed.
    fn layer(&mut self, done: usize, total: usize) {
        let _ = (done, total);
    }

    /// The answer has one token more.
    fn token(&mut self, token: u32) {
        let _ = token;
    }
}

impl Observer for () {}

/// Where a forward pass runs.
#[derive(Debug)]
pub struct ComputeDevice<'a> {
    /// Allocates what goes up and comes down.
    pub backend: &'a dyn Backend,
    /// Orders the work.
    pub stream: &'a dyn Stream,
    /// Holds keys and values.
    pub arena: &'a KvArena,
    /// Records where time goes.
    pub profiler: &'a Profiler,
}

impl Model {
    /// Builds the model from its config and weights.
    ///
    /// # Errors
    /// [`Error::Weights`] for a tensor that is missing or of another shape.
    pub fn new(config: ModelConfig, mut weights: Weights, format: WeightFormat) -> Result<Self> {
        let w = &mut weights;
        let embedding = w.take("model.embed_tokens.weight", &[config.vocab_size, config.hidden_size])?;
        let layers =
            (0..config.num_layers).map(|i| Layer::load(w, &config, i, format)).collect::<Result<_>>()?;
        let norm = RmsNorm::load(w, "model.norm", config.hidden_size, config.rms_norm_eps)?;
        let head = if config.tied_head {
            embedding.clone()
        } else {
            w.take("lm_head.weight", &[config.vocab_size, config.hidden_size])?
        };
        let rope = Arc::new(Rope::new(config.rope, config.max_positions)?);
        let revision = revision(&config, w.digest(), format)?;
        Ok(Self { embedding, layers, norm, head: Linear::new(&head, None, format)?, rope, revision, config })
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The rotary embedding of every layer.
    pub fn rope(&self) -> &Arc<Rope> {
        &self.rope
    }

    /// Hash of weights, configuration and weight format: everything that keys and values of the same
    /// tokens depend on.
    pub fn revision(&self) -> &[u8; 32] {
        &self.revision
    }

    /// What a cache must know of this model.
    pub fn kv_extents(&self, format: impl Into<KvFormat>) -> KvExtents {
        KvExtents {
            num_layers: self.config.num_layers,
            k_heads: self.config.kv_heads,
            v_heads: self.config.kv_heads,
            k_dim: self.config.head_dim,
            v_dim: self.config.head_dim,
            max_positions: self.config.max_positions,
            format: format.into(),
        }
    }

    /// One pass over a batch of sequences: their keys and values land in the arena.
    ///
    /// Returns the logits that were asked for, `[rows, vocab_size]` per sequence in order; sequences
    /// that asked for none have no entry.
    ///
    /// # Errors
    /// [`Error::TokenOutOfVocabulary`] before anything is computed; errors of the backend.
    pub fn forward(
        &self,
        device: &ComputeDevice,
        batch: &[SequenceInput],
        observer: &mut dyn Observer,
    ) -> Result<Vec<Tensor>> {
        let rows = Rows::new(batch, self.config.vocab_size)?;
        if rows.tokens.is_empty() {
            return Ok(Vec::new());
        }
        let count = rows.tokens.len();
        let tokens = Tensor::from_slice(&rows.tokens, count, &Device::Cpu)?;
        let mut x = self.embedding.index_select(&tokens, 0)?;
        let mut staging = Staging::new(device.backend, &self.config, count)?;
        let last = self.layers.len() - 1;
        for (index, layer) in self.layers.iter().enumerate() {
            // In the last layer only rows whose logits are wanted go on; the others leave their KV.
            let narrowed = (index == last).then(|| rows.wanted()).transpose()?;
            let qkv =
                device.profiler.span("projections", || layer.qkv(&x, narrowed.as_ref().map(|n| &n.index)))?;
            staging.store(device, &self.rope, index, &rows, &qkv.k, &qkv.v)?;
            let (at, groups) = match &narrowed {
                Some(n) => (&n.rows, &n.batch),
                None => (&rows.queries, &rows.batch),
            };
            if at.is_empty() {
                device.stream.synchronize()?;
                observer.layer(index + 1, self.layers.len());
                return Ok(Vec::new());
            }
            if let Some(n) = &narrowed {
                x = x.index_select(&n.index, 0)?;
            }
            let attention = staging.attend(device, &self.rope, index, &qkv.q, at, groups)?;
            x = device.profiler.span("feed forward", || layer.finish(&x, &attention))?;
            observer.layer(index + 1, self.layers.len());
        }
        device.profiler.span("head", || {
            let logits = self.head.forward(&self.norm.forward(&x)?)?;
            rows.split(&logits)
        })
    }
}

/// What distinguishes this model's keys and values from those of any other.
fn revision(config: &ModelConfig, weights: &[u8; 32], format: WeightFormat) -> Result<[u8; 32]> {
    let text = serde_json::to_vec(&(config, format)).map_err(|e| Error::Config(e.to_string()))?;
    let mut hasher = blake3::Hasher::new_derive_key("kvmodel revision v1");
    hasher.update(weights);
    hasher.update(&text);
    Ok(*hasher.finalize().as_bytes())
}

/// The rows of a batch, laid after one another.
struct Rows {
    tokens: Vec<u32>,
    queries: Arc<[QueryRow]>,
    positions: Arc<[i64]>,
    slots: SlotMapping,
    batch: Arc<[AttendRows]>,
    /// Rows of each sequence whose logits are wanted, as a range of `tokens`.
    logits: Vec<std::ops::Range<usize>>,
}

/// The rows that go through the end of the last layer.
struct Wanted {
    index: Tensor,
    rows: Arc<[QueryRow]>,
    batch: Arc<[AttendRows]>,
}

impl Rows {
    fn new(batch: &[SequenceInput], vocabulary: usize) -> Result<Self> {
        let tokens: Vec<u32> = batch.iter().flat_map(|s| s.tokens.iter().copied()).collect();
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(Error::TokenOutOfVocabulary { token, vocabulary });
        }
        for sequence in batch {
            if sequence.slots.len() != sequence.tokens.len() {
                let (expected, got) = (sequence.tokens.len(), sequence.slots.len());
                return Err(kvcore::Error::Mismatch { what: "slots of a sequence", expected, got }.into());
            }
        }
        let rows: Arc<[QueryRow]> = batch.iter().flat_map(SequenceInput::rows).collect();
        let (mut entries, mut logits, mut at) = (Vec::new(), Vec::new(), 0);
        for sequence in batch {
            let range = at..at + sequence.tokens.len();
            at = range.end;
            entries.push(AttendRows::new(range.clone(), sequence.segments.clone()));
            logits.push(match sequence.logits {
                Logits::None => range.end..range.end,
                Logits::Last => range.end.saturating_sub(1).max(range.start)..range.end,
                Logits::All => range,
            });
        }
        Ok(Self {
            positions: rows.iter().map(|row| row.position).collect(),
            slots: SlotMapping::concat(batch.iter().map(|s| &s.slots)),
            batch: entries.into(),
            tokens,
            queries: rows,
            logits,
        })
    }

    fn wanted(&self) -> Result<Wanted> {
        let index: Vec<u32> = self.logits.iter().cloned().flatten().map(|row| row as u32).collect();
        let (mut batch, mut at) = (Vec::new(), 0);
        for (entry, wanted) in self.batch.iter().zip(&self.logits) {
            let range = at..at + wanted.len();
            at = range.end;
            batch.push(AttendRows::new(range, Arc::clone(&entry.segments)));
        }
        Ok(Wanted {
            rows: index.iter().map(|&row| self.queries[row as usize]).collect(),
            batch: batch.into(),
            index: Tensor::from_vec(index.clone(), index.len(), &Device::Cpu)?,
        })
    }

    fn split(&self, logits: &Tensor) -> Result<Vec<Tensor>> {
        let (mut out, mut at) = (Vec::new(), 0);
        for wanted in self.logits.iter().filter(|wanted| !wanted.is_empty()) {
            out.push(logits.narrow(0, at, wanted.len())?);
            at += wanted.len();
        }
        Ok(out)
    }
}

/// Device buffers of one pass, reused by every layer.
struct Staging {
    q: TensorView,
    k: TensorView,
    v: TensorView,
    out: TensorView,
    scale: f32,
    host: Vec<f32>,
}

impl Staging {
    fn new(backend: &dyn Backend, c: &ModelConfig, rows: usize) -> Result<Self> {
        let tensor =
            |heads| allocate_tensor(backend, MemoryKind::Device, DType::F32, &[rows, heads, c.head_dim]);
        Ok(Self {
            q: tensor(c.heads)?,
            k: tensor(c.kv_heads)?,
            v: tensor(c.kv_heads)?,
            out: tensor(c.heads)?,
            scale: 1.0 / (c.head_dim as f32).sqrt(),
            host: Vec::new(),
        })
    }

    /// Keys and values go up, keys are rotated where they stand, both are scattered to their slots.
    fn store(
        &mut self,
        device: &ComputeDevice,
        rope: &Arc<Rope>,
        layer: usize,
        rows: &Rows,
        k: &Tensor,
        v: &Tensor,
    ) -> Result<()> {
        device.profiler.span("copy to device", || {
            upload(device.stream, &self.k, k)?;
            upload(device.stream, &self.v, v)
        })?;
        device.profiler.span("rope and scatter", || {
            device.stream.rope(&ApplyRope {
                rows: self.k.clone(),
                positions: Arc::clone(&rows.positions),
                rope: Arc::clone(rope),
            })?;
            Ok(device.stream.scatter(&Scatter {
                arena: device.arena.clone(),
                layer,
                k: self.k.clone(),
                v: self.v.clone(),
                slots: Arc::clone(rows.slots.slots()),
            })?)
        })
    }

    /// Attention of `rows`, `[rows, heads * head_dim]`.
    fn attend(
        &mut self,
        device: &ComputeDevice,
        rope: &Arc<Rope>,
        layer: usize,
        q: &Tensor,
        rows: &Arc<[QueryRow]>,
        batch: &Arc<[AttendRows]>,
    ) -> Result<Tensor> {
        let (count, heads, dim) = q.dims3()?;
        let (to, out) = (self.q.slice(0, 0, count)?, self.out.slice(0, 0, count)?);
        device.profiler.span("copy to device", || upload(device.stream, &to, q))?;
        device.profiler.span("attend", || {
            device.stream.attend(&Attend {
                arena: device.arena.clone(),
                layer,
                q: to,
                rope: Some(Arc::clone(rope)),
                rows: Arc::clone(rows),
                batch: Arc::clone(batch),
                groups: [MergeGroup::default()].into(),
                scale: self.scale,
                window: None,
                softcap: None,
                out: out.clone(),
                lse: None,
            })
        })?;
        self.host.resize(count * heads * dim, 0.0);
        device
            .profiler
            .span("copy to host", || device.stream.read(&out, bytemuck::cast_slice_mut(&mut self.host)))?;
        Ok(Tensor::from_slice(&self.host, (count, heads * dim), &Device::Cpu)?)
    }
}

/// Copies a host tensor into a device buffer of the same extents.
fn upload(stream: &dyn Stream, to: &TensorView, from: &Tensor) -> Result<()> {
    let values = from.flatten_all()?.to_vec1::<f32>()?;
    Ok(stream.write(to, bytemuck::cast_slice(&values))?)
}
