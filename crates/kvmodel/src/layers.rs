//! The dense parts of a decoder layer.

use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{D, Module, Tensor};

use crate::config::{Family, ModelConfig};
use crate::error::Result;
use crate::weights::Weights;

/// How weights of projections are held while computing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub enum WeightFormat {
    /// f32.
    #[default]
    F32,
    /// Eight-bit blocks of 32 (ggml's `Q8_0`): about a quarter of the memory traffic when decoding.
    /// Projections whose input width is no multiple of 32 stay f32.
    Q8,
}

/// A projection `x Wᵀ + b`.
#[derive(Debug)]
pub(crate) struct Linear {
    weight: Matrix,
    bias: Option<Tensor>,
}

#[derive(Debug)]
enum Matrix {
    Dense(Tensor),
    Quantised(QMatMul),
}

impl Matrix {
    fn new(weight: &Tensor, format: WeightFormat) -> Result<Self> {
        let width = weight.dim(1)?;
        if format == WeightFormat::Q8 && width.is_multiple_of(GgmlDType::Q8_0.block_size()) {
            let quantised = QTensor::quantize(weight, GgmlDType::Q8_0)?;
            Ok(Self::Quantised(QMatMul::from_arc(Arc::new(quantised))?))
        } else {
            Ok(Self::Dense(weight.t()?))
        }
    }
}

impl Linear {
    pub(crate) fn new(weight: &Tensor, bias: Option<Tensor>, format: WeightFormat) -> Result<Self> {
        Ok(Self { weight: Matrix::new(weight, format)?, bias })
    }

    fn load(
        w: &mut Weights,
        name: &str,
        out: usize,
        input: usize,
        bias: bool,
        format: WeightFormat,
    ) -> Result<Self> {
        let weight = w.take(&format!("{name}.weight"), &[out, input])?;
        let bias = if bias { Some(w.take(&format!("{name}.bias"), &[out])?) } else { None };
        Self::new(&weight, bias, format)
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let y = match &self.weight {
            Matrix::Dense(w) => x.matmul(w)?,
            Matrix::Quantised(w) => w.forward(x)?,
        };
        Ok(match &self.bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        })
    }
}

/// Root-mean-square norm over the last axis.
#[derive(Debug)]
pub(crate) struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

impl RmsNorm {
    pub(crate) fn load(w: &mut Weights, name: &str, width: usize, eps: f64) -> Result<Self> {
        Ok(Self { weight: w.take(&format!("{name}.weight"), &[width])?, eps })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
        Ok(x.broadcast_div(&(mean_square + self.eps)?.sqrt()?)?.broadcast_mul(&self.weight)?)
    }
}

/// A decoder layer without its attention, which reads the cache.
#[derive(Debug)]
pub(crate) struct Layer {
    input_norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    head_norms: Option<(RmsNorm, RmsNorm)>,
    output: Linear,
    mlp_norm: RmsNorm,
    gate: Linear,
    up: Linear,
    down: Linear,
    head_dim: usize,
}

/// Queries, keys and values of a layer's rows, `[rows, heads, head_dim]`, not rotated.
pub(crate) struct Qkv {
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
}

impl Layer {
    pub(crate) fn load(w: &mut Weights, c: &ModelConfig, index: usize, format: WeightFormat) -> Result<Self> {
        let at = |part: &str| format!("model.layers.{index}.{part}");
        let (q_width, kv_width) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
        let (hidden, inner, eps) = (c.hidden_size, c.intermediate_size, c.rms_norm_eps);
        let mut linear = |name: &str, out, input, bias| Linear::load(w, &at(name), out, input, bias, format);
        let q = linear("self_attn.q_proj", q_width, hidden, c.qkv_bias)?;
        let k = linear("self_attn.k_proj", kv_width, hidden, c.qkv_bias)?;
        let v = linear("self_attn.v_proj", kv_width, hidden, c.qkv_bias)?;
        let output = linear("self_attn.o_proj", hidden, q_width, c.output_bias)?;
        let gate = linear("mlp.gate_proj", inner, hidden, c.mlp_bias)?;
        let up = linear("mlp.up_proj", inner, hidden, c.mlp_bias)?;
        let down = linear("mlp.down_proj", hidden, inner, c.mlp_bias)?;
        let head_norms = match c.family {
            Family::Qwen3 => Some((
                RmsNorm::load(w, &at("self_attn.q_norm"), c.head_dim, eps)?,
                RmsNorm::load(w, &at("self_attn.k_norm"), c.head_dim, eps)?,
            )),
            Family::Llama | Family::Qwen2 => None,
        };
        let input_norm = RmsNorm::load(w, &at("input_layernorm"), hidden, eps)?;
        let mlp_norm = RmsNorm::load(w, &at("post_attention_layernorm"), hidden, eps)?;
        Ok(Self { input_norm, q, k, v, head_norms, output, mlp_norm, gate, up, down, head_dim: c.head_dim })
    }

    /// Keys and values of all rows, queries of the rows in `wanted` (all, if `None`).
    pub(crate) fn qkv(&self, x: &Tensor, wanted: Option<&Tensor>) -> Result<Qkv> {
        let x = self.input_norm.forward(x)?;
        let heads = |y: Tensor| -> Result<Tensor> {
            let (rows, width) = y.dims2()?;
            Ok(y.reshape((rows, width / self.head_dim, self.head_dim))?)
        };
        let asking = wanted.map_or_else(|| Ok(x.clone()), |rows| x.index_select(rows, 0))?;
        let mut q = heads(self.q.forward(&asking)?)?;
        let mut k = heads(self.k.forward(&x)?)?;
        let v = heads(self.v.forward(&x)?)?;
        if let Some((q_norm, k_norm)) = &self.head_norms {
            (q, k) = (q_norm.forward(&q)?, k_norm.forward(&k)?);
        }
        Ok(Qkv { q, k, v })
    }

    /// The residual stream after attention `[rows, heads * head_dim]` and the feed-forward layer.
    pub(crate) fn finish(&self, x: &Tensor, attention: &Tensor) -> Result<Tensor> {
        let x = (x + self.output.forward(attention)?)?;
        let y = self.mlp_norm.forward(&x)?;
        let gated = (self.gate.forward(&y)?.silu()? * self.up.forward(&y)?)?;
        Ok((x + self.down.forward(&gated)?)?)
    }
}
