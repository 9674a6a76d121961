//! A small laboratory: a golden model, its caches, and passes that keep all logits.

use std::path::PathBuf;
use std::sync::Arc;

use kvbackend_cpu::{CpuBackend, Execution};
use kvchunk::{
    ArenaSleep, AssembledPrompt, Assembler, ChunkBlockPool, ChunkCacheConfig, ChunkCacheManager, ChunkReport,
    ChunkedPrompt, ComputeMode, HashAlgorithm, PositionPlan, PositionReindexer, PositionStrategy, ReuseCell,
    SleepForm, SleepStore, TenantKeys,
};
use kvcore::{
    Backend, BlockId, BlockKey, BlockPool, DType, Gather, KeyForm, KeyScope, KvArena, KvFormat, KvLayout,
    KvPlane, LayerRopes, Logits, MemoryKind, PagedKvCache, RankInfo, Segment, SequenceId, SequenceInput,
    SequenceStart, Stream, SystemClock, allocate_tensor,
};
use kvmodel::{ComputeDevice, Model, ModelConfig, Profiler, WeightFormat, Weights};
use safetensors::SafeTensors;

/// Defines `rstest` tests whose arguments may also be
/// - `name: every model`: each family and each kind of rotary embedding,
/// - `cell: every cell`,
/// - `cell: moving cell`: the cells whose chunks may move,
/// - `cell: sequential cell`: the cells in which no two chunks have the same positions.
macro_rules! for_every {
    (@ $head:tt ($($done:tt)*) ($name:ident: every model $($more:tt)*) $body:block) => {
        for_every! { @ $head ($($done)* #[values(
            "llama", "llama3", "llama-yarn", "llama-linear", "llama-ntk", "llama-dynamic", "llama-longrope",
            "llama-partial", "mistral", "qwen2", "qwen2-layers", "qwen3", "gemma3", "deepseek-v3",
            "deepseek-v3-plain"
        )] $name: &str) ($($more)*) $body }
    };
    (@ $head:tt ($($done:tt)*) ($cell:ident: every cell $($more:tt)*) $body:block) => {
        for_every! { @ $head ($($done)* #[values(
            ReuseCell::OVERLAPPED_WITH_SYSTEM, ReuseCell::OVERLAPPED_ALONE,
            ReuseCell::SEQUENTIAL_ALONE, ReuseCell::SEQUENTIAL_WITH_SYSTEM,
            ReuseCell::ABSOLUTE_WITH_SYSTEM, ReuseCell::ABSOLUTE_ALONE
        )] $cell: ReuseCell) ($($more)*) $body }
    };
    (@ $head:tt ($($done:tt)*) ($cell:ident: moving cell $($more:tt)*) $body:block) => {
        for_every! { @ $head ($($done)* #[values(
            ReuseCell::OVERLAPPED_WITH_SYSTEM, ReuseCell::OVERLAPPED_ALONE,
            ReuseCell::SEQUENTIAL_ALONE, ReuseCell::SEQUENTIAL_WITH_SYSTEM
        )] $cell: ReuseCell) ($($more)*) $body }
    };
    (@ $head:tt ($($done:tt)*) ($cell:ident: sequential cell $($more:tt)*) $body:block) => {
        for_every! { @ $head ($($done)* #[values(
            ReuseCell::SEQUENTIAL_ALONE, ReuseCell::SEQUENTIAL_WITH_SYSTEM,
            ReuseCell::ABSOLUTE_WITH_SYSTEM, ReuseCell::ABSOLUTE_ALONE
        )] $cell: ReuseCell) ($($more)*) $body }
    };
    (@ $head:tt ($($done:tt)*) ($next:tt $($more:tt)*) $body:block) => {
        for_every! { @ $head ($($done)* $next) ($($more)*) $body }
    };
    (@ [$($head:tt)*] $arguments:tt () $body:block) => {
        #[rstest::rstest]
        $($head)* $arguments $body
    };
    ($($(#$attribute:tt)* fn $test:ident $arguments:tt $body:block)+) => {
        $(for_every! { @ [$(#$attribute)* fn $test] () $arguments $body })+
    };
}
pub(crate) use for_every;

/// Returns the folder of a golden model.
pub(crate) fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../kvmodel/tests/goldens").join(name)
}

/// The results of transformers; see `proof/goldens/models/make.py`.
pub(crate) struct Golden {
    bytes: Vec<u8>,
    pub(crate) prompt: ChunkedPrompt,
}

impl Golden {
    pub(crate) fn load(name: &str) -> Self {
        let bytes = std::fs::read(folder(name).join("golden.safetensors")).expect("a golden file");
        let mut golden =
            Self { bytes, prompt: ChunkedPrompt::new(vec![0], vec![vec![0]], vec![0]).expect("parts") };
        let chunks = (0..3).map(|i| golden.ids(&format!("chunk{i}"))).collect();
        let (system, question) = (golden.ids("system"), golden.ids("question"));
        golden.prompt = ChunkedPrompt::new(system, chunks, question).expect("parts");
        golden
    }

    /// Loads the results for chunks that are computed behind decoys; see `proof/goldens/models/decoys.py`.
    pub(crate) fn behind_decoys(name: &str) -> Self {
        let Self { prompt, .. } = Self::load(name);
        let bytes = std::fs::read(folder(name).join("decoys.safetensors")).expect("a golden file");
        let mut golden = Self { bytes, prompt };
        let decoys = (0..5).map(|i| golden.ids(&format!("decoy{i}"))).collect();
        golden.prompt = golden.prompt.with_decoys(decoys).expect("decoys");
        golden
    }

    /// Returns logits, row after row.
    pub(crate) fn logits(&self, name: &str) -> Vec<f32> {
        self.numbers(name, f32::from_le_bytes)
    }

    /// Returns integers.
    pub(crate) fn ids(&self, name: &str) -> Vec<u32> {
        self.numbers(name, u32::from_le_bytes)
    }

    fn numbers<T>(&self, name: &str, of: fn([u8; 4]) -> T) -> Vec<T> {
        let file = SafeTensors::deserialize(&self.bytes).expect("safetensors");
        let data = file.tensor(name).expect(name).data().to_vec();
        data.chunks_exact(4).map(|b| of(b.try_into().expect("four bytes"))).collect()
    }

    /// Returns transformers' own errors with a cache of this kind (`f16`, `int8:4`, `bf16_unrotated`, …)
    /// under the mask of `name`: for each row of the question, the largest difference in its logits.
    pub(crate) fn own_errors(&self, cache: &str, name: &str) -> Vec<f32> {
        let errors = self.logits(&format!("error_{cache}.{name}"));
        assert!(errors.len() == self.prompt.question().len() && errors.iter().all(|error| *error > 1e-6));
        errors
    }

    /// Returns the largest of [`own_errors`](Self::own_errors), over the rows that a [`Run`] has logits for.
    pub(crate) fn own_error(&self, cache: &str, cell: ReuseCell) -> f32 {
        self.own_errors(cache, errors_of(cell)).into_iter().fold(0.0, f32::max)
    }
}

pub(crate) fn config(name: &str) -> ModelConfig {
    let config = std::fs::read_to_string(folder(name).join("config.json")).expect("a config");
    ModelConfig::from_json(&config).expect("a config")
}

pub(crate) fn weights(name: &str) -> Weights {
    Weights::from_directory(&folder(name), &mut |_, _| ()).expect("weights")
}

pub(crate) fn load_model(name: &str) -> Model {
    model(name, name)
}

/// Creates a model from a configuration and a golden's weights. No token ends its answers.
pub(crate) fn endless(config: ModelConfig, name: &str) -> Model {
    let config = ModelConfig { eos: Vec::new(), ..config };
    Model::new(config, weights(name), WeightFormat::Stored).expect("a model")
}

/// The settings of a laboratory.
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) format: KvFormat,
    pub(crate) keys: KeyForm,
    pub(crate) max_chunk_tokens: usize,
    pub(crate) chunk_blocks: u32,
    pub(crate) execution: Execution,
    pub(crate) cross_system_reuse: bool,
    pub(crate) hash: HashAlgorithm,
    /// The form in which chunks can sleep.
    pub(crate) sleep: Option<SleepForm>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            format: KvFormat::Dense(DType::F32),
            keys: KeyForm::Rotated,
            max_chunk_tokens: 4096,
            chunk_blocks: 32,
            execution: Execution::Immediate,
            cross_system_reuse: false,
            hash: HashAlgorithm::default(),
            sleep: None,
        }
    }
}

