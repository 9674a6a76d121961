//! The accounts on a disk of the tenants that have used it in this process.

use std::collections::BTreeMap;

use kvtier::{AccountId, AccountUsage};
use parking_lot::Mutex;

use super::TierLink;
use crate::cache::{ChunkCacheManager, Tenant, TenantId};

/// The tags and the accounts of tenants.
#[derive(Debug, Default)]
pub(super) struct TierAccounts(Mutex<BTreeMap<TenantId, (String, AccountId)>>);

impl TierLink {
    /// Returns the account of a tenant of `cache` on the disk. It follows from the tenant's salt and from the model,
    /// so that a tenant has the same account after a restart. The first call for a tenant sets the account's
    /// [limit](Tenant::max_disk_bytes).
    pub fn account(&self, cache: &ChunkCacheManager, tenant: TenantId) -> AccountId {
        let mut known = self.accounts.0.lock();
        if let Some((_, account)) = known.get(&tenant) {
            return *account;
        }
        // Tenants that were never added have no pieces of their own.
        let Some(described) = cache.described(tenant) else { return AccountId::DEFAULT };
        let Tenant { tag, salt, max_disk_bytes, .. } = &described;
        let root = described.root(self.slab.scope());
        let account = if salt.is_empty() { AccountId::DEFAULT } else { AccountId::of(&root) };
        self.slab.limit_account(account, *max_disk_bytes);
        known.insert(tenant, (tag.clone(), account));
        account
    }

    /// Returns what each tenant that has used the disk in this process has there, by its tag.
    pub(super) fn tenants(&self) -> BTreeMap<String, AccountUsage> {
        let known = self.accounts.0.lock();
        known.values().map(|(tag, account)| (tag.clone(), self.slab.account(*account))).collect()
    }
}
