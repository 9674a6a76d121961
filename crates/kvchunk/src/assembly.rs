//! Assembly: from a chunked prompt to the segments of a request, and what must be computed first.
//!
//! [`Assembler::assemble`] looks everything up and reserves room for what is missing. The caller
//! runs *one* forward pass over [`Assembly::inputs`] (with its question in the same batch if it
//! likes) and then [commits](Assembly::commit). Dropping the assembly instead gives every block back:
//! nothing partial can ever be found.

use std::collections::HashMap;
use std::sync::Arc;

use kvcore::{
    BlockId, BlockKey, Logits, MutableBlocks, PagedKvCache, PrefixFill, SealedPrefix, Segment, SequenceInput,
};

use crate::cache::{ChunkCache, ChunkHandle, ChunkReservation, slots};
use crate::config::{ComputeMode, ReuseCell};
use crate::error::Result;
use crate::key::{ChunkKey, ChunkKeys};
use crate::plan::{ChunkPlace, PositionPlan};
use crate::prompt::ChunkedPrompt;

/// How prompts are assembled.
#[derive(Debug, Clone, Copy)]
pub struct Assembler<'a> {
    /// The cache of chunks, or `None` to compute everything anew, under the same mask.
    pub chunks: Option<&'a Arc<ChunkCache>>,
    /// The main cache: system prompts, and chunks that find no room.
    pub main: &'a PagedKvCache,
    /// Root of all keys.
    pub root: BlockKey,
    /// Strategy and mode.
    pub cell: ReuseCell,
    /// Positions that the model has.
    pub max_positions: usize,
}

/// Where a piece's KV is, or will be.
#[derive(Debug)]
enum Piece {
    Cached(ChunkHandle),
    /// To be computed into the chunk pool; index into [`Assembly::reservations`].
    Reserved(usize),
    /// To be computed for this request only.
    Private(Private),
}

/// Blocks of the main pool that one request fills for itself.
#[derive(Debug)]
struct Private(
    #[expect(dead_code, reason = "held so that the blocks live as long as the request")] MutableBlocks,
);

/// What happened to one chunk of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct ChunkReport {
    /// Its tokens.
    pub tokens: usize,
    /// Whether all of it was found in the cache.
    pub hit: bool,
    /// Position of its first token in this prompt.
    pub position: i64,
    /// Positions from where it is stored to where it is used.
    pub offset: i64,
}

/// A prompt whose parts are found or reserved.
#[derive(Debug)]
#[must_use = "compute its inputs and commit it; dropping it gives the blocks back"]
pub struct Assembly {
    chunks: Option<Arc<ChunkCache>>,
    system: PrefixFill,
    pieces: Vec<Piece>,
    reservations: Vec<ChunkReservation>,
    inputs: Vec<SequenceInput>,
    segments: Vec<Segment>,
    reports: Vec<ChunkReport>,
    plan: PositionPlan,
    reused_tokens: usize,
}

/// A prompt whose system part and chunks are all computed and held.
#[derive(Debug)]
pub struct AssembledPrompt {
    segments: Vec<Segment>,
    handles: Vec<ChunkHandle>,
    #[expect(dead_code, reason = "held so that the blocks live as long as the request")]
    private: Vec<Private>,
    #[expect(dead_code, reason = "held so that the blocks live as long as the request")]
    system: SealedPrefix,
}

impl AssembledPrompt {
    /// System prompt and chunks as the question sees them.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Cached pieces held, in the prompt's order.
    pub fn handles(&self) -> &[ChunkHandle] {
        &self.handles
    }
}