pub(crate) struct Lab {
    pub(crate) model: Model,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) stream: Arc<dyn Stream>,
    pub(crate) main: PagedKvCache,
    pub(crate) chunks: ChunkCacheManager,
    pub(crate) scope: KeyScope,
    pub(crate) keys: KeyForm,
    pub(crate) profiler: Profiler,
}

/// An answered prompt: its question's logits, and the chunks that it still holds.
pub(crate) struct Run {
    pub(crate) logits: Vec<f32>,
    pub(crate) reports: Vec<ChunkReport>,
    pub(crate) held: AssembledPrompt,
    pub(crate) reused: usize,
}

impl Lab {
    /// Returns a golden with a laboratory of its model.
    pub(crate) fn golden(name: &str, setup: Setup) -> (Golden, Self) {
        (Golden::load(name), Self::new(name, setup))
    }

    pub(crate) fn new(name: &str, setup: Setup) -> Self {
        let model = load_model(name);
        let backend: Arc<dyn Backend> = CpuBackend::with_execution(setup.execution);
        // Blocks have 4 tokens, so chunks of 4, 7 and 9 tokens end at the end of a block or inside one.
        let num_blocks = 64 + setup.chunk_blocks as usize;
        let shape = model.kv_extents(setup.format).shape(&RankInfo::default(), num_blocks, 4);
        let layout = Arc::new(KvLayout::new(shape.expect("a shape")).expect("a layout"));
        let arena = KvArena::allocate(backend.as_ref(), MemoryKind::Device, layout).expect("memory");
        let stream = backend.stream().expect("a stream");
        let sleep = setup.sleep.map(|form| -> Arc<dyn SleepStore> {
            let (backend, stream) = (Arc::clone(&backend), Arc::clone(&stream));
            Arc::new(ArenaSleep::new(backend, arena.clone(), stream, form, 1 << 20).expect("a place"))
        });
        let main = PagedKvCache::new(arena, BlockPool::new(0..64).expect("a pool")).expect("a cache");
        let config = ChunkCacheConfig {
            max_chunk_tokens: setup.max_chunk_tokens,
            cross_system_reuse: setup.cross_system_reuse,
            hash_algorithm: setup.hash,
            ..ChunkCacheConfig::default()
        };
        let pool = ChunkBlockPool::new(64..64 + setup.chunk_blocks, 4).expect("a pool");
        let clock = Arc::new(SystemClock::default());
        let chunks = ChunkCacheManager::build(config, pool, sleep, clock).expect("a cache");
        let (keys, scope) = (setup.keys, KeyScope::new(name, model.revision()).keys(setup.keys));
        Self { model, backend, stream, main, chunks, scope, keys, profiler: Profiler::disabled() }
    }

