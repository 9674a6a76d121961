//! Dense steps whose activations are views of backend memory, as on a device, written as plain loops over the
//! public traits. Attention reads the activations themselves, and nothing is copied at the border.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, Execution};
use kvchunk::{Recompute, ReuseCell};
use kvcore::{Backend, DType, KeyForm, MemoryKind, Storage, Stream, TensorView, allocate_tensor};
use kvengine::{Engine, EngineConfig, Generation, PromptTokens, Request};
use kvmodel::dense::{
    Activation, AttentionInput, Border, BorderExtents, Dense, GateActivation, RowIndex, StoredWeight, Weight,
    WeightUse,
};
use kvmodel::{Model, Result, WeightFormat};
use rstest::rstest;

use crate::common::{Golden, config, distance, load_model, weights};

/// Dense steps in the memory of a backend.
#[derive(Debug, Clone)]
struct Views {
    backend: Arc<CpuBackend>,
    stream: Arc<dyn Stream>,
}

/// Weights in f32, in their stored layout.
#[derive(Debug)]
struct Numbers {
    values: Arc<Vec<f32>>,
    width: usize,
    transposed: bool,
}

impl Weight for Numbers {
    fn bytes(&self) -> usize {
        4 * self.values.len()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

fn numbers(weight: &dyn Weight) -> &Numbers {
    weight.as_any().downcast_ref().unwrap()
}

impl Views {
    fn new(backend: &Arc<CpuBackend>) -> Self {
        Self { backend: Arc::clone(backend), stream: backend.stream().unwrap() }
    }

    fn values(&self, x: &Activation) -> Result<Vec<f32>> {
        let mut values = Vec::new();
        self.read(x, &mut values)?;
        Ok(values)
    }

    fn allocate(&self, dtype: DType, shape: &[usize]) -> Result<TensorView> {
        // Memory cannot be empty, but there may be no rows.
        let some: Vec<usize> = shape.iter().map(|&n| n.max(1)).collect();
        let view = allocate_tensor(self.backend.as_ref(), MemoryKind::Device, dtype, &some)?;
        Ok(view.slice(0, 0, shape[0])?)
    }

    fn view(&self, shape: &[usize], values: &[f32]) -> Result<TensorView> {
        let view = self.allocate(DType::F32, shape)?;
        self.stream.write(&view, bytemuck::cast_slice(values))?;
        Ok(view)
    }

    fn rows(&self, shape: &[usize], values: &[f32]) -> Result<Activation> {
        Ok(Activation::on_device(self.view(shape, values)?))
    }

    fn with_last(&self, x: &Activation, last: usize, values: &[f32]) -> Result<Activation> {
        let mut shape = x.shape().to_vec();
        *shape.last_mut().unwrap() = last;
        self.rows(&shape, values)
    }

    fn row_numbers(&self, rows: &RowIndex) -> Result<Vec<usize>> {
        let storage: &Arc<dyn Storage> = rows.storage().unwrap();
        let mut bytes = vec![0; 4 * rows.len()];
        let view = TensorView::new(Arc::clone(storage), DType::U8, &[bytes.len()])?;
        self.stream.read(&view, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()) as usize).collect())
    }
}

