//! The cache of one prompt goes to a file and back, bit by bit, or an error says why not.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvbackend_cpu::CpuBackend;
use kvchunk::{
    ChunkParcel, ColdRule, ComputeMode, PositionStrategy, Recompute, ReuseCell, SleepForm, Tenant,
};
use kvcore::{CacheKind, DType, KvFormat};
use kvengine::{ChunkSleep, Engine, EngineConfig, Error, Generation, PromptTokens, Request, RestoredPrompt};
use kvmanager::TierThresholds;
use rstest::rstest;
use tempfile::TempDir;

use crate::asking::engine;
use crate::common::{Golden, for_every, load_model};

const CELL: ReuseCell = ReuseCell::SEQUENTIAL_WITH_SYSTEM;

fn file() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("prompt.kv");
    (folder, path)
}

fn request(prompt: impl Into<PromptTokens>, cell: ReuseCell) -> Request {
    let recompute = Arc::new("none".parse::<Recompute>().unwrap());
    Request { cell, recompute, max_new_tokens: 3, keep_logits: true, ..Request::new(prompt.into()) }
}

/// Answers a request, and saves its prompt. Returns the answer and the number of tokens that were saved.
fn saved(engine: &mut Engine, request: &Request, path: &Path) -> (Generation, usize) {
    let answer = engine.generate(request, &mut ()).unwrap();
    let saved = engine.save_prompt(request, path).unwrap();
    engine.check_invariants().unwrap();
    assert_eq!(saved.bytes, fs::metadata(path).unwrap().len());
    (answer, saved.tokens)
}

fn restored(engine: &mut Engine, path: &Path) -> RestoredPrompt {
    let restored = engine.restore_prompt(path, None).unwrap();
    engine.check_invariants().unwrap();
    let report = engine.report();
    for pool in [report.main.unwrap(), report.chunks.unwrap()] {
        assert_eq!(pool.free + pool.cached, pool.total, "nothing is held");
    }
    restored
}

/// Returns the contents of the chunks in memory.
fn contents(engine: &Engine) -> Vec<ChunkParcel> {
    let (chunks, device) = (engine.chunks().unwrap(), engine.replica_device());
    let packed = |info: &kvchunk::ChunkInfo| device.pack(chunks, &info.chunk_hash).unwrap().unwrap();
    let mut parcels: Vec<ChunkParcel> = chunks.chunks().iter().map(packed).collect();
    parcels.sort_by_key(|parcel| parcel.record.id.key);
    parcels
}

for_every! {
    fn a_restored_prompt_is_found_bit_by_bit(
        #[values("llama", "mistral", "deepseek-v3")] name: &str,
        cell: every cell,
    ) {
        let (_folder, path) = file();
        let request = request(PromptTokens::Chunked(Golden::load(name).prompt), cell);
        let mut first = engine(name, DType::F32.into());
        let (computed, tokens) = saved(&mut first, &request, &path);
        let mut second = engine(name, DType::F32.into());
        let all = restored(&mut second, &path);
        assert_eq!(all, RestoredPrompt { tokens, ..RestoredPrompt::default() });
        assert_eq!(contents(&second), contents(&first), "the same bits");
        let found = second.generate(&request, &mut ()).unwrap();
        assert!(found.chunks.iter().all(|chunk| chunk.hit && chunk.exact));
        assert_eq!(found.tokens, computed.tokens);
        let metrics = second.chunks().unwrap().metrics();
        assert_eq!((metrics.tokens_computed, metrics.miss_count), (0, 0));
        assert_eq!(restored(&mut second, &path), all, "it is there already");
    }
}

#[rstest]
fn every_format_is_restored(
    #[values("f16", "bf16", "int8:8", "int4:8", "fp8-e4m3", "fp8-e5m2:head")] format: &str,
) {
    let (_folder, path) = file();
    let format: KvFormat = format.parse().unwrap();
    let request = request(PromptTokens::Chunked(Golden::load("llama").prompt), CELL);
    let mut first = engine("llama", format);
    let (computed, _) = saved(&mut first, &request, &path);
    let mut second = engine("llama", format);
    restored(&mut second, &path);
    assert_eq!(contents(&second), contents(&first));
    let found = second.generate(&request, &mut ()).unwrap();
    assert_eq!((found.tokens, found.chunks.iter().all(|chunk| chunk.hit)), (computed.tokens, true));
}