    /// Returns the rotary embeddings for a request that reaches `longest` positions, and the root of its
    /// keys.
    pub(crate) fn regime(&self, longest: usize) -> (LayerRopes, BlockKey) {
        let ropes = self.model.ropes(longest).expect("a regime");
        let root = self.scope.clone().ropes(&ropes).root();
        (ropes, root)
    }

    pub(crate) fn forward(&self, ropes: &LayerRopes, batch: &[SequenceInput]) -> Vec<Vec<f32>> {
        self.forward_on(self.stream.as_ref(), ropes, batch)
    }

    /// Runs a forward pass on a separate stream, so several threads can run passes.
    pub(crate) fn forward_on(
        &self,
        stream: &dyn Stream,
        ropes: &LayerRopes,
        batch: &[SequenceInput],
    ) -> Vec<Vec<f32>> {
        let device = ComputeDevice {
            backend: self.backend.as_ref(),
            stream,
            arenas: std::slice::from_ref(self.main.arena()),
            keys: self.keys,
            profiler: &self.profiler,
        };
        let pass = self.model.forward(&device, ropes, batch, &mut ()).expect("a forward pass");
        let Some(logits) = &pass.logits else { return Vec::new() };
        let vocabulary = logits.vocabulary();
        let mut left = logits.values().to_vec();
        let rows = |sequence: &SequenceInput| match sequence.logits {
            Logits::None => 0,
            Logits::Last => 1,
            Logits::All => sequence.tokens.len(),
        };
        let wanted = batch.iter().map(rows).filter(|&rows| rows > 0);
        wanted.map(|rows| left.drain(..rows * vocabulary).collect()).collect()
    }

