//! Saves the cache of one prompt to a file, and restores it.

use std::path::Path;

use kvchunk::{Adopted, Adoption, TenantId};
use kvtier::{Record, RecordReader, RecordWriter};
use serde::Serialize;

use super::submit::own_tokens;
use crate::error::{Error, Result};
use crate::prompt::LivePrompt;
use crate::request::Request;
use crate::runner::Runner;

/// The result of saving a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct SavedPrompt {
    /// The number of tokens whose keys and values are in the file.
    pub tokens: usize,
    /// The number of tokens that were not in the caches, such as the last tokens of an ordinary prompt, which do not
    /// fill a block.
    pub missing: usize,
    /// The size of the file in bytes, or 0 if the caches had nothing of the prompt. In that case, no file was written,
    /// and an older one stays.
    pub bytes: u64,
}

/// The result of restoring a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RestoredPrompt {
    /// The number of tokens whose keys and values are in the caches now, including those that were there already.
    pub tokens: usize,
    /// The number of tokens for which the caches have no room.
    pub no_room: usize,
    /// The number of tokens in records of another layout.
    pub differs: usize,
}

/// Saves the parts of a prompt that are in the caches.
pub(crate) fn save_prompt(runner: &Runner, request: &Request, path: &Path) -> Result<SavedPrompt> {
    let pool = runner.caches.paged_cache()?.kv_pool();
    let (tokens, plan) = own_tokens(runner, request)?;
    let end = plan.as_ref().map_or(tokens.len(), |plan| plan.end);
    let ropes = runner.ropes(end, request.max_new_tokens)?;
    let keys = runner.keys(request.owner(), &ropes)?;
    let mut writer = RecordWriter::create(path, runner.scope())?;
    let mut saved = 0;
    let mut write = |record: Record| {
        saved += record.id.tokens.len();
        writer.write(&record).map_err(Error::from)
    };
    let prompt = LivePrompt::new(ropes, keys, plan);
    let missing = if let Some(missing) = prompt.export(runner, request, &mut write)? {
        missing
    } else {
        let chain = keys.root().chain(&tokens, pool.block_size());
        runner.replica_device().export_prefix(pool, keys.root(), &chain, &tokens, &mut write)?
    };
    if saved == 0 {
        return Ok(SavedPrompt { tokens: 0, missing, bytes: 0 });
    }
    Ok(SavedPrompt { tokens: saved, missing, bytes: writer.finish()? })
}

/// Puts the contents of a file into the caches.
pub(crate) fn restore_prompt(runner: &Runner, path: &Path, tenant: Option<&str>) -> Result<RestoredPrompt> {
    let main = runner.caches.paged_cache()?.kv_pool();
    let Some(chunks) = runner.caches.chunks() else {
        return Err(Error::NoChunks("use a paged cache"));
    };
    let tenant = tenant.map_or(Ok(TenantId::default()), |tag| chunks.tenant(tag).map(|(id, _)| id))?;
    let device = runner.replica_device();
    let mut adoption = Adoption::new(&device, main, chunks, tenant);
    let mut restored = RestoredPrompt::default();
    for record in RecordReader::open(path, runner.scope())? {
        let record = record?;
        let count = match adoption.adopt(&record)? {
            Adopted::Stored | Adopted::Known => &mut restored.tokens,
            Adopted::NoRoom => &mut restored.no_room,
            Adopted::Differs => &mut restored.differs,
        };
        *count += record.id.tokens.len();
    }
    Ok(restored)
}
