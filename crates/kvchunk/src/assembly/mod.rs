//! Assembly: from a chunked prompt to the segments of a request, and what must be computed first.
//!
//! ```text
//!   assemble ──► inputs ──► [model] ──► is_ready? ──yes──► commit ──► AssembledPrompt
//!                  ▲                        │ no: another request computes a piece
//!                  └────────── advance ◄────┘ stores what was computed, waits, looks again
//! ```
//!
//! [`Assembler::assemble`] looks everything up and reserves room for what is missing. The caller runs *one*
//! forward pass over [`Assembly::inputs`], with its question in the same batch if it likes, and then
//! [commits](Assembly::commit). Dropping the assembly instead gives every block back: nothing partial can
//! ever be found.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::{BlockId, BlockKey, MutableBlocks, PagedKvCache, PrefixFill, Segment, SequenceInput};

use crate::cache::{ChunkCacheManager, ChunkKvCache, ChunkReservation, ChunkWaiter, TenantId};
use crate::config::{ComputeMode, ReuseCell};
use crate::error::Result;
use crate::hash::Evidence;
use crate::position::{ChunkPlace, PositionPlan, PositionReindexer, Stored};
use crate::prompt::ChunkedPrompt;
use crate::replica::ReplicaLink;

mod assembled;
mod ranks;
mod resolve;
mod rotated;
mod scratch;

pub use assembled::{AssembledPrompt, ChunkSpan, Recomputation};
pub use ranks::{LocalRank, RankAgreement};
pub use rotated::RotatedCopy;
pub use scratch::Scratch;

/// How prompts are assembled.
#[derive(Debug, Clone, Copy)]
pub struct Assembler<'a> {
    /// The cache of chunks, or `None` to compute everything anew, under the same mask.
    pub chunks: Option<&'a ChunkCacheManager>,
    /// Whose pieces they are.
    pub tenant: TenantId,
    /// The main cache: system prompts, and chunks that find no room.
    pub main: &'a PagedKvCache,
    /// Root of all keys.
    pub root: BlockKey,
    /// Whether system prompts are looked up in the main cache, and kept there.
    pub prefixes: bool,
    /// Strategy and mode.
    pub cell: ReuseCell,
    /// What places pieces, of the request's regime.
    pub reindexer: &'a PositionReindexer,
    /// The other ranks, if several compute the prompt together: a piece is a hit on all of them or on none.
    pub ranks: Option<&'a dyn RankAgreement>,
    /// The way to other replicas: what is missing here is pulled from one that has it, and computed only if none gives
    /// it. Pieces are pulled one by one, while others that miss them wait for this request. A hit here goes before a
    /// replica's, also an approximate one. Several ranks that compute a prompt together ask none.
    pub replicas: Option<&'a ReplicaLink>,
}

/// What happened to one chunk of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct ChunkReport {
    /// Its tokens.
    pub tokens: usize,
    /// Whether all of it was found in the cache, or is computed for an earlier chunk of the same prompt.
    pub hit: bool,
    /// Whether its bytes are exactly those of its hash; see [`ChunkKvCache::is_exact`].
    pub exact: bool,
    /// Position of its first token in this prompt.
    pub position: i64,
    /// Positions from where it is stored to where it is used.
    pub offset: i64,
}

/// Where a piece's KV is, or will be.
#[derive(Debug, Clone)]
enum Source {
    Cached(ChunkKvCache),
    /// To be computed into the chunk pool; index into [`Assembly::reserved`].
    Reserved(usize),
    /// Computed for this request only.
    Private,
}

/// A piece that has its blocks.
#[derive(Debug, Clone)]
struct Piece {
    blocks: Arc<[BlockId]>,
    len: usize,
    /// Position of its first key where it lies.
    stored_start: i64,
    source: Source,
}

impl Piece {
    fn stored(&self) -> Stored<'_> {
        Stored { blocks: &self.blocks, len: self.len, start: self.stored_start }
    }
}

/// A piece that this prompt computes, should it occur again in it.
#[derive(Debug)]
struct Own {
    evidence: Evidence,
    piece: Piece,
    exact: bool,
}