#[test]
fn documents_behind_decoys_are_restored_with_their_decoys() {
    let (_folder, path) = file();
    let cell = ReuseCell { mode: ComputeMode::Behind(2), strategy: PositionStrategy::Sequential };
    let request = request(PromptTokens::Chunked(Golden::behind_decoys("llama").prompt), cell);
    let (computed, _) = saved(&mut engine("llama", DType::F32.into()), &request, &path);
    let mut second = engine("llama", DType::F32.into());
    restored(&mut second, &path);
    let found = second.generate(&request, &mut ()).unwrap();
    assert_eq!((&found.tokens, second.chunks().unwrap().metrics().tokens_computed), (&computed.tokens, 0));
    // A new document needs the decoys, and finds them.
    let Golden { prompt, .. } = Golden::behind_decoys("llama");
    let new = kvchunk::ChunkedPrompt::new(prompt.system().to_vec(), vec![vec![5; 6]], vec![4]).unwrap();
    let new = new.with_decoys(Arc::clone(prompt.decoys())).unwrap();
    let new = Request { prompt: Arc::new(PromptTokens::Chunked(new)), ..request };
    let fresh = engine("llama", DType::F32.into()).generate(&new, &mut ()).unwrap();
    let found = second.generate(&new, &mut ()).unwrap();
    assert_eq!(found.tokens, fresh.tokens);
    assert!(found.prefill_flops < fresh.prefill_flops, "{} {}", found.prefill_flops, fresh.prefill_flops);
}

#[test]
fn an_ordinary_prompt_is_restored_in_whole_blocks_with_its_answer() {
    let (_folder, path) = file();
    let prompt: Vec<u32> = (0..30).map(|i| 3 + i * 7 % 45).collect();
    let mut first = engine("llama", DType::F32.into());
    let asked = request(PromptTokens::Plain(prompt.clone()), CELL);
    let answer = first.generate(&asked, &mut ()).unwrap();
    let whole = prompt.iter().chain(&answer.tokens[..2]).copied().collect::<Vec<_>>();
    let report = first.save_prompt(&request(PromptTokens::Plain(whole.clone()), CELL), &path).unwrap();
    assert_eq!((report.tokens, report.missing), (32, 0));
    let mut second = engine("llama", DType::F32.into());
    assert_eq!(restored(&mut second, &path).tokens, 32);
    let longer = whole.iter().copied().chain([9, 11]).collect();
    assert_eq!(
        second.generate(&request(PromptTokens::Plain(longer), CELL), &mut ()).unwrap().cached_tokens,
        32
    );
    let again = second.generate(&asked, &mut ()).unwrap();
    assert_eq!((again.cached_tokens, again.tokens), (28, answer.tokens));
    // Nothing of a prompt that was never asked is in the caches.
    let other = request(PromptTokens::Plain(vec![7; 11]), CELL);
    let report = first.save_prompt(&other, &path).unwrap();
    assert_eq!((report.tokens, report.missing, report.bytes), (0, 11, 0));
    assert_eq!(restored(&mut second, &path).tokens, 32, "the older file stays");
}