    pub(crate) fn assembler<'a>(
        &'a self,
        root: BlockKey,
        cell: ReuseCell,
        reindexer: &'a PositionReindexer,
    ) -> Assembler<'a> {
        let (chunks, tenant) = (Some(&self.chunks), TenantKeys::shared(root));
        Assembler {
            chunks,
            tenant,
            main: self.main.kv_pool().clone(),
            prefixes: true,
            cell,
            reindexer,
            ranks: None,
            replicas: None,
            tier: None,
            fetched: None,
        }
    }

    /// Returns the logits of every token of an ordinary prompt.
    pub(crate) fn plain(&mut self, tokens: &[u32]) -> Vec<f32> {
        let (id, input) = self.after(tokens, SequenceStart::default(), Vec::new());
        let logits = self.forward(&self.regime(tokens.len()).0, &[input]).remove(0);
        self.main.free(id).expect("a sequence");
        logits
    }

    /// Creates a sequence of tokens after shared segments, and their input, which wants all logits.
    pub(crate) fn after(
        &mut self,
        tokens: &[u32],
        start: SequenceStart,
        mut segments: Vec<Segment>,
    ) -> (SequenceId, SequenceInput) {
        let id = self.main.create(start).expect("a sequence");
        let slots = self.main.grow(id, tokens.len()).expect("room");
        segments.push(self.main.segment(id).expect("a segment"));
        let input = SequenceInput::new(tokens.to_vec(), start.logical, start.position, slots, segments);
        (id, input.with_logits(Logits::All))
    }

    /// Runs a chunked prompt without generating tokens, and keeps its holds.
    pub(crate) fn run(&mut self, prompt: &ChunkedPrompt, cell: ReuseCell, reuse: bool) -> Run {
        self.run_and_generate(prompt, cell, reuse, 0)
    }

    /// Runs a chunked prompt as [`run`](Self::run) does, for a request that might reach `more` positions
    /// after its question.
    pub(crate) fn run_and_generate(
        &mut self,
        prompt: &ChunkedPrompt,
        cell: ReuseCell,
        reuse: bool,
        more: usize,
    ) -> Run {
        let max_positions = self.model.config().max_positions;
        let plan = PositionPlan::new(prompt, cell, max_positions).expect("a plan");
        let (ropes, root) = self.regime(plan.question_position as usize + prompt.question().len() + more);
        let reindexer = PositionReindexer::for_layers(&ropes);
        let assembler = self.assembler(root, cell, &reindexer);
        let assembler =
            Assembler { chunks: assembler.chunks.filter(|_| reuse), prefixes: reuse, ..assembler };
        let assembly = assembler.assemble(prompt).expect("an assembly");
        let (logical, position) = (assembly.plan().question_logical, assembly.plan().question_position);
        let (mut batch, segments) = (assembly.inputs().to_vec(), assembly.segments().to_vec());
        let (reports, reused) = (assembly.reports(), assembly.reused_tokens());
        let start = SequenceStart { logical, position };
        let (own, question) = self.after(prompt.question(), start, segments);
        batch.push(question);
        let logits = self.forward(&ropes, &batch).pop().expect("logits");
        let held = assembly.commit().expect("a commit");
        self.main.free(own).expect("a sequence");
        Run { logits, reports, held, reused }
    }

    /// Returns the K and V bytes of whole blocks in every layer. For a quantised cache, returns the
    /// dequantised rows.
    pub(crate) fn bytes(&self, blocks: &[BlockId]) -> Vec<u8> {
        let shape = self.main.arena().layout().shape().clone();
        let slots: Arc<[i64]> =
            blocks.iter().flat_map(|b| (0..4).map(move |i| i64::from(b.0) * 4 + i)).collect();
        let dtype = match shape.format {
            KvFormat::Dense(dtype) => dtype,
            _ => DType::F32,
        };
        let mut all = Vec::new();
        for layer in 0..shape.num_layers {
            let rows = |plane: KvPlane| {
                allocate_tensor(
                    self.backend.as_ref(),
                    MemoryKind::Device,
                    dtype,
                    &[slots.len(), plane.heads, plane.dim],
                )
                .expect("memory")
            };
            let arena = self.main.arena().clone();
            let (k, v) = (rows(arena.k_plane()), rows(arena.v_plane()));
            let op = Gather {
                arena,
                layer,
                slots: Arc::clone(&slots),
                k: k.clone(),
                v: v.clone(),
                rotation: None,
            };
            self.stream.gather(&op).expect("a gather");
            for view in [k, v] {
                let mut bytes = vec![0; view.dtype().bytes_for(view.len()).expect("a size")];
                self.stream.read(&view, &mut bytes).expect("a read");
                all.extend(bytes);
            }
        }
        all
    }

    /// Checks that everything except cached blocks is free, and that the pools are consistent.
    pub(crate) fn assert_nothing_held(&self) {
        self.chunks.check_invariants().expect("a consistent cache");
        for pool in [self.main.pool(), self.chunks.pool().blocks()] {
            pool.check_invariants().expect("consistent pools");
            let counts = pool.counts();
            assert_eq!(counts.free + counts.cached, counts.total, "{counts:?}");
        }
    }
}