/// A chunk of the prompt.
#[derive(Debug)]
struct Chunk {
    place: ChunkPlace,
    /// Its first pieces; all of them once [`tokens`](Self::tokens) is the chunk's length.
    pieces: Vec<Piece>,
    /// Tokens of these pieces.
    tokens: usize,
    hit: bool,
    exact: bool,
}

impl Chunk {
    /// Pieces with the tokens before each.
    fn with_starts(&self) -> impl Iterator<Item = (usize, &Piece)> {
        self.pieces.iter().scan(0, |start, piece| {
            let before = *start;
            *start += piece.len;
            Some((before, piece))
        })
    }
}

/// A prompt whose parts are found or reserved.
#[derive(Debug)]
#[must_use = "compute its inputs and commit it; dropping it gives the blocks back"]
pub struct Assembly {
    block_size: usize,
    mode: ComputeMode,
    system: PrefixFill,
    chunks: Vec<Chunk>,
    /// Pieces that this prompt has reserved or computed itself, should they occur again in it.
    own: HashMap<BlockKey, Own>,
    reserved: Vec<ChunkReservation>,
    private: Vec<MutableBlocks>,
    /// Pieces that other requests compute.
    waiting: Vec<(BlockKey, ChunkWaiter)>,
    /// How long it has waited for such.
    waited: Duration,
    /// Those of them that it waits for no more.
    overdue: HashSet<BlockKey>,
    inputs: Vec<SequenceInput>,
    segments: Vec<Segment>,
    plan: PositionPlan,
    reused_tokens: usize,
}

impl Assembler<'_> {
    /// The system prompt, under the same chain as an ordinary prompt that begins with it. Ranks take as much of it from
    /// their caches as all have, and compute and keep the rest.
    fn fill_system(&self, tokens: &[u32]) -> Result<PrefixFill> {
        let root = self.prefixes.then_some(self.root);
        let filled = self.main.fill_prefix(root, tokens);
        let Some(ranks) = self.ranks else { return Ok(filled?) };
        let cached = filled.as_ref().map_or(0, PrefixFill::cached);
        let shared = ranks::shortest(ranks, cached, tokens.len())?;
        let filled = filled.and_then(|mut filled| {
            filled.take_at_most(shared)?;
            Ok(filled)
        });
        ranks::together(self.ranks, filled.map_err(Into::into))
    }

    /// Looks up and reserves everything that `prompt` needs.
    ///
    /// # Errors
    /// [`crate::Error::TooLong`], or [`kvcore::Error::OutOfBlocks`] when the main pool has no room for
    /// what the chunk pool does not take; what the agreement of [`ranks`](Self::ranks) gives,
    /// [`crate::Error::RankFailed`] where another rank has such an error. Nothing is held then, on any rank.
    pub fn assemble(&self, prompt: &ChunkedPrompt) -> Result<Assembly> {
        let plan = PositionPlan::new(prompt, self.cell, self.reindexer.max_positions())?;
        let system = self.fill_system(prompt.system())?;
        let chunk =
            |&place: &ChunkPlace| Chunk { place, pieces: Vec::new(), tokens: 0, hit: true, exact: true };
        let mut assembly = Assembly {
            block_size: self.main.arena().layout().shape().block_size,
            mode: self.cell.mode,
            reused_tokens: system.cached(),
            chunks: plan.chunks.iter().map(chunk).collect(),
            system,
            own: HashMap::new(),
            reserved: Vec::new(),
            private: Vec::new(),
            waiting: Vec::new(),
            waited: Duration::ZERO,
            overdue: HashSet::new(),
            inputs: Vec::new(),
            segments: Vec::new(),
            plan,
        };
        assembly.add_system(prompt.system());
        let resolved = self.resolve(&mut assembly, prompt);
        ranks::together(self.ranks, resolved)?;
        Ok(assembly)
    }
}

impl Assembly {
    fn add_system(&mut self, tokens: &[u32]) {
        let cached = self.system.cached();
        if cached < tokens.len() {
            self.inputs.push(SequenceInput::new(
                tokens[cached..].to_vec(),
                cached,
                cached as i64,
                self.system.slots().clone(),
                vec![self.system.segment()],
            ));
        }
    }