impl Assembler<'_> {
    /// Looks up and reserves everything that `prompt` needs.
    ///
    /// # Errors
    /// [`crate::Error::TooLong`], or [`kvcore::Error::OutOfBlocks`] when the main pool has no room for
    /// what the chunk pool does not take. Nothing is held then.
    pub fn assemble(&self, prompt: &ChunkedPrompt) -> Result<Assembly> {
        let plan = PositionPlan::new(prompt, self.cell, self.max_positions)?;
        // The same chain as an ordinary prompt that begins with the system prompt.
        let system_root = self.chunks.map(|_| self.root);
        let system = self.main.fill_prefix(system_root, prompt.system())?;
        let mut assembly = Assembly {
            chunks: self.chunks.cloned(),
            reused_tokens: system.cached(),
            segments: vec![system.segment()],
            system,
            pieces: Vec::new(),
            reservations: Vec::new(),
            inputs: Vec::new(),
            reports: Vec::new(),
            plan,
        };
        assembly.add_system(prompt.system());
        // All hits are held before anything is reserved, so that a prompt never evicts its own chunks.
        let known: Vec<Vec<Wanted>> =
            prompt.chunks().iter().map(|c| self.look_up(prompt.system(), c)).collect();
        let mut reserved = HashMap::new();
        for (i, pieces) in known.into_iter().enumerate() {
            self.add_chunk(&mut assembly, &mut reserved, pieces, i)?;
        }
        Ok(assembly)
    }

    /// The pieces of a chunk, each with its handle if it is cached.
    fn look_up<'t>(&self, system: &[u32], tokens: &'t [u32]) -> Vec<Wanted<'t>> {
        let piece_len = self.chunks.map_or(tokens.len(), |cache| cache.config().max_chunk_tokens);
        let keys = ChunkKeys::new(self.root, self.cell.mode, system).pieces(tokens, piece_len);
        keys.into_iter()
            .zip(tokens.chunks(piece_len))
            .map(|(key, tokens)| Wanted {
                key,
                tokens,
                handle: self.chunks.and_then(|c| c.lookup(&key, tokens)),
            })
            .collect()
    }

    fn add_chunk(
        &self,
        assembly: &mut Assembly,
        reserved: &mut HashMap<ChunkKey, usize>,
        pieces: Vec<Wanted>,
        chunk: usize,
    ) -> Result<()> {
        let place = assembly.plan.chunks[chunk];
        // What the chunk's own rows see, at the places where its keys are stored.
        let mut context: Vec<Segment> = match self.cell.mode {
            ComputeMode::WithSystem => vec![assembly.system.segment()],
            ComputeMode::Alone => Vec::new(),
        };
        let (mut hit, mut start) = (true, 0);
        for piece in pieces {
            let tokens = piece.tokens;
            let (blocks, fresh) = self.place(assembly, reserved, piece)?;
            let stored = stored_segment(&place, start, tokens.len(), Arc::clone(&blocks));
            start += tokens.len();
            assembly.segments.push(stored.clone().at_offset(place.offset()));
            context.push(stored.clone());
            hit &= !fresh;
            if fresh {
                assembly.inputs.push(SequenceInput {
                    tokens: tokens.to_vec(),
                    logical_start: stored.logical_start,
                    position_start: stored.stored_start,
                    slots: slots(&blocks, self.main.arena().layout().shape().block_size, tokens.len()),
                    segments: context.clone(),
                    logits: Logits::None,
                });
            } else {
                assembly.reused_tokens += tokens.len();
            }
        }
        let (position, offset) = (place.used_start, place.offset());
        assembly.reports.push(ChunkReport { tokens: place.len, hit, position, offset });
        Ok(())
    }

    /// The blocks of a piece, and whether they must still be filled.
    fn place(
        &self,
        assembly: &mut Assembly,
        reserved: &mut HashMap<ChunkKey, usize>,
        Wanted { key, tokens, handle }: Wanted,
    ) -> Result<(Arc<[BlockId]>, bool)> {
        if let Some(handle) = handle {
            let blocks = Arc::clone(handle.blocks());
            assembly.pieces.push(Piece::Cached(handle));
            return Ok((blocks, false));
        }
        // The same chunk twice in one prompt: two segments over the same blocks.
        if let Some(&i) = reserved.get(&key)
            && assembly.reservations[i].tokens() == tokens
        {
            assembly.pieces.push(Piece::Reserved(i));
            return Ok((assembly.reservations[i].ids(), false));
        }
        if let Some(reservation) = self.chunks.and_then(|cache| cache.reserve(key, tokens)) {
            let blocks = reservation.ids();
            reserved.insert(key, assembly.reservations.len());
            assembly.pieces.push(Piece::Reserved(assembly.reservations.len()));
            assembly.reservations.push(reservation);
            return Ok((blocks, true));
        }
        let needed = self.main.arena().layout().blocks_for(tokens.len());
        let private = self.main.pool().allocate(needed)?;
        let blocks = private.ids().into();
        assembly.pieces.push(Piece::Private(Private(private)));
        Ok((blocks, true))
    }
}

/// A piece of a chunk before it has a place.
struct Wanted<'t> {
    key: ChunkKey,
    tokens: &'t [u32],
    handle: Option<ChunkHandle>,
}

/// A piece where it is stored: `start` tokens into its chunk.
fn stored_segment(place: &ChunkPlace, start: usize, len: usize, blocks: Arc<[BlockId]>) -> Segment {
    Segment::new(blocks, len, place.logical_start + start, place.stored_start + start as i64)
}

impl Assembly {
    fn add_system(&mut self, tokens: &[u32]) {
        let cached = self.system.cached();
        if cached < tokens.len() {
            self.inputs.push(SequenceInput {
                tokens: tokens[cached..].to_vec(),
                logical_start: cached,
                position_start: cached as i64,
                slots: self.system.slots().clone(),
                segments: vec![self.system.segment()],
                logits: Logits::None,
            });
        }
    }

    /// What must be computed: the system prompt's rest and every missing piece, in one batch. Pieces
    /// see blocks that the same batch fills, which is in order: a layer's keys are all written before
    /// its attention reads.
    pub fn inputs(&self) -> &[SequenceInput] {
        &self.inputs
    }

    /// System prompt and chunks as the question sees them.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Where everything stands.
    pub fn plan(&self) -> &PositionPlan {
        &self.plan
    }

    /// What happened to each chunk, in the prompt's order.
    pub fn reports(&self) -> &[ChunkReport] {
        &self.reports
    }

    /// Tokens of system prompt and chunks that need not be computed.
    pub fn reused_tokens(&self) -> usize {
        self.reused_tokens
    }

    /// Declares all inputs computed: pieces and system prompt can be found from now on.
    pub fn commit(self) -> Result<AssembledPrompt> {
        let Self { chunks, system, pieces, reservations, mut segments, .. } = self;
        let mut stored = Vec::with_capacity(reservations.len());
        if let Some(cache) = &chunks {
            for reservation in reservations {
                stored.push(cache.insert(reservation));
            }
        }
        let (mut handles, mut private) = (Vec::new(), Vec::new());
        for piece in pieces {
            match piece {
                Piece::Cached(handle) => handles.push(handle),
                Piece::Reserved(i) => handles.push(stored[i].clone()),
                Piece::Private(blocks) => private.push(blocks),
            }
        }
        // Another request may have computed the same system prompt meanwhile: then its blocks stay.
        let system = system.finish()?;
        segments[0] = system.segment();
        Ok(AssembledPrompt { segments, handles, private, system })
    }
}