/// The maximum ratio of a format's errors to transformers' errors. Both round the same numbers, but sums in
/// a different order make some numbers round the other way.
pub(crate) const OWN_ERRORS: f32 = 1.5;

/// Returns the largest difference between two lists of numbers.
pub(crate) fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    // NaN counts as further away than any number.
    a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}

/// Returns the prompt with its chunks in another order and another question of equal length.
pub(crate) fn reordered(prompt: &ChunkedPrompt) -> ChunkedPrompt {
    let mut chunks = prompt.chunks().to_vec();
    chunks.rotate_left(1);
    let question = (1..=prompt.question().len() as u32).collect();
    let reordered = ChunkedPrompt::new(prompt.system().to_vec(), chunks, question).expect("parts");
    reordered.with_decoys(Arc::clone(prompt.decoys())).expect("decoys")
}

/// Returns the name under which the goldens have a cell's errors. In an absolute cell, keys are rounded at
/// the positions where they are used.
pub(crate) fn errors_of(cell: ReuseCell) -> &'static str {
    let absolute = cell.strategy == PositionStrategy::Absolute && cell.mode == ComputeMode::Alone;
    if absolute { "absolute_alone" } else { golden_name(cell) }
}

/// Returns the name under which the goldens have the errors of full attention at a cell's positions, with
/// chunks stored as the cell stores them.
pub(crate) fn full_of(cell: ReuseCell) -> String {
    match cell.strategy {
        PositionStrategy::Absolute => "full".to_owned(),
        PositionStrategy::Overlapped | PositionStrategy::Sequential => format!("full.{}", golden_name(cell)),
    }
}

/// Returns the name of a cell.
pub(crate) fn cell_name(cell: ReuseCell) -> String {
    format!("{:?}, {:?}", cell.strategy, cell.mode)
}

/// Returns the name of the golden that a cell's logits must equal: one pass, or two phases.
pub(crate) fn golden_name(cell: ReuseCell) -> &'static str {
    use ComputeMode::{Alone, Behind, Slots, WithSystem};
    use PositionStrategy::{Absolute, Overlapped, Sequential};
    match (cell.strategy, cell.mode) {
        (Overlapped, WithSystem) => "overlapped_with_system",
        (Overlapped, Alone) => "overlapped_alone",
        (Sequential | Absolute, Alone) => "sequential_alone",
        (Sequential, WithSystem) => "sequential_with_system_two_phase",
        (Absolute, WithSystem) => "sequential_with_system_single",
        (Overlapped, Behind(_)) => "overlapped_behind",
        (Sequential, Behind(_)) => "sequential_behind_two_phase",
        (Absolute, Behind(_)) => "absolute_behind",
        (Overlapped, Slots(_)) => "overlapped_slots",
        (Sequential, Slots(_)) => "sequential_slots_two_phase",
        (Absolute, Slots(_)) => "absolute_slots",
        (_, ComputeMode::Sink(_)) => panic!("no golden is of a sink"),
    }
}

/// Creates a model from one golden's configuration and another's weights.
pub(crate) fn model(of_config: &str, of_weights: &str) -> Model {
    Model::new(config(of_config), weights(of_weights), WeightFormat::Stored).expect("a model")
}
