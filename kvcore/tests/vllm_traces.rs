//! Traces of vLLM's block manager, recorded by `proof/vllm/traces/record.py` and replayed on this pool: hits,
//! block IDs, keys, failures and the order of evictions must be the same.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::sync::Arc;

use kvcore::{
    BlockId, BlockKey, BlockPool, Duplicates, EventQueue, KvEvent, MutableBlocks, PoolConfig, SharedBlocks,
    VllmChain, VllmExtras,
};
use serde_json::Value;

const TRACES: [&str; 7] =
    ["shared_prefixes", "multi_turn", "churn", "salts", "copies", "reset", "speculative"];

fn load(name: &str) -> Value {
    let path = format!("{}/tests/traces/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn number(value: &Value) -> usize {
    value.as_u64().unwrap() as usize
}

fn tokens(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|t| number(t) as u32).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
}

fn key(hex: &Value) -> BlockKey {
    BlockKey::from_bytes(bytes(hex.as_str().unwrap()).try_into().unwrap())
}

type Pairs = Vec<(u32, BlockKey)>;

fn ids(blocks: &[BlockId]) -> Vec<u32> {
    blocks.iter().map(|id| id.0).collect()
}

/// A request, with the state that an engine keeps for it.
struct Request {
    tokens: Vec<u32>,
    extras: VllmExtras,
    keys: Vec<BlockKey>,
    // The order of these fields is the drop order.
    own: MutableBlocks,
    shared: SharedBlocks,
}

impl Request {
    fn append(&mut self, event: &Value, block_size: usize) {
        self.tokens.extend(tokens(&event["append"]));
        self.keys = VllmChain::default().keys(&self.tokens, block_size, &self.extras);
    }

    /// Registers the blocks that are full once the request has `end` tokens.
    fn register(&mut self, end: usize, block_size: usize) {
        let full = end.min(self.tokens.len()) / block_size;
        let known = self.shared.len();
        if full > known {
            let rest = self.own.split_off(full - known).unwrap();
            let filled = std::mem::replace(&mut self.own, rest);
            let parent = known.checked_sub(1).map(|last| self.keys[last]);
            let registered = filled.register(parent, &self.keys[known..full]).unwrap();
            self.shared.append(registered).unwrap();
        }
    }

    fn blocks(&self) -> Vec<u32> {
        [ids(self.shared.ids()), ids(self.own.ids())].concat()
    }
}

struct Replay {
    pool: BlockPool,
    events: Arc<EventQueue>,
    block_size: usize,
    keys: Vec<BlockKey>,
    requests: HashMap<usize, Request>,
    hits: usize,
    evictions: usize,
}

impl Replay {
    fn new(trace: &Value) -> Self {
        let events = Arc::new(EventQueue::new(1000));
        // vLLM evicts blocks before the ones that follow them.
        let config = PoolConfig::default().shards(1).chains(false).duplicates(Duplicates::Keep);
        let config = config.events(events.clone());
        // Block 0 is vLLM's null block, which is never allocated.
        let pool = BlockPool::with_config(1..number(&trace["num_blocks"]) as u32, config).unwrap();
        Self {
            pool,
            events,
            block_size: number(&trace["block_size"]),
            keys: trace["keys"].as_array().unwrap().iter().map(key).collect(),
            requests: HashMap::new(),
            hits: 0,
            evictions: 0,
        }
    }

