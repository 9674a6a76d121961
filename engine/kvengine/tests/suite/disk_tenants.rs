//! Tenants on a disk: each has an account, which survives a restart, and a limit of its own.

use std::path::Path;
use std::time::Duration;

use kvchunk::{ChunkedPrompt, LoadRule, ReuseCell, Tenant, TierMetrics};
use kvcore::DType;
use kvengine::{Engine, PromptTokens, Request};
use kvtier::{AccountUsage, Slab, SlabConfig};

use crate::asking::engine;
use crate::common::Golden;

const PATIENCE: Duration = Duration::from_secs(20);
const CELL: u64 = 8 << 10;

/// Starts an engine with two tenants, of which the second one may use so many bytes of the disk in `folder`.
fn started(folder: &Path, limit: Option<u64>) -> Engine {
    let mut engine = engine("llama", DType::F32.into());
    for tenant in [Tenant::new("alice"), Tenant { max_disk_bytes: limit, ..Tenant::new("bob") }] {
        engine.chunks().unwrap().add_tenant(tenant).unwrap();
    }
    let config = SlabConfig { limit: 8 << 20, cell_bytes: CELL as usize, ..SlabConfig::default() };
    engine.open_disk(folder, config).unwrap();
    engine.load_from_disk(LoadRule::Always(PATIENCE));
    engine
}

/// Asks as a tenant. Returns the number of cached tokens.
fn ask(engine: &mut Engine, tenant: Option<&str>, tokens: PromptTokens) -> usize {
    let cell = ReuseCell::SEQUENTIAL_WITH_SYSTEM;
    let tenant = tenant.map(str::to_owned);
    let request = Request { tenant, cell, max_new_tokens: 2, ..Request::new(tokens) };
    let answer = engine.generate(&request, &mut ()).unwrap();
    assert!(engine.disk().unwrap().flush(PATIENCE));
    answer.cached_tokens
}

fn account(engine: &Engine, tag: &str) -> AccountUsage {
    engine.disk_metrics().unwrap().tenants.get(tag).copied().unwrap_or_default()
}

#[test]
fn each_tenant_has_an_account_that_survives_a_restart() {
    let (prompt, folder) = (Golden::load("llama").prompt, tempfile::tempdir().unwrap());
    let mut first = started(folder.path(), None);
    let tenants = [None, Some("alice"), Some("bob")];
    for tenant in tenants {
        ask(&mut first, tenant, PromptTokens::Chunked(prompt.clone()));
    }
    // Blocks of ordinary prompts belong to their tenants, too.
    let before = account(&first, "alice");
    ask(&mut first, Some("alice"), PromptTokens::Plain((3..40).collect()));
    assert!(account(&first, "alice").records > before.records);
    let tags = [Tenant::DEFAULT_TAG, "alice", "bob"];
    let accounts = tags.map(|tag| account(&first, tag));
    let usage = first.disk().unwrap().usage();
    assert!(accounts.iter().all(|of| of.records > 0 && of.bytes >= CELL * of.records as u64));
    assert_eq!(accounts.iter().map(|of| of.bytes).sum::<u64>(), usage.bytes);
    assert_eq!(accounts.iter().map(|of| of.records).sum::<usize>(), usage.records);
    let text = TierMetrics::prometheus(&[("disk", &first.disk_metrics().unwrap())]);
    let bytes = format!("kv_tier_tenant_bytes{{tier=\"disk\",tenant=\"alice\"}} {}.0\n", accounts[1].bytes);
    assert!(text.contains(&bytes) && !text.contains("kv_tier_tenant_limit_bytes"), "{text}");
    drop(first);
    let inspected = Slab::inspect(folder.path(), true, &mut |_, _| ()).unwrap();
    assert_eq!((inspected.scopes.len(), inspected.scopes[0].accounts.len()), (1, 3));
    let mut second = started(folder.path(), None);
    assert!(second.disk_metrics().unwrap().tenants.is_empty(), "nobody has used the disk yet");
    for (tenant, (tag, before)) in tenants.into_iter().zip(tags.into_iter().zip(accounts)) {
        assert!(ask(&mut second, tenant, PromptTokens::Chunked(prompt.clone())) > 0, "{tag}");
        let after = account(&second, tag);
        // The answers are the same, so nothing new is stored.
        assert_eq!((after.bytes, after.records), (before.bytes, before.records), "{tag}");
    }
}

