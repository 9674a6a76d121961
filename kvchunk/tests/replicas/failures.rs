//! If a replica fails, the request computes the chunk itself, and no block stays held.

use super::*;

/// A change to a parcel in transit.
type Mischief = fn(Option<ChunkParcel>) -> kvchunk::Result<Option<ChunkParcel>>;

/// A transport that locates pieces like `inner`, and returns parcels that `mischief` has changed.
#[derive(Debug)]
struct Faulty {
    inner: Arc<dyn ReplicaTransport>,
    mischief: Mischief,
}

impl ReplicaTransport for Faulty {
    fn locate(&self, hash: &ChunkHash) -> kvchunk::Result<Vec<ReplicaId>> {
        self.inner.locate(hash)
    }

    fn pull(&self, from: ReplicaId, hash: &ChunkHash) -> kvchunk::Result<Option<ChunkParcel>> {
        (self.mischief)(self.inner.pull(from, hash)?)
    }
}

fn changed(parcel: Option<ChunkParcel>, change: fn(&mut ChunkParcel)) -> Option<ChunkParcel> {
    let mut parcel = parcel?;
    change(&mut parcel);
    Some(parcel)
}

const LOST: Error = Error::RankFailed;

fn differs(what: &'static str) -> Error {
    Error::ReplicaDiffers { what }
}

fn damaged() -> Error {
    Error::Damaged("its digest differs from the sender's".to_owned())
}

/// Returns all the failures, each with the expected error.
fn mischiefs() -> [(Mischief, Error); 9] {
    [
        (|_| Ok(None), Error::ReplicaLacks { replica: ReplicaId(1) }),
        (|_| Err(LOST), LOST),
        (|p| Ok(changed(p, |p| p.record.buffers[0][100] ^= 4)), damaged()),
        (|p| Ok(changed(p, |p| p.record.buffers[1] = p.record.buffers[1][..9].to_vec().into())), damaged()),
        (
            |p| {
                Ok(changed(p, |p| {
                    let all: Vec<u8> =
                        p.record.buffers[..2].iter().flat_map(|buffer| buffer.to_vec()).collect();
                    let (first, second) = all.split_at(p.record.buffers[0].len() - 1);
                    p.record.buffers[0] = first.to_vec().into();
                    p.record.buffers[1] = second.to_vec().into();
                }))
            },
            damaged(),
        ),
        (|p| Ok(changed(p, |p| p.record.id.key = KeyScope::new("x", b"").root())), differs("key")),
        (|p| Ok(changed(p, |p| p.record.id.tokens = [8; 10].into())), differs("tokens")),
        (|p| Ok(changed(p, |p| p.record.id.stored_start = 3)), differs("position of the first key")),
        (|p| Ok(changed(p, |p| p.record.id.label = "bf16".into())), differs("layout")),
    ]
}

#[test]
fn incomplete_pieces_of_a_replica_are_computed() {
    for (mischief, expected) in mischiefs() {
        computed_after(mischief, &expected);
    }
}

fn computed_after(mischief: Mischief, expected: &Error) {
    let mut all = group(2);
    drop(all[1].compute(&[7; 10]));
    let sound = Arc::clone(&all[0].link.transport);
    all[0].link.transport = Arc::new(Faulty { inner: Arc::clone(&sound), mischief });
    assert_eq!(all[0].pull(&[7; 10], 1).unwrap_err(), *expected);
    all.iter().for_each(Replica::assert_nothing_held);
    let RemoteLookup { acquired: Acquired::Compute(reservation), failed, fetched_from: None } =
        all[0].lookup(&[7; 10])
    else {
        panic!("it must be this request's to compute")
    };
    assert_eq!(failed, [(Some(ReplicaId(1)), expected.clone())]);
    drop(reservation); // the request is cancelled
    all.iter().for_each(Replica::assert_nothing_held);
    assert_eq!((all[0].cache.metrics().fetched, all[0].cache.metrics().cached_chunks), (0, 0));
    assert_eq!(all[0].cache.metrics().fetch_failures, failed.len() as u64);
    all[0].link.transport = sound;
    assert_eq!(hit(all[0].lookup(&[7; 10])).1, Some(1), "once it is sound again");
}

#[test]
fn when_one_has_evicted_it_the_next_one_gives_it() {
    let mut all = group(3);
    drop(all[1].compute(&[7; 10]));
    drop(all[2].pull(&[7; 10], 1).unwrap());
    let evicting = all[1].cache.clone();
    let inner = Arc::clone(&all[0].link.transport);
    let then = move || evicting.clear();
    all[0].link.transport = Arc::new(Before { inner, pulls: AtomicUsize::new(0), then });
    let lookup = all[0].lookup(&[7; 10]);
    let lacks = Error::ReplicaLacks { replica: ReplicaId(1) };
    assert_eq!(lookup.failed, [(Some(ReplicaId(1)), lacks)]);
    assert_eq!(hit(lookup).1, Some(2));
    all.iter().for_each(Replica::assert_nothing_held);
}

/// A transport that cannot find out which replicas have a chunk.
#[derive(Debug)]
struct Blind;

