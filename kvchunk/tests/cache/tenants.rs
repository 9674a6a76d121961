//! Each tenant has its own keys, quota and counts, and can be cleared separately.

use super::*;
use kvchunk::{ColdRule, Error, Tenant};

impl World {
    fn act_as(&mut self, tenant: TenantId, who: &Tenant) {
        self.tenant = tenant;
        let context = ChunkContext::new(who.root(&root(b"")), ComputeMode::Alone, &[]);
        self.hasher = ChunkHasher::new(HashAlgorithm::Blake3, context, BLOCK);
    }
}

#[test]
fn tenants_have_keys_quotas_counts_and_clears_of_their_own() {
    let mut w = World::new(10);
    let alice = Tenant { max_blocks: Some(4), ..Tenant::new("alice") };
    let bob = Tenant::new("bob");
    let (a, b) = (w.cache.add_tenant(alice.clone()).unwrap(), w.cache.add_tenant(bob.clone()).unwrap());
    assert_eq!(w.cache.add_tenant(bob.clone()), Err(Error::TenantExists("bob".to_owned())));
    assert_eq!(w.cache.tenant("alice").unwrap(), (a, alice.clone()));
    assert_eq!(w.cache.tenant("carol").unwrap_err(), Error::UnknownTenant("carol".to_owned()));
    w.act_as(a, &alice);
    drop(w.store(&[1; 8]));
    let held = w.store(&[2; 8]);
    drop(w.store(&[3; 8])); // evicts her own piece, although the pool has free blocks
    assert!(matches!(w.acquire(&[4; 9]), Acquired::NoRoom), "more than her quota leaves");
    w.check();
    w.act_as(b, &bob);
    assert!(matches!(w.acquire(&[2; 8]), Acquired::Compute(_)), "the same tokens are other chunks");
    drop(w.store(&[5; 24]));
    drop(w.store(&[6; 16])); // his own piece goes first, although hers is older
    let (ma, mb) = (w.cache.tenant_metrics(a), w.cache.tenant_metrics(b));
    assert_eq!((ma.evictions, ma.uncached, ma.used_blocks, ma.total_blocks), (1, 1, 4, 4));
    assert_eq!((mb.evictions, mb.used_blocks, mb.total_blocks), (1, 4, 10));
    assert_eq!(w.cache.metrics().evictions, 2);
    w.check();
    w.cache.clear_tenant(a);
    assert_eq!((w.cache.tenant_metrics(a).cached_chunks, w.cache.tenant_metrics(b).cached_chunks), (0, 1));
    drop(held);
    w.check();
}

#[test]
fn a_tenant_that_finds_only_others_idle_takes_from_the_fullest() {
    let mut w = World::new(4);
    let b = w.cache.add_tenant(Tenant::new("b")).unwrap();
    drop(w.store(&[1; 16]));
    w.tenant = b;
    drop(w.store(&[2; 4]));
    assert_eq!((w.cache.metrics().evictions, w.cache.tenant_metrics(b).used_blocks), (1, 1));
    w.check();
}

#[test]
fn tenants_that_would_share_chunks_are_refused() {
    let w = World::new(4);
    w.cache.add_tenant(Tenant::new("a")).unwrap();
    let salted = |tag: &str, salt: &[u8]| Tenant { salt: salt.to_vec(), ..Tenant::new(tag) };
    let refused = |tenant| w.cache.add_tenant(tenant).unwrap_err();
    let shared = |tag: &str, other: &str| Error::SharedSalt { tag: tag.to_owned(), other: other.to_owned() };
    assert_eq!(refused(salted("b", b"a")), shared("b", "a"));
    assert_eq!(refused(salted("b", b"")), shared("b", Tenant::DEFAULT_TAG), "the default one has none");
    assert!(matches!(w.cache.tenant("b"), Err(Error::UnknownTenant(_))));
    w.cache.add_tenant(salted("b", b"c")).unwrap();
}

#[test]
fn cleared_pieces_count_to_their_tenant_until_their_last_holder_ends() {
    let mut w = World::new(8);
    let alice = Tenant { max_blocks: Some(3), ..Tenant::new("alice") };
    let a = w.cache.add_tenant(alice.clone()).unwrap();
    w.act_as(a, &alice);
    let held = w.store(&[1; 8]);
    let again = w.hit(&[1; 8]);
    w.cache.clear_tenant(a);
    let used = || w.cache.tenant_metrics(a).used_blocks;
    assert_eq!((used(), w.cache.tenant_metrics(a).cached_chunks), (2, 0));
    assert!(matches!(w.acquire(&[2; 8]), Acquired::NoRoom), "her quota is taken");
    w.check();
    drop(held);
    assert_eq!(used(), 2);
    drop(again);
    assert_eq!((used(), w.free()), (0, 8));
    w.check();
    drop(w.store(&[2; 8]));
}

#[test]
fn pieces_that_are_not_kept_count_to_their_tenant_while_they_are_held() {
    let w = World::with(8, ChunkCacheConfig { max_chunks: 1, ..ChunkCacheConfig::default() }, None);
    let kept = w.store(&[1; 8]);
    let private = w.store(&[2; 8]);
    assert!(w.lookup(&[2; 8]).is_none());
    assert_eq!(w.cache.tenant_metrics(w.tenant).used_blocks, 4);
    w.check();
    drop((kept, private));
    assert_eq!(w.cache.tenant_metrics(w.tenant).used_blocks, 2);
    w.check();
}

#[test]
fn tenants_give_up_their_own_before_they_take_anothers() {
    let store = Store { memory: Memory::with_room(10), exact: true };
    let config = ChunkCacheConfig { max_chunks: 4, ..ChunkCacheConfig::default() };
    let mut w = World::with(32, config, Some(Arc::new(store)));
    let (alice, bob) = (Tenant::new("alice"), Tenant::new("bob"));
    let (a, b) = (w.cache.add_tenant(alice.clone()).unwrap(), w.cache.add_tenant(bob.clone()).unwrap());
    w.act_as(a, &alice);
    drop(w.store(&[1; 8]));
    w.act_as(b, &bob);
    w.advance(1);
    drop(w.store(&[2; 4]));
    w.advance(100);
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::default()).unwrap(), 2, "hers sleeps longer");
    let (ma, mb) = (w.cache.tenant_metrics(a), w.cache.tenant_metrics(b));
    assert_eq!((ma.sleeping_bytes, mb.sleeping_bytes, w.cache.metrics().sleeping_bytes), (2, 1, 3));
    assert_eq!((ma.sleeping_chunks, ma.used_blocks), (1, 0));
    drop((w.store(&[3; 4]), w.store(&[4; 4])));
    let left = |w: &World| (w.cache.tenant_metrics(a).cached_chunks, w.cache.tenant_metrics(b).cached_chunks);
    assert_eq!(left(&w), (1, 3));
    drop(w.store(&[5; 4]));
    assert_eq!((left(&w), w.cache.tenant_metrics(b).sleeping_bytes), ((1, 3), 0), "his own sleeper");
    drop(w.store(&[6; 4]));
    assert_eq!(left(&w), (1, 3), "his own idle one");
    assert!(w.lookup(&[3; 4]).is_none());
    let held = [w.hit(&[4; 4]), w.hit(&[5; 4]), w.hit(&[6; 4])];
    drop(w.store(&[7; 4]));
    assert_eq!((left(&w), w.cache.metrics().sleeping_bytes), ((0, 4), 0), "hers, when his are all in use");
    drop(held);
    w.check();
}
