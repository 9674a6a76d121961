//! The main cache, as chunked prompts need it: an assembler over it, copies within it.

use std::sync::Arc;

use kvchunk::{Assembler, PositionReindexer, TenantKeys};
use kvcore::{CopyBlocks, PagedKvCache, SequenceInput, WritePairs};

use crate::caches::Caches;
use crate::error::{Error, Result};
use crate::generate::Context;
use crate::{Engine, Request};

impl Engine {
    fn main(&self) -> Result<&PagedKvCache> {
        match &self.caches {
            Caches::Paged { main, .. } => Ok(main),
            Caches::Static(_) | Caches::Grouped(_) => {
                Err(Error::NoChunks("ask for full attention, or take a paged cache"))
            }
        }
    }

    pub(crate) fn assembler<'a>(
        &'a self,
        request: &Request,
        tenant: TenantKeys,
        reindexer: &'a PositionReindexer,
    ) -> Result<Assembler<'a>> {
        let main = self.main()?.kv_pool().clone();
        let chunks = self.caches.chunks().filter(|cache| request.reuse && cache.config().enabled);
        let (prefixes, cell, replicas) = (request.reuse, request.cell, self.replicas.as_ref());
        Ok(Assembler { chunks, tenant, main, prefixes, cell, reindexer, ranks: None, replicas })
    }

    pub(crate) fn copy(&self, pairs: &WritePairs) -> Result<()> {
        let arena = self.caches.sequences().arena().clone();
        Ok(self.stream.copy_blocks(&CopyBlocks { arena, pairs: pairs.clone() })?)
    }

    pub(crate) fn pool(&self) -> Result<&kvcore::BlockPool> {
        Ok(self.main()?.pool())
    }
}

/// Returns a question that sees `context` and, as before, its own sequence.
pub(crate) fn with_context(question: &SequenceInput, context: &Context) -> SequenceInput {
    let own = question.segments.last().cloned();
    SequenceInput {
        segments: context.segments.iter().cloned().chain(own).collect(),
        groups: Arc::clone(&context.groups),
        ..question.clone()
    }
}
