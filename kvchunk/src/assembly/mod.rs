//! Assembly turns a chunked prompt into a request's segments, and into the inputs that must be computed
//! first.
//!
//! ```text
//!   assemble ──► inputs ──► [model] ──► is_ready? ──yes──► commit ──► AssembledPrompt
//!                  ▲                        │ no: another request computes a piece
//!                  └────────── advance ◄────┘ stores what was computed, waits, looks again (try_advance: without the wait)
//! ```
//!
//! [`Assembler::assemble`] looks up every part and reserves room for the missing parts. The caller runs *one*
//! forward pass over [`Assembly::inputs`], optionally with its question in the same batch, and then
//! [commits](Assembly::commit). Dropping the assembly instead frees every block, so partial results can never
//! be found.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcore::{BlockId, BlockKey, KvPool, MutableBlocks, Segment, SequenceInput};

use crate::cache::{
    ChunkCacheManager, ChunkReservation, ChunkWaiter, PieceHold, SystemFill, SystemFlight, TenantKeys,
};
use crate::config::{ComputeMode, ReuseCell};
use crate::error::Result;
use crate::hash::PieceEvidence;
use crate::position::{ChunkPlace, PositionPlan, PositionReindexer, Stored};
use crate::prefix::{PrefixFill, SealedPrefix};
use crate::prompt::ChunkedPrompt;
use crate::ranks::{RankAgreement, RankLookup};
use crate::recompute::ChunkSpan;
use crate::replica::{ReplicaLink, ReplicaLookup};
use crate::tier::{MissReason, TierFetch, TierLink, TierLookup, TierSaving};

mod assembled;
mod lookup;
mod pin;
mod question;
mod resolve;
mod rotated;
mod scratch;
mod slots;

pub use assembled::{AssembledPrompt, Recomputation};
pub(crate) use lookup::{FoundPiece, LocalLookup, PromptLookup};
pub use pin::PinnedParts;
pub use question::recomputed_root;
pub use rotated::RotatedCopy;
pub use scratch::ScratchBlocks;

/// The settings for assembling a prompt.
#[derive(Debug, Clone)]
pub struct Assembler<'a> {
    /// The chunk cache, or `None` to compute everything from scratch with the same mask.
    pub chunks: Option<&'a ChunkCacheManager>,
    /// The tenant that the pieces belong to, and the root of its keys.
    pub tenant: TenantKeys,
    /// The main pool, for system prompts and for chunks that do not fit in the chunk pool.
    pub main: KvPool,
    /// True to look up system prompts in the main cache, and keep them there.
    pub prefixes: bool,
    /// The compute mode and position strategy.
    pub cell: ReuseCell,
    /// The reindexer that places pieces. It must belong to the request's RoPE regime.
    pub reindexer: &'a PositionReindexer,
    /// The agreement with the other ranks, if several ranks compute the prompt together. A piece is a hit on
    /// all ranks or on none.
    pub ranks: Option<&'a dyn RankAgreement>,
    /// The link to other replicas. A missing piece is fetched from a replica that has it, and computed only
    /// if no replica supplies it. Pieces are fetched one by one, and other requests that need the same pieces
    /// wait for this request. A local hit takes precedence over a hit in a replica, even if the local hit is
    /// approximate. If [`ranks`](Self::ranks) is set, replicas are not asked.
    pub replicas: Option<&'a ReplicaLink>,
    /// The disk to which computed parts are saved. If [`ranks`](Self::ranks) is set, the disk is not used.
    pub tier: Option<&'a TierLink>,
    /// What [`fetch`](Self::fetch) has brought from the disk for this prompt. It is used for parts that are
    /// neither here nor in a replica.
    pub fetched: Option<&'a TierFetch>,
}

