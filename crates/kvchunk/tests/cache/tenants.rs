//! Tenants: keys, quotas, counts and clears of their own.

use super::*;
use kvchunk::{Error, Tenant};

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
    drop(w.store(&[3; 8])); // evicts her own, not a free block's worth of the pool
    assert!(matches!(w.acquire(&[4; 9]), Acquired::NoRoom), "more than her quota leaves");
    w.check();
    w.act_as(b, &bob);
    assert!(matches!(w.acquire(&[2; 8]), Acquired::Compute(_)), "the same tokens are other chunks");
    drop(w.store(&[5; 24]));
    drop(w.store(&[6; 16])); // his own go first, although hers is older
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
