//! The cache of one prompt on its way out of an engine's caches, and back into them.

use kvcore::{BlockId, BlockKey, KvPool, SharedBlocks};
use kvtier::{Record, RecordBuffer, RecordNote};

use crate::assembly::Assembler;
use crate::cache::{ChunkCacheManager, PieceHold, TenantId};
use crate::error::{Error, Result};
use crate::position::PositionPlan;
use crate::prompt::ChunkedPrompt;
use crate::replica::ReplicaDevice;

impl Assembler<'_> {
    /// Gives a prompt's parts that are in the caches to `each`, as records: blocks of the system prompt and of the
    /// decoys, and pieces of the chunks. Wakes pieces that sleep. Returns the number of tokens in parts that are not in
    /// the caches or may not leave them, such as approximate pieces.
    ///
    /// # Errors
    /// Returns the errors of [`assemble`](Self::assemble) about the prompt itself, of the backend, and of `each`.
    pub fn export<E: From<Error>>(
        &self,
        device: &ReplicaDevice,
        prompt: &ChunkedPrompt,
        plan: &PositionPlan,
        each: &mut dyn FnMut(Record) -> Result<(), E>,
    ) -> Result<usize, E> {
        let plan = self.in_slots(prompt, plan.clone())?;
        let (mut hashes, mut missing) = (Vec::new(), 0);
        self.each_piece(prompt, &plan, |_, _, piece| hashes.push(piece.hash()))?;
        for (keys, tokens) in self.prefixes_of(prompt, !hashes.is_empty())? {
            missing += device.export_prefix(&self.main, self.tenant.root(), &keys, &tokens, each)?;
        }
        for hash in hashes {
            let record = self.chunks.map_or(Ok(None), |cache| {
                cache.wake_up_chunks(&[hash]);
                device.copy_of(cache, &hash, &RecordBuffer::zeroed)
            })?;
            match record {
                Some(record) => each(record)?,
                None => missing += hash.token_count,
            }
        }
        Ok(missing)
    }
}

impl ReplicaDevice {
    /// Gives the blocks of a prefix that are in a pool to `each`, as records. The prefix starts with `tokens`, under
    /// `root`, and `keys` are the keys of its blocks. Returns the number of tokens that are not in the pool.
    ///
    /// # Errors
    /// Returns the errors of the backend and of `each`.
    pub fn export_prefix<E: From<Error>>(
        &self,
        pool: &KvPool,
        root: &BlockKey,
        keys: &[BlockKey],
        tokens: &[u32],
        each: &mut dyn FnMut(Record) -> Result<(), E>,
    ) -> Result<usize, E> {
        let block_size = pool.block_size();
        let held = pool.blocks().lookup_chain(keys);
        let mut parent = *root;
        let mut left = tokens.len();
        let blocks = tokens.chunks(block_size).zip(keys).zip(held.ids()).enumerate();
        for (place, ((tokens, &key), &block)) in blocks {
            let id = self.record_id(key, tokens, (place * block_size) as i64);
            let note = RecordNote { parent: Some(parent), ..RecordNote::default() };
            each(Record { id, note, buffers: self.read(&[block])? })?;
            (parent, left) = (key, left - tokens.len());
        }
        Ok(left)
    }
}

/// The result of adopting a record with [`Adoption::adopt`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adopted {
    /// The record's contents are in the caches now.
    Stored,
    /// The contents were there already.
    Known,
    /// There is no room for them, or the block before them is not there.
    NoRoom,
    /// The record has another layout, or is not what its key says.
    Differs,
}

/// Puts records that were exported into the caches of another engine, or of the same one at another time. What was
/// adopted is held until this value is dropped, so that later records of the same prompt do not evict it.
#[derive(Debug)]
pub struct Adoption<'a> {
    device: &'a ReplicaDevice,
    main: &'a KvPool,
    chunks: &'a ChunkCacheManager,
    tenant: TenantId,
    blocks: Vec<SharedBlocks>,
    pieces: Vec<PieceHold>,
}

impl<'a> Adoption<'a> {
    /// Prepares to adopt records of whole blocks: those of prefixes into `main`, and pieces, which count towards the
    /// tenant's quota, into `chunks`.
    pub fn new(
        device: &'a ReplicaDevice,
        main: &'a KvPool,
        chunks: &'a ChunkCacheManager,
        tenant: TenantId,
    ) -> Self {
        Self { device, main, chunks, tenant, blocks: Vec::new(), pieces: Vec::new() }
    }

    /// Adopts a record. Records of prefixes must come in the order in which they were exported.
    ///
    /// # Errors
    /// Returns the errors of the backend. Nothing is stored then.
    pub fn adopt(&mut self, record: &Record) -> Result<Adopted> {
        let id = &record.id;
        if self.device.record_id(id.key, &id.tokens, id.stored_start) != *id {
            return Ok(Adopted::Differs);
        }
        match record.note.parent {
            Some(parent) if parent.child(&id.tokens) == id.key => self.adopt_block(record, parent),
            Some(_) => Ok(Adopted::Differs),
            None => self.adopt_piece(record),
        }
    }

    fn adopt_block(&mut self, record: &Record, parent: BlockKey) -> Result<Adopted> {
        let (pool, key) = (self.main.blocks(), record.id.key);
        // The first block follows the root, and every other one a block that is held.
        if record.id.stored_start > 0 && pool.lookup(&parent).is_none() {
            return Ok(Adopted::NoRoom);
        }
        if let Some(known) = pool.lookup(&key) {
            self.blocks.push(known);
            return Ok(Adopted::Known);
        }
        let Ok(block) = pool.allocate(1) else { return Ok(Adopted::NoRoom) };
        let pairs = block.write_pairs([(BlockId(0), block.ids()[0])])?;
        self.device.write(1, pairs, &record.buffers)?;
        let registered = block.register(Some(parent), &[key]).map_err(|rejected| rejected.error)?;
        self.blocks.push(registered);
        Ok(Adopted::Stored)
    }

    fn adopt_piece(&mut self, record: &Record) -> Result<Adopted> {
        let Some(reservation) = self.chunks.reserve_record(self.tenant, &record.id) else {
            let known = self.chunks.knows(&record.id.key);
            return Ok(if known { Adopted::Known } else { Adopted::NoRoom });
        };
        let blocks = reservation.block_ids().len();
        let pairs = reservation.write_pairs((0..blocks as u32).map(BlockId))?;
        self.device.write(blocks, pairs, &record.buffers)?;
        self.pieces.push(reservation.store_fetched());
        Ok(Adopted::Stored)
    }
}