impl Dense for Views {
    fn name(&self) -> &'static str {
        "views"
    }
    fn load(&self, stored: &StoredWeight, purpose: WeightUse) -> Result<Arc<dyn Weight>> {
        Ok(Arc::new(Numbers {
            values: Arc::new(stored.to_f32()),
            width: stored.width(),
            transposed: purpose == WeightUse::ByHeadTransposed,
        }))
    }
    fn tied_head(&self, table: &dyn Weight, _: WeightFormat) -> Result<Arc<dyn Weight>> {
        let Numbers { values, width, .. } = numbers(table);
        Ok(Arc::new(Numbers { values: Arc::clone(values), width: *width, transposed: false }))
    }
    fn border(&self, _: &dyn Backend, extents: &BorderExtents) -> Result<Box<dyn Border>> {
        Ok(Box::new(Lent { steps: self.clone(), extents: *extents }))
    }
    fn index(&self, rows: Vec<u32>) -> Result<RowIndex> {
        let bytes: Vec<u8> = rows.iter().flat_map(|row| row.to_le_bytes()).collect();
        let view = self.allocate(DType::U8, &[bytes.len()])?;
        self.stream.write(&view, &bytes)?;
        Ok(RowIndex::on_device(Arc::clone(view.storage()), rows.len()))
    }
    fn embed(&self, table: &dyn Weight, tokens: &[u32], scale: f32) -> Result<Activation> {
        assert_eq!(scale, 1.0);
        let Numbers { values, width, .. } = numbers(table);
        let rows = tokens.iter().flat_map(|&token| &values[token as usize * width..][..*width]);
        self.rows(&[tokens.len(), *width], &rows.copied().collect::<Vec<_>>())
    }
    fn rms_norm(&self, x: &Activation, weight: &dyn Weight, eps: f64) -> Result<Activation> {
        let (mut values, weight) = (self.values(x)?, numbers(weight));
        for row in values.chunks_mut(weight.width) {
            let mean_square = row.iter().map(|x| f64::from(x * x)).sum::<f64>() / weight.width as f64;
            let norm = (1.0 / (mean_square + eps).sqrt()) as f32;
            row.iter_mut().zip(weight.values.iter()).for_each(|(x, w)| *x *= norm * w);
        }
        self.rows(x.shape(), &values)
    }
    fn project(&self, x: &Activation, matrix: &dyn Weight, bias: Option<&dyn Weight>) -> Result<Activation> {
        let (values, m) = (self.values(x)?, numbers(matrix));
        let mut y = Vec::new();
        for row in values.chunks(m.width) {
            let dot = |m: &[f32]| row.iter().zip(m).map(|(a, b)| a * b).sum::<f32>();
            let bias = bias.map_or(&[][..], |bias| numbers(bias).values.as_slice());
            let terms = bias.iter().copied().chain(std::iter::repeat(0.0));
            y.extend(m.values.chunks(m.width).zip(terms).map(|(m, b)| dot(m) + b));
        }
        self.with_last(x, m.values.len() / m.width, &y)
    }
    fn by_head(&self, x: &Activation, matrices: &dyn Weight) -> Result<Activation> {
        let (values, m) = (self.values(x)?, numbers(matrices));
        let (heads, a) = (x.shape()[1], x.shape()[2]);
        let b = m.values.len() / heads / a;
        let place = |head: usize, i: usize, j: usize| {
            if m.transposed { (head * b + j) * a + i } else { (head * a + i) * b + j }
        };
        let mut y = Vec::new();
        for (at, head) in values.chunks(a).enumerate() {
            let dot =
                |j| head.iter().enumerate().map(|(i, x)| x * m.values[place(at % heads, i, j)]).sum::<f32>();
            y.extend((0..b).map(dot));
        }
        self.with_last(x, b, &y)
    }
    fn gated(&self, activation: GateActivation, gate: &Activation, up: &Activation) -> Result<Activation> {
        assert_eq!(activation, GateActivation::Silu);
        let (a, b) = (self.values(gate)?, self.values(up)?);
        let y: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a / (1.0 + (-a).exp()) * b).collect();
        self.rows(gate.shape(), &y)
    }
    fn add(&self, x: &Activation, y: &Activation) -> Result<Activation> {
        let (a, b) = (self.values(x)?, self.values(y)?);
        self.rows(x.shape(), &a.iter().zip(&b).map(|(a, b)| a + b).collect::<Vec<_>>())
    }
    fn split_heads(&self, x: &Activation, dim: usize) -> Result<Activation> {
        let view = x.view().unwrap();
        let shape = [x.rows(), x.shape()[1] / dim, dim];
        Ok(Activation::on_device(TensorView::new(Arc::clone(view.storage()), DType::F32, &shape)?))
    }
    fn join_heads(&self, x: &Activation) -> Result<Activation> {
        let view = x.view().unwrap();
        let shape = [x.rows(), x.shape()[1] * x.shape()[2]];
        Ok(Activation::on_device(TensorView::new(Arc::clone(view.storage()), DType::F32, &shape)?))
    }
    fn columns(&self, x: &Activation, columns: Range<usize>) -> Result<Activation> {
        let (values, width) = (self.values(x)?, *x.shape().last().unwrap());
        let parts = values.chunks(width).flat_map(|row| row[columns.clone()].to_vec());
        self.with_last(x, columns.len(), &parts.collect::<Vec<_>>())
    }
    fn select(&self, x: &Activation, rows: &RowIndex) -> Result<Activation> {
        let (values, width) = (self.values(x)?, x.shape()[1..].iter().product::<usize>());
        let chosen =
            self.row_numbers(rows)?.into_iter().flat_map(|row| values[row * width..][..width].to_vec());
        let mut shape = x.shape().to_vec();
        shape[0] = rows.len();
        self.rows(&shape, &chosen.collect::<Vec<_>>())
    }
    fn zeros_like(&self, x: &Activation) -> Result<Activation> {
        self.rows(x.shape(), &vec![0.0; x.shape().iter().product()])
    }
    fn add_rows(
        &self,
        sum: &Activation,
        rows: &RowIndex,
        factors: Vec<f32>,
        y: &Activation,
    ) -> Result<Activation> {
        let (mut values, y, width) = (self.values(sum)?, self.values(y)?, sum.shape()[1]);
        for ((row, factor), y) in self.row_numbers(rows)?.into_iter().zip(factors).zip(y.chunks(width)) {
            values[row * width..][..width].iter_mut().zip(y).for_each(|(sum, y)| *sum += factor * y);
        }
        self.rows(sum.shape(), &values)
    }
    fn read(&self, x: &Activation, values: &mut Vec<f32>) -> Result<()> {
        let view = x.view().unwrap();
        values.resize(view.len(), 0.0);
        Ok(self.stream.read(view, bytemuck::cast_slice_mut(values))?)
    }
}