#[test]
fn a_tenant_that_stores_much_stays_within_its_limit_and_costs_others_nothing() {
    let (prompt, folder) = (Golden::load("llama").prompt, tempfile::tempdir().unwrap());
    let limit = 12 * CELL;
    let mut engine = started(folder.path(), Some(limit));
    for tenant in [None, Some("alice")] {
        ask(&mut engine, tenant, PromptTokens::Chunked(prompt.clone()));
    }
    let before = [Tenant::DEFAULT_TAG, "alice"].map(|tag| account(&engine, tag));
    for first in 0..20 {
        let chunk =
            |at: u32| (0..9).map(|token| 3 + (first * 5 + at * 11 + token * (1 + first % 7)) % 40).collect();
        let many = ChunkedPrompt::new(vec![5, 6, 7, 8], (0..4).map(chunk).collect(), vec![4]).unwrap();
        ask(&mut engine, Some("bob"), PromptTokens::Chunked(many));
        let bob = account(&engine, "bob");
        assert!(bob.bytes <= limit && bob.limit_bytes == Some(limit), "{bob:?}");
    }
    let bob = account(&engine, "bob");
    assert!(bob.records > 0 && bob.evicted > 20, "{bob:?}");
    assert_eq!([Tenant::DEFAULT_TAG, "alice"].map(|tag| account(&engine, tag)), before);
    let text = TierMetrics::prometheus(&[("disk", &engine.disk_metrics().unwrap())]);
    assert!(
        text.contains(&format!("kv_tier_tenant_limit_bytes{{tier=\"disk\",tenant=\"bob\"}} {limit}.0\n"))
    );
    engine.disk().unwrap().check_invariants().unwrap();
    // A limit that was lowered before a restart holds as soon as the tenant uses the disk.
    drop(engine);
    let mut engine = started(folder.path(), Some(limit / 2));
    ask(&mut engine, Some("bob"), PromptTokens::Chunked(prompt));
    assert!(account(&engine, "bob").bytes <= limit / 2);
}

#[test]
fn a_salt_divides_what_a_tenant_has_also_on_the_disk() {
    let (golden, folder) = (Golden::load("llama").prompt, tempfile::tempdir().unwrap());
    let prompts = || [PromptTokens::Chunked(golden.clone()), PromptTokens::Plain((3..40).collect())];
    let mut engine = started(folder.path(), None);
    let ask = |engine: &mut Engine, tenant: &str, salt: Option<&[u8]>| {
        prompts().map(|prompt| {
            let cell = ReuseCell::SEQUENTIAL_WITH_SYSTEM;
            let (tenant, cache_salt) = (Some(tenant.to_owned()), salt.map(Into::into));
            let request = Request { tenant, cache_salt, cell, max_new_tokens: 2, ..Request::new(prompt) };
            let answer = engine.generate(&request, &mut ()).unwrap();
            assert!(engine.disk().unwrap().flush(PATIENCE));
            answer.cached_tokens
        })
    };
    let salts: [Option<&[u8]>; 4] = [None, Some(b"one"), Some(b"two"), Some(b"alice")];
    for salt in salts {
        assert_eq!(ask(&mut engine, "alice", salt), [0, 0], "{salt:?}");
    }
    let own = ask(&mut engine, "alice", None);
    assert!(own.iter().all(|found| *found > 0));
    for salt in salts {
        assert_eq!(ask(&mut engine, "alice", salt), own, "{salt:?}");
    }
    // A tenant's salt leads nowhere else.
    assert_eq!(ask(&mut engine, "bob", Some(b"one")), [0, 0]);
    assert_eq!(account(&engine, "alice").records, 4 * account(&engine, "bob").records);
    drop(engine);
    let mut again = started(folder.path(), None);
    assert_eq!(ask(&mut again, "alice", Some(b"three")), [0, 0]);
    assert_eq!(ask(&mut again, "alice", Some(b"two")), own);
    again.check_invariants().unwrap();
}