/// The report on one chunk of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct ChunkReport {
    /// The number of tokens in the chunk.
    pub tokens: usize,
    /// True if the whole chunk was found in the cache, or its pieces are already being computed for an
    /// earlier chunk of the same prompt.
    pub hit: bool,
    /// True if the chunk's bytes are exactly what its hash describes; see [`PieceHold::is_exact`].
    pub exact: bool,
    /// The position of the chunk's first token in this prompt.
    pub position: i64,
    /// The distance from the stored position to the position where the chunk is used.
    pub offset: i64,
    /// The reason why the first piece that had to be computed was not found. `None` without a chunk cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missed: Option<MissReason>,
}

/// The source of a piece's KV.
#[derive(Debug, Clone)]
enum PieceSource {
    Cached(PieceHold),
    /// The piece is to be computed into the chunk pool. Contains an index into [`Assembly::reserved`].
    Reserved(usize),
    /// The piece is computed only for this request.
    Private,
}

/// A piece that already has its blocks.
#[derive(Debug, Clone)]
struct PromptPiece {
    blocks: Arc<[BlockId]>,
    len: usize,
    /// The position that the first key in these blocks is rotated to.
    stored_start: i64,
    source: PieceSource,
}

impl PromptPiece {
    fn stored(&self) -> Stored<'_> {
        Stored { blocks: &self.blocks, len: self.len, start: self.stored_start }
    }
}

/// A piece that this prompt computes. It is recorded in case the prompt contains the piece again.
#[derive(Debug)]
struct OwnPiece {
    evidence: PieceEvidence,
    piece: PromptPiece,
    exact: bool,
}

/// A chunk of the prompt.
#[derive(Debug)]
struct PromptChunk {
    place: ChunkPlace,
    /// The chunk's first pieces, as far as they have blocks. All pieces have blocks once
    /// [`tokens`](Self::tokens) is the chunk's length.
    pieces: Vec<PromptPiece>,
    /// The number of tokens in [`pieces`](Self::pieces).
    tokens: usize,
    hit: bool,
    exact: bool,
    missed: Option<MissReason>,
}

impl PromptChunk {
    /// Returns the pieces, each with the number of the chunk's tokens before it.
    fn with_starts(&self) -> impl Iterator<Item = (usize, &PromptPiece)> {
        self.pieces.iter().scan(0, |start, piece| {
            let before = *start;
            *start += piece.len;
            Some((before, piece))
        })
    }
}

/// The system prompt of an assembly.
#[derive(Debug)]
enum SystemPart {
    /// Not looked up yet, or being computed by another request.
    Missing,
    /// Found in part. Blocks have been allocated for the missing part.
    Filling(Box<SystemFill>),
    /// Complete. Other requests can find it.
    Sealed(SealedPrefix),
}

impl SystemPart {
    /// Returns the system prompt as a segment, or `None` while it is missing.
    fn segment(&self) -> Option<Segment> {
        match self {
            Self::Missing => None,
            Self::Filling(fill) => Some(fill.prefix.segment()),
            Self::Sealed(sealed) => Some(sealed.segment()),
        }
    }

    /// Stores the prefix, whose missing part must have been computed. Returns the flight that other requests
    /// wait for, if there is one.
    fn store(&mut self) -> Result<Option<SystemFlight>> {
        Ok(match std::mem::replace(self, Self::Missing) {
            Self::Filling(fill) => {
                // If another request has computed the same prefix in the meantime, its blocks are kept.
                *self = Self::Sealed(fill.prefix.finish()?);
                fill.flight
            }
            other => {
                *self = other;
                None
            }
        })
    }
}

