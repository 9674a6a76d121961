//! Attention of rows that decode, by CANN's fused operator on the paged cache.
//!
//! `FusedInferAttentionScoreV2` computes what plain softmax attention is: one row for each sequence, over the first tokens
//! of a block table. Whatever else an operation asks for, and whatever lies outside of the limits that CANN documents, is
//! composed of other operators.

use std::sync::Arc;

use kvcore::{Attend, AttendRows, BlockId, KeyForm, QueryRow, Result};
use smallvec::smallvec;

use super::Call;
use crate::bindings::types as sys;
use crate::library::Serves;
use crate::operations::plans::{ListKey, Sent};
use crate::operations::turn::{Angles, in_f32};
use crate::operators::{PagedAttention, Tensor};
use crate::stream::Work;

/// Most sequences, heads, elements of a head, tokens, and query heads for each of the cache.
const SEQUENCES: usize = 65_536;
const HEADS: usize = 256;
const DIM: usize = 512;
const TOKENS: usize = 262_144;
const SHARED: usize = 64;

/// Most elements of a token whose heads lie one behind the other.
const OF_TOKEN: usize = 65_535;

/// Heads and blocks are multiples of this: 32 bytes.
const UNIT: usize = 16;

/// Most tokens of a block.
const BLOCK: usize = 512;

/// The sequences of a step as block tables, for all of its layers. None inside if they are not that.
#[derive(Debug)]
struct Sequences(Option<Tables>);

#[derive(Debug)]
struct Tables {
    table: Sent,
    lengths: Vec<i64>,
    /// Blocks of all sequences.
    blocks: usize,
    /// The positions to which queries are rotated.
    positions: Vec<i64>,
}

/// The tokens that a row sees, if they are the first ones of a list of blocks and count as in plain attention.
struct Sequence {
    blocks: Vec<BlockId>,
    tokens: usize,
    /// Distance of the keys from where they were rotated.
    offset: i64,
}

impl Sequence {
    fn of(op: &Attend, entry: &AttendRows, at: QueryRow, block_size: usize) -> Option<Self> {
        let mut known = Self { blocks: Vec::new(), tokens: 0, offset: 0 };
        for segment in entry.segments.iter() {
            let seen = op.visible(segment, at);
            if seen.is_empty() {
                continue;
            }
            let groups = op.work.groups();
            let plain = segment.logit_scale == 1.0 && groups[segment.merge_group].lse_scale == 1.0;
            let follows = known.tokens.is_multiple_of(block_size) && seen.start == 0;
            let first = known.tokens == 0;
            if !plain || !follows || !(first || known.offset == segment.position_offset) {
                return None;
            }
            known.offset = segment.position_offset;
            known.blocks.extend_from_slice(&segment.blocks[..seen.end.div_ceil(block_size)]);
            known.tokens += seen.end;
        }
        (1..=TOKENS).contains(&known.tokens).then_some(known)
    }
}

impl Sequences {
    /// Returns the sequences of an operation, made once for all layers.
    fn of(work: &mut Work<'_>, op: &Attend) -> Result<Arc<Self>> {
        let block_size = op.arena.layout().shape().block_size;
        let window = op.window.map_or(0, |window| window as u64 + 1);
        let key: ListKey = smallvec![60, op.work.id(), block_size as u64, window];
        if let Some(known) = work.plans().get::<Self>(&key) {
            if let Some(tables) = &known.0 {
                tables.table.hold(work);
            }
            return Ok(known);
        }
        let (rows, batch) = (op.work.rows(), op.work.batch());
        let in_order = rows.len() == batch.len() && rows.len() <= SEQUENCES;
        let sequences = batch.iter().zip(0..).map(|(entry, row)| {
            let one = entry.rows == (row..row + 1) && entry.selection.is_none();
            if one { Sequence::of(op, entry, rows[row], block_size) } else { None }
        });
        let sequences: Option<Vec<Sequence>> = if in_order { sequences.collect() } else { None };
        let tables = sequences.map(|sequences| Tables::send(work, rows, &sequences)).transpose()?;
        let made = Arc::new(Self(tables));
        work.plans().keep(key, Box::new(()), &made);
        Ok(made)
    }
}

impl Tables {
    fn send(work: &mut Work<'_>, rows: &[QueryRow], sequences: &[Sequence]) -> Result<Self> {
        let width = sequences.iter().map(|sequence| sequence.blocks.len()).max().unwrap_or(0);
        let mut table = vec![0; sequences.len() * width];
        for (row, sequence) in table.chunks_exact_mut(width).zip(sequences) {
            row.iter_mut().zip(&sequence.blocks).for_each(|(to, block)| *to = block.0 as i32);
        }
        Ok(Self {
            table: Sent::send(work, &table, sys::ACL_INT32, &[sequences.len(), width])?,
            lengths: sequences.iter().map(|sequence| sequence.tokens as i64).collect(),
            blocks: sequences.iter().map(|sequence| sequence.blocks.len()).sum(),
            positions: rows.iter().zip(sequences).map(|(row, of)| row.position - of.offset).collect(),
        })
    }
}

