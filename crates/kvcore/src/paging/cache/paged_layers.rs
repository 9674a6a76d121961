//! The paged cache behind the interface of every cache, with writes of whole layers.

use std::collections::HashSet;
use std::sync::Arc;

use super::paged::Sequence;
use super::rows::write_rows;
use super::{
    CacheKind, Error, KvCache, LayerViews, PagedKvCache, Places, Result, SequenceId, SequenceStart,
    SlotMapping,
};
use crate::device::{KvArena, Segment, Stream, TensorView};
use crate::paging::KeyScheme;

impl PagedKvCache {
    /// Whether every slot that is no padding lies in a block that some live sequence fills itself.
    fn check_owned(&self, slots: &[i64]) -> Result<()> {
        let size = self.block_size() as i64;
        let mut foreign: HashSet<i64> =
            slots.iter().filter(|slot| **slot >= 0).map(|slot| slot / size).collect();
        for Sequence { table, .. } in self.sequences.values() {
            if foreign.is_empty() {
                break;
            }
            for block in &table.ids()[table.shared().len()..] {
                foreign.remove(&i64::from(block.0));
            }
        }
        let stray = slots.iter().find(|slot| **slot >= 0 && foreign.contains(&(**slot / size)));
        stray.map_or(Ok(()), |&slot| Err(Error::NotOwned { slot, sequence: None }))
    }
}

impl KvCache for PagedKvCache {
    fn kind(&self) -> CacheKind {
        CacheKind::Paged
    }

    fn arena(&self) -> &KvArena {
        self.arena()
    }

    fn max_len(&self) -> usize {
        self.pool().range().len() * self.block_size()
    }

    fn num_sequences(&self) -> usize {
        self.num_sequences()
    }

    fn create(&mut self, start: SequenceStart) -> Result<SequenceId> {
        self.create(start)
    }

    fn create_with_prefix(&mut self, scheme: KeyScheme, tokens: &[u32]) -> Result<(SequenceId, usize)> {
        self.create_with_prefix(scheme, tokens)
    }

    fn grow(&mut self, id: SequenceId, tokens: usize) -> Result<SlotMapping> {
        self.grow(id, tokens)
    }

    fn commit(&mut self, id: SequenceId, tokens: &[u32]) -> Result<()> {
        self.commit(id, tokens)
    }

    fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        self.truncate(id, len)
    }

    fn free(&mut self, id: SequenceId) -> Result<()> {
        self.free(id)
    }

    fn len(&self, id: SequenceId) -> Result<usize> {
        self.len(id)
    }

    fn segment(&self, id: SequenceId) -> Result<Segment> {
        self.segment(id)
    }

    /// The slots may be of several sequences, each in a block that a live one fills itself
    /// ([`Error::NotOwned`] otherwise): shared blocks and those of freed sequences are not written.
    fn update(
        &mut self,
        stream: &dyn Stream,
        layer: usize,
        k: &TensorView,
        v: &TensorView,
        places: Places<'_>,
    ) -> Result<LayerViews> {
        let Places::Slots(slots) = places else {
            return Err(Error::WrongCache { cache: "paged", given: "start positions" });
        };
        self.check_owned(slots.slots())?;
        write_rows(stream, self.arena(), layer, k, v, Arc::clone(slots.slots()))?;
        self.arena().layer_views(layer, self.block_size())
    }

    fn reset(&mut self) {
        self.sequences.clear();
        self.pool().clear_cached();
    }

    fn as_paged(&self) -> Option<&PagedKvCache> {
        Some(self)
    }

    fn as_paged_mut(&mut self) -> Option<&mut PagedKvCache> {
        Some(self)
    }
}