    fn apply(&mut self, event: &Value) {
        let size = self.block_size;
        match event["op"].as_str().unwrap() {
            "request" => self.request(event),
            "admit" => {
                let request = self.requests.get_mut(&number(&event["req"])).unwrap();
                request.append(event, size);
                // At least one token must be computed, to get logits.
                let usable = request.tokens.len().saturating_sub(1) / size;
                let keys = &request.keys[..usable.min(request.keys.len())];
                let hit = self.pool.cached_prefix(keys);
                assert_eq!(hit * size, number(&event["hit"]));
                let end = hit * size + number(&event["new"]);
                let blocks = (end + event["lookahead"].as_u64().unwrap_or(0) as usize).div_ceil(size);
                let all = request.tokens.len().div_ceil(size);
                let room = if event["must_fit"].as_bool().unwrap_or(false) { all } else { 0 };
                let counts = self.pool.counts();
                let Ok((shared, own)) = self.pool.admit_prefix(keys, blocks, room) else {
                    assert!(event["blocks"].is_null(), "vLLM had room");
                    assert_eq!(self.pool.counts(), counts);
                    return;
                };
                assert_eq!(ids(shared.ids()), tokens(&event["hit_blocks"]));
                self.hits += shared.len();
                (request.shared, request.own) = (shared, own);
                assert_eq!(request.blocks(), tokens(&event["blocks"]));
                request.register(end, size);
            }
            "step" => {
                let request = self.requests.get_mut(&number(&event["req"])).unwrap();
                request.append(event, size);
                let end = number(&event["computed"]) + number(&event["new"]);
                let blocks = (end + event["lookahead"].as_u64().unwrap_or(0) as usize).div_ceil(size);
                let had = request.blocks().len();
                if request.own.allocate(blocks.saturating_sub(had)).is_err() {
                    assert!(event["blocks"].is_null(), "vLLM had room");
                    return;
                }
                assert_eq!(request.blocks()[had..], tokens(&event["blocks"]));
                request.register(end, size);
            }
            "free" | "preempt" => {
                let id = number(&event["req"]);
                let request = self.requests.get_mut(&id).unwrap();
                let reversed: Vec<u32> = request.blocks().into_iter().rev().collect();
                assert_eq!(reversed, tokens(&event["blocks"]));
                request.own = MutableBlocks::none(&self.pool);
                request.shared = SharedBlocks::none(&self.pool);
                if event["op"] == "free" {
                    self.requests.remove(&id);
                }
            }
            "reset" => {
                let counts = self.pool.counts();
                let idle = counts.available() == counts.total;
                assert_eq!(idle, event["done"].as_bool().unwrap());
                if idle {
                    self.pool.clear_cached();
                }
            }
            other => panic!("unknown operation {other}"),
        }
    }

    fn request(&mut self, event: &Value) {
        let lora = event["lora"]
            .as_array()
            .map(|l| (l[0].as_str().unwrap().to_owned(), l[1].as_str().unwrap().to_owned()));
        let extras =
            VllmExtras { cache_salt: event["salt"].as_str().map(str::to_owned), lora, inputs: Vec::new() };
        let request = Request {
            tokens: tokens(&event["tokens"]),
            extras,
            keys: Vec::new(),
            own: MutableBlocks::none(&self.pool),
            shared: SharedBlocks::none(&self.pool),
        };
        self.requests.insert(number(&event["req"]), request);
    }

    /// Checks the queue, the evictions and the new keys against the outcome of the event.
    fn check(&mut self, event: &Value) {
        self.pool.check_invariants().unwrap();
        assert_eq!(self.pool.counts().available(), number(&event["free"]));
        let pairs = |what: &str| event[what].as_array().cloned().unwrap_or_default();
        let (seen, lost) = self.events.drain();
        assert_eq!(lost, 0);
        let (mut removed, mut stored) = (Vec::new(), Vec::new());
        for event in seen {
            match event {
                KvEvent::Removed { key, block } => removed.push((block.0, key)),
                KvEvent::Stored { keys, blocks, .. } => {
                    stored.extend(blocks.into_iter().map(|block| block.0).zip(keys));
                }
                KvEvent::Cleared => {}
            }
        }
        let expected =
            |what| pairs(what).iter().map(|p| (number(&p[0]) as u32, self.keys[number(&p[1])])).collect();
        let (evicted, added): (Pairs, Pairs) = (expected("evicted"), expected("stored"));
        assert_eq!(removed, evicted, "evictions in order");
        assert_eq!(stored, added, "keys of blocks");
        self.evictions += removed.len();
    }