    /// Whether every piece is cached or among the inputs: then the question may be computed in the same
    /// batch, and [`commit`](Self::commit) follows. If not, another request computes a piece of this prompt
    /// at this moment: compute the inputs and [`advance`](Self::advance).
    pub fn is_ready(&self) -> bool {
        self.waiting.is_empty()
    }

    /// What must be computed now: the system prompt's rest and every missing piece, in one batch. Pieces
    /// see blocks that the same batch fills, which is in order: a layer's keys are all written before
    /// its attention reads.
    pub fn inputs(&self) -> &[SequenceInput] {
        &self.inputs
    }

    /// System prompt and chunks as the question sees them, once the assembly [is ready](Self::is_ready).
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Where everything stands.
    pub fn plan(&self) -> &PositionPlan {
        &self.plan
    }

    /// The chunks, in the prompt's order.
    pub fn chunks(&self) -> Vec<ChunkSpan> {
        let span = |(i, chunk): (usize, &Chunk)| ChunkSpan {
            tokens: chunk.place.len,
            logical_start: chunk.place.logical_start,
            position: chunk.place.used_start,
            is_full: i == 0
                && self.mode == ComputeMode::WithSystem
                && chunk.exact
                && chunk.place.offset() == 0,
        };
        self.chunks.iter().enumerate().map(span).collect()
    }

    /// What happened to each chunk, in the prompt's order.
    pub fn reports(&self) -> Vec<ChunkReport> {
        let report = |chunk: &Chunk| ChunkReport {
            tokens: chunk.place.len,
            hit: chunk.hit,
            exact: chunk.exact,
            position: chunk.place.used_start,
            offset: chunk.pieces.first().map_or(0, |piece| chunk.place.used_start - piece.stored_start),
        };
        self.chunks.iter().map(report).collect()
    }

    /// Tokens of system prompt and chunks that need not be computed.
    pub fn reused_tokens(&self) -> usize {
        self.reused_tokens
    }

    /// Declares the inputs computed, waits for the pieces that other requests compute, and looks again:
    /// for an assembly that is not ready. Afterwards there are new inputs, perhaps none.
    ///
    /// All waits of one assembly together take no longer than
    /// [`max_wait_ms`](crate::ChunkCacheConfig::max_wait_ms); what is not there then is among the new inputs, to be
    /// computed for this request alone.
    ///
    /// # Errors
    /// As [`Assembler::assemble`]; drop the assembly then.
    pub fn advance(&mut self, assembler: &Assembler<'_>, prompt: &ChunkedPrompt) -> Result<()> {
        self.inputs.clear();
        self.store();
        let limit = assembler.chunks.map_or(Duration::ZERO, |cache| cache.config().max_wait());
        let (since, left) = (Instant::now(), limit.saturating_sub(self.waited));
        for (key, waiter) in self.waiting.drain(..) {
            if !waiter.wait_for(left.saturating_sub(since.elapsed())) {
                self.overdue.insert(key);
            }
        }
        self.waited += since.elapsed();
        assembler.resolve(self, prompt)
    }

    /// Everything reserved has been computed: others can find it from now on.
    fn store(&mut self) {
        let stored: Vec<ChunkKvCache> = self.reserved.drain(..).map(ChunkReservation::store).collect();
        let pieces = self.chunks.iter_mut().flat_map(|chunk| &mut chunk.pieces);
        for piece in pieces.chain(self.own.values_mut().map(|own| &mut own.piece)) {
            if let Source::Reserved(i) = piece.source {
                piece.source = Source::Cached(stored[i].clone());
            }
        }
    }

    /// Declares all inputs computed: pieces and system prompt can be found from now on.
    ///
    /// # Errors
    /// [`crate::Error::NotReady`] for an assembly that still waits for others.
    pub fn commit(mut self) -> Result<AssembledPrompt> {
        if !self.is_ready() {
            return Err(crate::Error::NotReady { pieces: self.waiting.len() });
        }
        self.store();
        AssembledPrompt::new(self)
    }
}