impl ReplicaTransport for Blind {
    fn locate(&self, _: &ChunkHash) -> kvchunk::Result<Vec<ReplicaId>> {
        Err(LOST)
    }

    fn pull(&self, from: ReplicaId, _: &ChunkHash) -> kvchunk::Result<Option<ChunkParcel>> {
        panic!("{from} was never named")
    }
}

#[test]
fn where_nobody_can_be_asked_the_request_computes() {
    let mut all = group(2);
    all[0].link.transport = Arc::new(Blind);
    let lookup = all[0].lookup(&[7; 10]);
    assert_eq!(lookup.failed, [(None, LOST)]);
    assert!(matches!(lookup.acquired, Acquired::Compute(_)));
    drop(lookup);
    all.iter().for_each(Replica::assert_nothing_held);
}

#[test]
fn failures_of_a_tenant_of_another_cache_count_to_the_default_tenant() {
    let mut all = group(2);
    let stranger = all[1].cache.add_tenant(kvchunk::Tenant::new("elsewhere")).unwrap();
    all[0].link.transport = Arc::new(Blind);
    let piece = all[0].hasher.pieces(&[7; 10], usize::MAX).next().unwrap();
    let lookup = all[0].cache.get_chunk_with_remote_lookup(stranger, &piece, 0, &all[0].link);
    assert!(matches!(lookup.acquired, Acquired::Compute(_)));
    assert_eq!(all[0].cache.tenant_metrics(TenantId::default()).fetch_failures, 1);
    drop(lookup);
    all.iter().for_each(Replica::assert_nothing_held);
}

#[test]
fn without_room_nothing_is_pulled() {
    let all = group(2);
    drop(all[1].compute(&[7; 10]));
    let held: Vec<PieceHold> = (0..4).map(|chunk| all[0].compute(&[50 + chunk; 8])).collect();
    assert!(matches!(all[0].lookup(&[7; 10]).acquired, Acquired::NoRoom));
    assert_eq!(all[0].pull(&[7; 10], 1).unwrap_err(), Error::NoRoomForChunk { blocks: 3 });
    drop(held);
    assert_eq!(hit(all[0].lookup(&[7; 10])).1, Some(1), "others are evicted for it");
    all.iter().for_each(Replica::assert_nothing_held);
}

#[test]
fn a_weak_hash_proves_nothing_elsewhere() {
    let config = ChunkCacheConfig { hash_algorithm: HashAlgorithm::Xxh3, ..ChunkCacheConfig::default() };
    let mut all = group_of(2, "f32", Execution::Immediate, &config);
    drop(all[1].compute(&[7; 10]));
    assert!(matches!(all[0].lookup(&[7; 10]).acquired, Acquired::Compute(_)));
    assert_eq!(all[0].pull(&[7; 10], 1).unwrap_err(), Error::WeakHash);
    let hash = all[1].hasher.pieces(&[7; 10], 64).next().unwrap().hash();
    assert_eq!(all[1].link.device.pack(&all[1].cache, &hash), Ok(None), "nor is it given");
    all[0].link.transport = Arc::new(Blind);
    let lookup = all[0].lookup(&[7; 10]);
    assert!(matches!(lookup.acquired, Acquired::Compute(_)) && lookup.failed.is_empty(), "nobody is asked");
    drop(lookup);
    all.iter().for_each(Replica::assert_nothing_held);
}

#[test]
fn codes_under_other_static_scales_are_not_taken() {
    let all = group_of(2, "fp8-e4m3", Execution::Immediate, &ChunkCacheConfig::default());
    drop(all[1].compute(&[7; 10]));
    let device = &all[0].link.device;
    device.arena.set_scales(device.stream.as_ref(), &[2.0; 2], &[1.0; 2]).unwrap();
    assert_eq!(all[0].pull(&[7; 10], 1).unwrap_err(), differs("static scales"));
    all.iter().for_each(Replica::assert_nothing_held);
}

#[test]
fn a_request_that_is_at_it_too_long_is_not_waited_for() {
    let config = ChunkCacheConfig { max_wait_ms: 20, ..ChunkCacheConfig::default() };
    let all = group_of(2, "f32", Execution::Immediate, &config);
    let Acquired::Compute(reservation) = all[0].lookup(&[7; 10]).acquired else { panic!() };
    let limit = Duration::from_millis(20);
    assert_eq!(all[0].pull(&[7; 10], 1).unwrap_err(), Error::StillBusy { limit });
    drop(reservation);
    all.iter().for_each(Replica::assert_nothing_held);
}

#[test]
fn a_replica_that_has_left_gives_nothing() {
    let mut all = group(2);
    drop(all[1].compute(&[7; 10]));
    drop(all.remove(1));
    assert!(matches!(all[0].lookup(&[7; 10]).acquired, Acquired::Compute(_)));
    let error = all[0].pull(&[7; 10], 1).unwrap_err();
    assert!(matches!(&error, Error::ReplicaFailed { replica: ReplicaId(1), .. }), "{error}");
    all[0].assert_nothing_held();
}