#[test]
fn sleeping_documents_wake_to_be_saved_and_a_tenants_are_restored_for_it() {
    let (_folder, path) = file();
    let sleep = ChunkSleep { form: SleepForm::Plain, memory: None, thresholds: TierThresholds::default() };
    let config = EngineConfig {
        block_size: 4,
        kv_memory: Some(8 << 20),
        chunk_sleep: Some(sleep),
        ..EngineConfig::default()
    };
    let with_tenant = || {
        let engine = Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config).unwrap();
        engine.chunks().unwrap().add_tenant(Tenant::new("alice")).unwrap();
        engine
    };
    let (mut first, mut second) = (with_tenant(), with_tenant());
    let mut request = request(PromptTokens::Chunked(Golden::load("llama").prompt), CELL);
    request.tenant = Some("alice".to_owned());
    first.generate(&request, &mut ()).unwrap();
    first.chunks().unwrap().sleep_cold_chunks(ColdRule::EVERYTHING).unwrap();
    let report = first.save_prompt(&request, &path).unwrap();
    assert!(report.tokens > 0);
    second.restore_prompt(&path, Some("alice")).unwrap();
    let alice = second.chunks().unwrap().tenant("alice").unwrap().0;
    assert_eq!(second.chunks().unwrap().tenant_metrics(alice).cached_chunks, 3);
    let found = second.generate(&request, &mut ()).unwrap();
    assert!(found.chunks.iter().all(|chunk| chunk.hit));
    let others = Request { tenant: None, ..request.clone() };
    let found = second.generate(&others, &mut ()).unwrap();
    assert!(found.chunks.iter().all(|chunk| !chunk.hit));
    let unknown = second.restore_prompt(&path, Some("bob"));
    assert!(matches!(unknown, Err(Error::Chunk(kvchunk::Error::UnknownTenant(_)))));
}

#[test]
fn what_the_caches_have_no_room_for_is_counted_and_nothing_is_held() {
    let (_folder, path) = file();
    let request = request(PromptTokens::Chunked(Golden::load("llama").prompt), CELL);
    let (computed, tokens) = saved(&mut engine("llama", DType::F32.into()), &request, &path);
    let config = EngineConfig { block_size: 4, kv_memory: Some(24 << 10), ..EngineConfig::default() };
    let mut small = Engine::new(load_model("llama"), CpuBackend::new(), b"t", &config).unwrap();
    let some = restored(&mut small, &path);
    assert!(some.no_room > 0 && some.tokens + some.no_room == tokens, "{some:?} of {tokens}");
    if let Ok(answer) = small.generate(&request, &mut ()) {
        assert_eq!(answer.tokens, computed.tokens);
    }
    small.check_invariants().unwrap();
}

#[test]
fn files_of_others_and_damaged_files_change_no_answer() {
    let (_folder, path) = file();
    let request = request(PromptTokens::Chunked(Golden::load("llama").prompt), CELL);
    let (computed, tokens) = saved(&mut engine("llama", DType::F32.into()), &request, &path);
    for mut other in [engine("qwen2", DType::F32.into()), engine("llama", DType::BF16.into())] {
        let refused = other.restore_prompt(&path, None);
        assert!(matches!(refused, Err(Error::Tier(kvtier::Error::OtherScope { .. }))), "{refused:?}");
        assert_eq!(other.chunks().unwrap().chunks(), []);
    }
    let intact = fs::read(&path).unwrap();
    for at in (0..intact.len()).step_by(intact.len() / 23) {
        let mut bytes = intact.clone();
        bytes[at] ^= 1;
        fs::write(&path, &bytes).unwrap();
        let mut engine = engine("llama", DType::F32.into());
        match engine.restore_prompt(&path, None) {
            Ok(all) => assert_eq!(all.tokens, tokens, "a byte between two records"),
            Err(Error::Tier(kvtier::Error::DamagedFile { .. } | kvtier::Error::NoRecords { .. })) => {}
            Err(error) => panic!("{error}"),
        }
        assert_eq!(engine.generate(&request, &mut ()).unwrap().tokens, computed.tokens, "{at}");
        engine.check_invariants().unwrap();
    }
    let fixed = EngineConfig { cache: CacheKind::Static, ..EngineConfig::default() };
    let mut fixed = Engine::new(load_model("llama"), CpuBackend::new(), b"t", &fixed).unwrap();
    fs::write(&path, &intact).unwrap();
    assert!(matches!(fixed.restore_prompt(&path, None), Err(Error::NoChunks(_))));
    assert!(matches!(fixed.save_prompt(&request, &path), Err(Error::NoChunks(_))));
    assert_eq!(fs::read(&path).unwrap(), intact, "the older file stays");
}