    /// Allocates all remaining blocks, one at a time, and compares their order with vLLM's queue.
    fn drain(&mut self, trace: &Value) {
        let mut held = Vec::new();
        for expected in trace["end"]["queue"].as_array().unwrap() {
            let block = self.pool.allocate(1).unwrap();
            let key = expected[1].as_u64().map(|k| self.keys[k as usize]);
            let evicted = self.events.drain().0.into_iter().find_map(|event| match event {
                KvEvent::Removed { key, .. } => Some(key),
                _ => None,
            });
            assert_eq!((block.ids()[0].0, evicted), (number(&expected[0]) as u32, key));
            held.push(block);
        }
        assert!(self.pool.allocate(1).is_err());
    }
}

#[test]
fn the_same_hits_evictions_keys_and_failures_as_vllm() {
    for name in TRACES {
        let trace = load(name);
        let mut replay = Replay::new(&trace);
        for (i, event) in trace["events"].as_array().unwrap().iter().enumerate() {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                replay.apply(event);
                replay.check(event);
            }));
            assert!(outcome.is_ok(), "{name}: event {i}: {event}");
        }
        let totals = &trace["totals"];
        assert_eq!(replay.hits * replay.block_size, number(&totals["hit_tokens"]), "{name}");
        assert_eq!(replay.evictions, number(&totals["evicted"]), "{name}");
        replay.drain(&trace);
    }
}

#[test]
fn keys_are_vllms_to_the_bit() {
    let golden = load("sha256_cbor");
    for seed in golden["seeds"].as_array().unwrap() {
        assert_eq!(VllmChain::with_seed(seed["seed"].as_str().unwrap()).none_hash(), key(&seed["none_hash"]));
    }
    let (mut compared, mut skipped) = (0, Vec::new());
    for vector in golden["vectors"].as_array().unwrap() {
        let name = vector["name"].as_str().unwrap();
        let Some((extras, start)) = extras(&vector["extra"]) else {
            skipped.push(name);
            continue;
        };
        let parent = if vector["parent"].is_null() {
            VllmChain::default().none_hash()
        } else {
            key(&vector["parent"])
        };
        let got = VllmChain::child(&parent, &tokens(&vector["tokens"]), start, &extras);
        assert_eq!(got, key(&vector["digest"]), "{name}");
        compared += 1;
    }
    assert!(compared >= 40, "{compared} vectors");
    // Extras that other vLLM releases hash, extras that no request has, and prompts without tokens.
    let others = [
        "prompt embeddings",
        "one token of lookahead",
        "salt and two tokens of lookahead",
        "salt without a tag, as before 0.31",
        "adapter without a tag and an image",
        "empty extra keys",
    ];
    assert_eq!(skipped, others);
}

/// Returns a request that has these extras in a block, and the start of that block in the request. Returns
/// `None` for extras that only other releases of vLLM use.
fn extras(value: &Value) -> Option<(VllmExtras, usize)> {
    let mut extras = VllmExtras::default();
    // The start is large enough that inputs can begin before the block. A salt occurs only in first blocks.
    let list = value.as_array().cloned().unwrap_or_default();
    if list.is_empty() && !value.is_null() {
        return None;
    }
    let salted = list.iter().any(|e| e[0] == "cache_salt");
    let start = if salted { 0 } else { 1000 };
    for entry in &list {
        match entry[0].as_str()? {
            "lora" => {
                extras.lora = Some((entry[1].as_str()?.to_owned(), entry[2].as_str()?.to_owned()));
            }
            "mm" => {
                let first = start + entry[2].as_i64()?;
                extras.inputs.push((entry[1].as_str()?.to_owned(), usize::try_from(first).ok()?, 10_000));
            }
            "cache_salt" => extras.cache_salt = Some(entry[1].as_str()?.to_owned()),
            _ => return None,
        }
    }
    Some((extras, start as usize))
}
