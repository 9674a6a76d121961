//! The places of requests: how many are answered or wait at the same time, of all tenants together and of each.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::refusal::{Kind, Refusal};

/// The places of a server.
#[derive(Debug)]
pub(crate) struct Seats {
    most: usize,
    /// The maximum number of places of one tenant.
    share: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    /// By the tag of the tenant; `None` for the default tenant.
    of: HashMap<Option<Arc<str>>, usize>,
}

/// A request's place.
///
/// # Drop behaviour
/// Gives the place back.
#[derive(Debug)]
pub(crate) struct Seat {
    seats: Arc<Seats>,
    tenant: Option<Arc<str>>,
}

impl Seats {
    /// Creates places for requests of some tenants. Of several tenants, each may have half of the places, so that one of
    /// them cannot take all.
    pub(crate) fn new(most: usize, tenants: usize) -> Self {
        let share = if tenants > 1 { most.div_ceil(2) } else { most };
        Self { most, share, taken: Mutex::default() }
    }

    /// Takes a place.
    ///
    /// # Errors
    /// Refuses if there is none, or if the tenant has its share already.
    pub(crate) fn take(self: &Arc<Self>, tenant: Option<&Arc<str>>) -> Result<Seat, Refusal> {
        let mut taken = self.taken.lock();
        let own = taken.of.get(&tenant.cloned()).copied().unwrap_or(0);
        // A tenant learns nothing about the others from the number in its own refusal.
        let limit = match () {
            () if own >= self.share => self.share,
            () if taken.all >= self.most => self.most,
            () => {
                taken.all += 1;
                *taken.of.entry(tenant.cloned()).or_default() += 1;
                return Ok(Seat { seats: Arc::clone(self), tenant: tenant.cloned() });
            }
        };
        let reason = format!("the server answers {limit} requests already; try again later");
        Err(Refusal { code: Some("rate_limit_exceeded"), ..Refusal::new(Kind::Overloaded, reason) })
    }

    /// Returns the number of places that are taken.
    pub(crate) fn taken(&self) -> usize {
        self.taken.lock().all
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.seats.taken.lock();
        taken.all -= 1;
        let left = taken.of.get_mut(&self.tenant).map(|own| {
            *own -= 1;
            *own
        });
        if left == Some(0) {
            taken.of.remove(&self.tenant);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_among_several_takes_half_of_the_places_and_gives_them_back() {
        let (alice, bob): (Arc<str>, Arc<str>) = ("alice".into(), "bob".into());
        let seats = Arc::new(Seats::new(4, 2));
        let mut own: Vec<Seat> = (0..2).map(|_| seats.take(Some(&alice)).unwrap()).collect();
        assert_eq!(seats.take(Some(&alice)).unwrap_err().kind, Kind::Overloaded);
        let others: Vec<Seat> = (0..2).map(|_| seats.take(Some(&bob)).unwrap()).collect();
        own.pop();
        assert!(seats.take(Some(&alice)).is_ok());
        drop((own, others));
        assert_eq!((seats.taken(), seats.taken.lock().of.len()), (0, 0));
        let alone = Arc::new(Seats::new(2, 1));
        let all: Vec<Seat> = (0..2).map(|_| alone.take(None).unwrap()).collect();
        assert!(alone.take(None).is_err());
        drop(all);
    }
}