/// A prompt whose parts have been found or reserved.
#[derive(Debug)]
#[must_use = "compute its inputs and commit it; dropping it gives the blocks back"]
pub struct Assembly {
    block_size: usize,
    mode: ComputeMode,
    system: SystemPart,
    /// The system prompt followed by the decoys that missing pieces see. Looked up only if a piece is
    /// missing.
    decoys: SystemPart,
    /// True if the mode has decoys.
    has_decoys: bool,
    /// The number of tokens in the system prompt.
    system_len: usize,
    chunks: Vec<PromptChunk>,
    /// The pieces that this prompt has reserved or computed itself, in case the prompt contains them again.
    own: HashMap<BlockKey, OwnPiece>,
    reserved: Vec<ChunkReservation>,
    /// The disk to which the computed pieces are saved.
    saving: Option<TierSaving>,
    private: Vec<MutableBlocks>,
    /// The parts that other requests are computing: pieces, or only the system prompt.
    waiting: Vec<(BlockKey, ChunkWaiter)>,
    /// The total time that this request has waited for other requests.
    waited: Duration,
    /// The keys of the parts that this request no longer waits for.
    overdue: HashSet<BlockKey>,
    inputs: Vec<SequenceInput>,
    /// The segments as the question sees them. Empty until the assembly is ready.
    segments: Arc<[Segment]>,
    plan: PositionPlan,
    reused_tokens: usize,
}

impl Assembler<'_> {
    /// Returns the disk to which computed pieces are saved, with the cache that will contain them.
    fn saving(&self) -> Option<TierSaving> {
        let (link, cache) = self.tier.zip(self.chunks).filter(|_| self.ranks.is_none())?;
        Some(TierSaving { link: link.clone(), cache: cache.clone(), tenant: self.tenant.id() })
    }

    /// Returns the lookup that matches this assembler's settings.
    fn lookup(&self) -> Box<dyn PromptLookup + '_> {
        let TenantKeys { id: tenant, root } = self.tenant;
        let system_root = self.prefixes.then_some(root);
        let local = LocalLookup { chunks: self.chunks, tenant, main: &self.main, system_root };
        let above: Box<dyn PromptLookup> = match (self.ranks, self.replicas) {
            (Some(ranks), _) => return Box::new(RankLookup { local, ranks }),
            (None, Some(link)) => Box::new(ReplicaLookup { local, link }),
            (None, None) => Box::new(local),
        };
        match self.tier.zip(self.fetched) {
            Some((link, fetched)) => Box::new(TierLookup { above, link, fetched }),
            None => above,
        }
    }

    /// Looks up and reserves everything that `prompt` needs.
    ///
    /// # Errors
    /// If there is an error, nothing stays held on any rank.
    ///
    /// - Returns [`crate::Error::TooLong`] if the model does not support one of the positions.
    /// - Returns [`kvcore::Error::OutOfBlocks`] if the main pool has no room for the system prompt, or for
    ///   pieces that do not fit in the chunk pool.
    /// - Returns [`crate::Error::RankFailed`] if another rank has an error.
    /// - Returns the errors of the agreement in [`ranks`](Self::ranks).
    pub fn assemble(&self, prompt: &ChunkedPrompt) -> Result<Assembly> {
        self.assemble_at(prompt, PositionPlan::new(prompt, self.cell, self.reindexer.max_positions())?)
    }

    /// Looks up and reserves everything that `prompt` needs, like [`assemble`](Self::assemble), but at the
    /// positions of an existing plan. An engine needs the plan before it has the reindexer, because the
    /// highest position determines the regime of the rotary embeddings.
    ///
    /// `plan` must have been made for this prompt and this [`cell`](Self::cell).
    ///
    /// # Errors
    /// Returns the errors of [`assemble`](Self::assemble).
    pub fn assemble_at(&self, prompt: &ChunkedPrompt, plan: PositionPlan) -> Result<Assembly> {
        plan.check(self.reindexer.max_positions())?;
        let plan = self.in_slots(prompt, plan)?;
        let lookup = self.lookup();
        let chunk = |&place: &ChunkPlace| PromptChunk {
            place,
            pieces: Vec::new(),
            tokens: 0,
            hit: true,
            exact: true,
            missed: None,
        };
        let mut assembly = Assembly {
            block_size: self.main.block_size(),
            mode: self.cell.mode,
            reused_tokens: 0,
            chunks: plan.chunks.iter().map(chunk).collect(),
            system: SystemPart::Missing,
            decoys: SystemPart::Missing,
            has_decoys: !prompt.decoys_in(self.cell.mode)?.is_empty(),
            system_len: prompt.system().len(),
            own: HashMap::new(),
            reserved: Vec::new(),
            saving: self.saving(),
            private: Vec::new(),
            waiting: Vec::new(),
            waited: Duration::ZERO,
            overdue: HashSet::new(),
            inputs: Vec::new(),
            segments: Arc::default(),
            plan,
        };
        let holds = self.put_prefixes(prompt);
        let resolved = holds.and_then(|_holds| self.resolve(lookup.as_ref(), &mut assembly, prompt));
        lookup.conclude(resolved)?;
        Ok(assembly)
    }
}