/// A border at which nothing is copied.
#[derive(Debug)]
struct Lent {
    steps: Views,
    extents: BorderExtents,
}

impl Border for Lent {
    fn rows(&self) -> usize {
        self.extents.rows
    }
    fn lend(&mut self, _: &dyn Stream, _: AttentionInput, rows: &Activation) -> Result<TensorView> {
        self.steps.stream.synchronize()?;
        Ok(rows.view().unwrap().clone())
    }
    fn lend_copy(
        &mut self,
        stream: &dyn Stream,
        input: AttentionInput,
        rows: &Activation,
    ) -> Result<TensorView> {
        let copy = self.steps.rows(rows.shape(), &self.steps.values(rows)?)?;
        self.lend(stream, input, &copy)
    }
    fn output(&mut self, _: &dyn Stream, rows: usize) -> Result<TensorView> {
        self.steps.allocate(DType::F32, &[rows, self.extents.heads, self.extents.v_dim])
    }
    fn take(&mut self, stream: &dyn Stream, output: TensorView) -> Result<Activation> {
        stream.synchronize()?;
        Ok(Activation::on_device(output))
    }
}

fn on_views(name: &str, backend: &Arc<CpuBackend>) -> Model {
    let steps = Arc::new(Views::new(backend));
    Model::with_dense(config(name), weights(name), WeightFormat::Stored, steps).unwrap()
}

/// Returns a new engine's answers to the same request, asked twice.
pub(crate) fn answer(
    model: Model,
    backend: Arc<dyn Backend>,
    keys: KeyForm,
    request: &Request,
) -> [Generation; 2] {
    let config = EngineConfig { block_size: 4, keys, ..EngineConfig::default() };
    let mut engine = Engine::new(model, backend, b"none", &config).unwrap();
    [(); 2].map(|()| engine.generate(request, &mut ()).unwrap())
}

#[rstest]
#[case("llama", "none")]
#[case("qwen2", "link:2")]
#[case("qwen3", "none")]
#[case("deepseek-v3", "none")]
#[case("deepseek-v3-plain", "none")]
#[case("llama", "blend:0.5@1:both")]
#[case("deepseek-v3", "blend:0.5@1:both")]
fn steps_in_the_memory_of_the_backend_answer_as_those_on_the_host(
    #[case] name: &str,
    #[case] strategy: &str,
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
    #[values(KeyForm::Rotated, KeyForm::Unrotated)] keys: KeyForm,
) {
    let request = Request {
        recompute: Arc::new(strategy.parse::<Recompute>().unwrap()),
        cell: ReuseCell::SEQUENTIAL_ALONE,
        max_new_tokens: 3,
        keep_logits: true,
        ..Request::new(PromptTokens::Chunked(Golden::load(name).prompt))
    };
    let backend = CpuBackend::with_execution(execution);
    let model = on_views(name, &backend);
    let host = load_model(name);
    assert_ne!(model.revision(), host.revision(), "what another implementation computes is another key's");
    assert_eq!(model.weight_bytes() - 4 * tied(&host), host.weight_bytes());
    let got = answer(model, backend.clone(), keys, &request);
    let expected = answer(host, CpuBackend::new(), keys, &request);
    for (got, expected) in got.iter().zip(&expected) {
        assert_eq!((&got.tokens, got.prefill_flops), (&expected.tokens, expected.prefill_flops));
        assert_eq!(got.recomputed_tokens, expected.recomputed_tokens);
        assert!(distance(&got.logits.concat(), &expected.logits.concat()) < 1e-4);
    }
    assert!(got[1].cached_tokens > 0, "chunks are hits");
}

/// Returns the number of elements that [`Views`] counts twice.
fn tied(host: &Model) -> usize {
    let c = host.config();
    if c.tied_head { c.vocab_size * c.hidden_size } else { 0 }
}