impl Call<'_> {
    /// Returns keys and values as the operator takes them, if it takes these operands.
    fn pages(&self) -> Option<[Tensor; 2]> {
        let [k, v] = [self.planes[0].pages()?, self.planes[1].pages()?];
        let of = self.planes[0].geometry;
        let (heads, dim, block_size) = (of.heads, of.dim, self.op.arena.layout().shape().block_size);
        let elements: usize = k.dims().iter().product();
        let fits = k.dims() == v.dims()
            && [&k, &v, &self.out].iter().all(|x| x.dtype() == self.q.dtype())
            && self.heads <= HEADS
            && self.heads / heads <= SHARED
            && (UNIT..=DIM).contains(&dim)
            && dim.is_multiple_of(UNIT)
            && (UNIT..=BLOCK).contains(&block_size)
            && block_size.is_multiple_of(UNIT)
            && i32::try_from(elements).is_ok();
        if !fits {
            return None;
        }
        if of.heads_lie_apart() {
            return Some([k, v]);
        }
        let blocks = k.dim(0);
        let by_token = |x: Tensor| x.reshaped(&[blocks, block_size, heads * dim]);
        (heads * dim <= OF_TOKEN).then(|| [by_token(k), by_token(v)])
    }

    /// Computes the operation by the fused operator. Returns whether it could.
    pub(super) fn fused(&self, work: &mut Work<'_>) -> Result<bool> {
        let op = self.op;
        let plain = self.latent.is_none() && op.softcap.is_none() && op.keys == KeyForm::Rotated;
        if !plain || !work.device().fuses(Serves::FusedAttention) {
            return Ok(false);
        }
        let Some([k, v]) = self.pages() else { return Ok(false) };
        let sequences = Sequences::of(work, op)?;
        let Some(tables) = &sequences.0 else { return Ok(false) };
        if tables.blocks > k.dim(0) {
            return Ok(false);
        }
        let (rows, dim) = (self.q.dim(0), self.q.dim(2));
        let each = [rows, self.heads, 1, dim];
        let q = self.turned(work, tables)?.reshaped(&each);
        let own = |work: &mut Work<'_>, wanted: Option<&Tensor>, dtype, dims: &[usize]| match wanted {
            Some(wanted) if wanted.is_dense() => Ok(wanted.reshaped(dims)),
            _ => work.temporary(dtype, dims),
        };
        let out = own(work, Some(&self.out), self.q.dtype(), &each)?;
        let sums = if self.lse.is_some() { &[rows, self.heads, 1, 1][..] } else { &[1] };
        let lse = own(work, self.lse.as_ref(), sys::ACL_FLOAT, sums)?;
        work.attend_paged(&PagedAttention {
            q: &q,
            k: &k,
            v: &v,
            table: &tables.table.tensor,
            lengths: &tables.lengths,
            kv_heads: self.planes[0].geometry.heads,
            block_size: op.arena.layout().shape().block_size,
            scale: op.scale,
            out: &out,
            lse: &lse,
        })?;
        if !self.out.is_dense() {
            work.convert(&out.reshaped(&[rows, self.heads, dim]), &self.out)?;
        }
        match &self.lse {
            Some(wanted) if !wanted.is_dense() => {
                work.convert(&lse.reshaped(&[rows, self.heads]), wanted)?;
            }
            _ => {}
        }
        Ok(true)
    }

    /// Returns the queries at their place, dense and in their own type.
    fn turned(&self, work: &mut Work<'_>, tables: &Tables) -> Result<Tensor> {
        let (op, dims) = (self.op, self.q.dims());
        let Some(rope) = &op.rope else {
            // The result may have the place of the queries.
            let apart = op.q.storage().address() != op.out.storage().address();
            if apart && self.q.is_dense() {
                return Ok(self.q.clone());
            }
            let copy = work.temporary(self.q.dtype(), &dims)?;
            work.convert(&self.q, &copy)?;
            return Ok(copy);
        };
        let window = op.window.map_or(0, |window| window as u64 + 1);
        let key: ListKey = smallvec![61, op.work.id(), window, Arc::as_ptr(rope) as u64];
        let known = work.plans().get::<Angles>(&key);
        let angles = if let Some(known) = known {
            known
        } else {
            let made = Arc::new(Angles::send(work, rope, &tables.positions, rope.attention_factor())?);
            work.plans().keep(key, Box::new(Arc::clone(rope)), &made);
            made
        };
        angles.hold(work);
        let turned = in_f32(work, &self.q)?;
        angles.turn(work, &turned, &[dims[0], 1])?;
        let rounded = work.temporary(self.q.dtype(), &dims)?;
        work.convert(&turned, &rounded)?;
        Ok(rounded)
    }
}