impl Assembly {
    /// Adds the missing part of a prefix to the inputs.
    fn add_prefix(&mut self, tokens: &[u32], prefix: &PrefixFill) {
        let cached = prefix.cached();
        if cached < tokens.len() {
            self.inputs.push(SequenceInput::new(
                tokens[cached..].to_vec(),
                cached,
                cached as i64,
                prefix.slots().clone(),
                vec![prefix.segment()],
            ));
        }
    }

    /// Returns whether every part of the prompt is cached or in the inputs. If so, compute the inputs,
    /// optionally with the question in the same batch, and call [`commit`](Self::commit). Otherwise, another
    /// request is computing a part of this prompt: compute the inputs, and call
    /// [`try_advance`](Self::try_advance) or [`advance`](Self::advance).
    pub fn is_ready(&self) -> bool {
        // After a failed lookup there are no segments.
        self.waiting.is_empty() && !self.segments.is_empty()
    }

    /// Returns the inputs to compute now, in one batch: the missing part of the system prompt, and the
    /// missing pieces that no other request is computing. Pieces may see blocks that the same batch fills.
    /// This is safe because all keys of a layer are written before the layer's attention reads them.
    pub fn inputs(&self) -> &[SequenceInput] {
        &self.inputs
    }

    /// Removes the [inputs](Self::inputs) from the assembly and returns them, for a scheduler that splits
    /// them over several passes.
    pub fn take_inputs(&mut self) -> Vec<SequenceInput> {
        std::mem::take(&mut self.inputs)
    }

    /// Returns the segments of the system prompt and the chunks as the question sees them. Empty until the
    /// assembly [is ready](Self::is_ready).
    pub fn segments(&self) -> &Arc<[Segment]> {
        &self.segments
    }

    /// Returns the position plan of the prompt.
    pub fn plan(&self) -> &PositionPlan {
        &self.plan
    }

    /// Returns the chunks, in the prompt's order.
    pub fn chunks(&self) -> Vec<ChunkSpan> {
        let span = |(i, chunk): (usize, &PromptChunk)| ChunkSpan {
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

    /// Returns one report per chunk, in the prompt's order.
    pub fn reports(&self) -> Vec<ChunkReport> {
        let report = |chunk: &PromptChunk| ChunkReport {
            tokens: chunk.place.len,
            hit: chunk.hit,
            exact: chunk.exact,
            position: chunk.place.used_start,
            offset: chunk.pieces.first().map_or(0, |piece| chunk.place.used_start - piece.stored_start),
            missed: chunk.missed,
        };
        self.chunks.iter().map(report).collect()
    }

    /// Returns the number of tokens in the system prompt and the chunks that do not have to be computed.
    pub fn reused_tokens(&self) -> usize {
        self.reused_tokens
    }

    /// Returns a waiter for each part of this prompt that another request is computing. There are no waiters
    /// once the assembly [is ready](Self::is_ready).
    pub fn waiters(&self) -> impl Iterator<Item = &ChunkWaiter> {
        self.waiting.iter().map(|(_, waiter)| waiter)
    }

    /// Declares that the inputs have been computed, and looks again for parts that other requests have
    /// finished. Never blocks. Call it when the assembly is not ready and one of its
    /// [`waiters`](Self::waiters) is over. Afterwards [`inputs`](Self::inputs) returns the new inputs, if
    /// any.
    ///
    /// # Errors
    /// Returns the errors of [`Assembler::assemble`]. Drop the assembly in that case.
    pub fn try_advance(&mut self, assembler: &Assembler<'_>, prompt: &ChunkedPrompt) -> Result<()> {
        self.inputs.clear();
        self.store()?;
        let before = self.waiting.len();
        self.waiting.retain(|(_, waiter)| !waiter.is_over());
        if self.waiting.len() < before || !self.is_ready() && before == 0 {
            assembler.resolve(assembler.lookup().as_ref(), self, prompt)?;
        }
        Ok(())
    }

    /// Stops waiting. After the next [`try_advance`](Self::try_advance), all parts that are still missing are
    /// in the inputs, to be computed only for this request.
    pub fn stop_waiting(&mut self) {
        self.overdue.extend(self.waiting.drain(..).map(|(key, _)| key));
    }

    /// Declares that the inputs have been computed, waits for the pieces that other requests are computing,
    /// and looks them up again. Call it when the assembly is not ready. Afterwards [`inputs`](Self::inputs)
    /// returns the new inputs, if any.
    ///
    /// All waits of an assembly together take at most [`max_wait_ms`](crate::ChunkCacheConfig::max_wait_ms).
    /// Pieces that are still missing after that are in the new inputs, to be computed only for this request.
    ///
    /// # Errors
    /// Returns the errors of [`Assembler::assemble`]. Drop the assembly in that case.
    pub fn advance(&mut self, assembler: &Assembler<'_>, prompt: &ChunkedPrompt) -> Result<()> {
        self.inputs.clear();
        // Store first, so that requests waiting for this one do not also wait for the requests it waits for.
        self.store()?;
        let limit = assembler.chunks.map_or(Duration::ZERO, |cache| cache.config().max_wait());
        let (since, left) = (Instant::now(), limit.saturating_sub(self.waited));
        let over =
            self.waiting.iter().all(|(_, waiter)| waiter.wait_for(left.saturating_sub(since.elapsed())));
        self.waited += since.elapsed();
        if !over {
            self.waiting.retain(|(_, waiter)| !waiter.is_over());
            self.stop_waiting();
        }
        self.try_advance(assembler, prompt)
    }

    /// Stores all reserved pieces and the system prompt, which must have been computed. After this call,
    /// other requests can find them.
    fn store(&mut self) -> Result<()> {
        // Requests that wait for the system prompt continue only after the pieces are stored, so that they
        // find the pieces too.
        let landing = [self.system.store()?, self.decoys.store()?];
        let stored: Vec<PieceHold> = self.reserved.drain(..).map(ChunkReservation::store).collect();
        if let Some(saving) = &self.saving {
            for part in [&self.system, &self.decoys] {
                if let SystemPart::Sealed(sealed) = part {
                    saving.save_system(sealed);
                }
            }
            saving.save(&stored);
        }
        let pieces = self.chunks.iter_mut().flat_map(|chunk| &mut chunk.pieces);
        for piece in pieces.chain(self.own.values_mut().map(|own| &mut own.piece)) {
            if let PieceSource::Reserved(i) = piece.source {
                piece.source = PieceSource::Cached(stored[i].clone());
            }
        }
        drop(landing);
        Ok(())
    }

    /// Stores the pieces and the system prompt, so that other requests can find them. All inputs must have
    /// been computed.
    ///
    /// # Errors
    /// Returns [`crate::Error::NotReady`] if the assembly is not [ready](Self::is_ready).
    pub fn commit(mut self) -> Result<AssembledPrompt> {
        if !self.is_ready() {
            return Err(crate::Error::NotReady { pieces: self.waiting.len() });
        }
        self.store()?;
        AssembledPrompt::new(self)
    }
}
