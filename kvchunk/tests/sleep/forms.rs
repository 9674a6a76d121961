//! Pieces that sleep one by one: plain, compressed, quantised.

use super::*;
use kvchunk::{Error, NotWoken, SleepUsage, Tenant};
use rstest::rstest;

/// Fills the whole pool with other chunks, so that no data of the sleeping pieces is left on the device.
fn overwrite(w: &World) {
    let mut chunk = 1000;
    while w.free() >= 4 {
        drop(w.store(&tokens(chunk)));
        chunk += 1;
    }
    w.check();
}

#[rstest]
fn plain_and_compressed_bring_every_bit_back(
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
    #[values("f32", "bf16", "int8:8", "fp8-e4m3")] format: &str,
    #[values(SleepForm::Plain, SleepForm::Compressed)] form: SleepForm,
) {
    let w = World::new(format, execution, form, 1 << 20);
    let chunks: Vec<Vec<u32>> = (0..5).map(tokens).collect();
    let before: Vec<(Vec<u8>, Vec<u8>)> = chunks
        .iter()
        .map(|chunk| {
            let stored = w.store(chunk);
            (w.bytes(stored.block_ids()), w.answer(&stored))
        })
        .collect();
    assert_eq!(w.sleep_all().unwrap(), 5);
    let usage = w.sleep.usage();
    let blocks: usize = chunks.iter().map(|chunk| chunk.len().div_ceil(BLOCK)).sum();
    assert_eq!((usage.pieces, w.free()), (5, POOL.len()));
    assert_eq!(usage.device_bytes, blocks * w.arena().layout().block_bytes());
    assert!(usage.host_bytes > 0 && usage.host_bytes <= usage.limit_bytes);
    match form {
        SleepForm::Plain => assert_eq!(usage.saved_bytes(), 0),
        _ => assert!(usage.saved_bytes() > 0, "{usage:?}"),
    }
    overwrite(&w);
    for (chunk, (bytes, answer)) in chunks.iter().zip(&before) {
        let woken = w.hit(chunk);
        assert_eq!(&w.bytes(woken.block_ids()), bytes);
        assert_eq!(&w.answer(&woken), answer);
        assert!(woken.is_exact());
        w.check();
    }
    let m = w.cache.metrics();
    assert_eq!((m.slept, m.woken, m.lost, m.approximate_hits), (5, 5, 0, 0));
    assert_eq!(w.sleep.usage(), SleepUsage { limit_bytes: 1 << 20, ..SleepUsage::default() });
}

#[rstest]
// For integers, the limit is half a step of a group whose largest magnitude is at most 2. For fp8, it is half
// the spacing of numbers with three mantissa bits.
#[case("int8:8", 2.0 / 127.0 / 2.0)]
#[case("int4:8", 2.0 / 7.0 / 2.0)]
#[case("fp8-e4m3", 2.0 / 16.0)]
fn quantised_sleep_stays_within_its_bound_and_counts_as_approximate(
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
    #[case] format: &str,
    #[case] bound: f32,
) {
    let w = World::new("f32", execution, SleepForm::Quantised(format.parse().unwrap()), 1 << 20);
    let chunk = tokens(3);
    let before = w.bytes(w.store(&chunk).block_ids());
    assert_eq!(w.sleep_all().unwrap(), 1);
    assert!(w.sleep.usage().saved_bytes() * 2 > w.sleep.usage().device_bytes);
    overwrite(&w);
    let woken = w.hit(&chunk);
    let after = w.bytes(woken.block_ids());
    let values = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let errors = values(&before).into_iter().zip(values(&after)).map(|(a, b)| (a - b).abs());
    let largest = errors.fold(0.0, f32::max);
    assert!(largest > 0.0 && largest <= bound * 1.01, "{largest} of {bound}");
    assert!(!woken.is_exact());
    assert_eq!((w.cache.metrics().approximate_hits, w.cache.metrics().hit_count), (1, 1));
    drop(woken);
    assert_eq!(w.sleep.usage().pieces, 0);
    w.check();
}

#[rstest]
fn eight_bit_floats_have_the_scales_of_each_piece(
    #[values("f32", "bf16")] stored: &str,
    #[values("fp8-e4m3", "fp8-e4m3:head", "fp8-e5m2")] format: &str,
) {
    let w = World::new(stored, Execution::Deferred, SleepForm::Quantised(format.parse().unwrap()), 1 << 20);
    // With a scale of 1, the first magnitude is below the smallest number of either format, and the second
    // one is above the largest.
    let magnitudes = [1e-7, 1e6];
    let chunks = [tokens(3), tokens(4)];
    let values = |chunk: &PieceHold| -> Vec<f32> {
        let bytes = w.bytes(chunk.block_ids());
        match stored {
            "f32" => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
            _ => bytes
                .chunks_exact(2)
                .map(|b| f32::from_bits(u32::from(u16::from_le_bytes(b.try_into().unwrap())) << 16))
                .collect(),
        }
    };
    let before: Vec<Vec<f32>> = chunks
        .iter()
        .zip(magnitudes)
        .map(|(chunk, magnitude)| {
            let reservation = w.reserve(chunk);
            w.compute_up_to(&reservation, magnitude);
            values(&reservation.store())
        })
        .collect();
    assert_eq!(w.sleep_all().unwrap(), 2);
    overwrite(&w);
    for ((chunk, before), magnitude) in chunks.iter().zip(before).zip(magnitudes) {
        let after = values(&w.hit(chunk));
        // With at least two mantissa bits, the error is at most an eighth of the largest number.
        let largest = before.iter().zip(after).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(largest > 0.0 && largest <= magnitude / 8.0, "{largest} of {magnitude}");
    }
    w.check();
}

#[test]
fn forms_that_do_not_fit_are_refused() {
    let w = World::plain("int8:8", Execution::Immediate);
    let sleep = |device: &KvArena, form, budget| {
        let stream = w.backend.stream().unwrap();
        ArenaSleep::new(w.backend.clone(), device.clone(), stream, form, budget).unwrap_err()
    };
    let int4 = SleepForm::Quantised("int4:8".parse().unwrap());
    assert!(matches!(
        sleep(w.arena(), int4, 1 << 20),
        Error::Core(kvcore::Error::InvalidFormat { reason, .. }) if reason.contains("already")
    ));
    let dense = World::plain("f32", Execution::Immediate);
    let bf16 = SleepForm::Quantised(DType::BF16.into());
    assert!(matches!(
        sleep(dense.arena(), bf16, 1 << 20),
        Error::Core(kvcore::Error::InvalidFormat { reason, .. }) if reason.contains("plain")
    ));
    let odd = SleepForm::Quantised("int8:7".parse().unwrap());
    assert!(matches!(
        sleep(dense.arena(), odd, 1 << 20),
        Error::Core(kvcore::Error::NotMultiple { of: 7, .. })
    ));
    let block = dense.arena().layout().block_bytes();
    assert!(matches!(
        sleep(dense.arena(), SleepForm::Plain, block - 1),
        Error::Core(kvcore::Error::NotEnoughMemory { .. })
    ));
}

#[rstest]
fn a_full_host_keeps_the_rest_awake(
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
    #[values(SleepForm::Plain, SleepForm::Compressed, SleepForm::Quantised("int8:8".parse().unwrap()))]
    form: SleepForm,
) {
    let one = {
        let w = World::new("f32", execution, form, 1 << 20);
        drop(w.store(&tokens(0)));
        w.sleep_all().unwrap();
        w.sleep.usage().host_bytes
    };
    let w = World::new("f32", execution, form, one + one / 2);
    let (first, second) = (tokens(0), tokens(7)); // of equal length
    let before = [&first, &second].map(|chunk| w.bytes(w.store(chunk).block_ids()));
    assert_eq!(w.sleep_all().unwrap(), 1);
    let refused = w.sleep_all().unwrap_err();
    assert!(
        matches!(refused, Error::SleepFull { asked, free, .. } if asked > free && free < one),
        "{refused:?}"
    );
    w.check();
    assert_eq!((w.cache.metrics().sleeping_chunks, w.sleep.usage().pieces), (1, 1));
    assert_eq!(w.bytes(w.lookup(&second).unwrap().block_ids()), before[1], "awake and as it was");
    if form == SleepForm::Plain {
        assert_eq!(w.bytes(w.hit(&first).block_ids()), before[0]);
    }
    w.cache.clear();
    assert_eq!(w.sleep.usage().pieces, 0, "forgotten pieces give their memory back");
    w.check();
}

#[test]
fn waking_without_room_leaves_the_piece_asleep_and_whole() {
    let w = World::new("bf16", Execution::Deferred, SleepForm::Compressed, 1 << 20);
    let chunk = tokens(4);
    let before = w.bytes(w.store(&chunk).block_ids());
    w.sleep_all().unwrap();
    let held: Vec<PieceHold> = (0..20).map(|i| w.store(&[i + 5000; 16])).collect();
    assert_eq!(w.cache.wake_up_chunks(&[w.hash(&chunk)]), [(w.hash(&chunk), NotWoken::NoRoom)]);
    drop(held);
    assert_eq!(w.cache.wake_up_chunks(&[w.hash(&chunk)]), []);
    assert_eq!(w.bytes(w.hit(&chunk).block_ids()), before);
    w.check();
}

#[test]
fn one_tenants_chunks_sleep_and_anothers_do_not() {
    let mut w = World::plain("bf16", Execution::Immediate);
    let [alice, bob] = ["alice", "bob"].map(|tag| w.cache.add_tenant(Tenant::new(tag)).unwrap());
    for (tenant, salt) in [(alice, b"alice".as_slice()), (bob, b"bob")] {
        (w.tenant, w.hasher) = (tenant, hasher(salt));
        drop(w.store(&tokens(1)));
        drop(w.store(&tokens(2)));
    }
    w.clock.advance(Duration::from_secs(7200));
    assert_eq!(w.cache.sleep_cold_chunks_of(alice, ColdRule::default()).unwrap(), 2);
    let sleeping = |tenant| w.cache.tenant_metrics(tenant).sleeping_chunks;
    assert_eq!((sleeping(alice), sleeping(bob)), (2, 0));
    assert_eq!(w.cache.sleep_cold_chunks_of(TenantId::default(), ColdRule::default()).unwrap(), 0);
    assert_eq!(w.cache.sleep_cold_chunks(ColdRule::default()).unwrap(), 2, "the others'");
    assert_eq!((sleeping(alice), sleeping(bob), w.sleep.usage().pieces), (2, 2, 4));
    w.check();
}

#[rstest]
fn rule_8_a_bit_that_changed_in_host_memory_is_found_and_the_chunk_is_recomputed(
    #[values(Execution::Immediate, Execution::Deferred)] execution: Execution,
    #[values("plain", "int8:8", "int4:8", "fp8-e4m3")] form: &str,
) {
    let form: SleepForm = form.parse().unwrap();
    // An arena of eight-bit floats contains only codes, because each piece has its own scales.
    let storages = match form {
        SleepForm::Quantised(kvcore::KvFormat::Fp8 { .. }) | SleepForm::Plain => 2,
        _ => 4,
    };
    for storage in 0..storages {
        let w = World::new("f32", execution, form, 1 << 20);
        let chunk = tokens(3);
        let first = w.store(&chunk);
        let before = w.bytes(first.block_ids());
        drop(first);
        assert_eq!(w.sleep_all().unwrap(), 1);
        let host = w.sleep.host_arena().unwrap().storages().nth(storage).unwrap();
        let view = TensorView::new(Arc::clone(host), DType::U8, &[host.len()]).unwrap();
        let mut bytes = vec![0; host.len()];
        w.stream.read(&view, &mut bytes).unwrap();
        // No other bytes were ever saved in this storage.
        let at = bytes.iter().rposition(|byte| *byte != 0).unwrap();
        bytes[at] ^= 0x10;
        w.stream.write(&view, &bytes).unwrap();
        let reservation = w.reserve(&chunk);
        assert_eq!((w.cache.metrics().lost, w.sleep.usage().pieces), (1, 0), "storage {storage}");
        w.compute(&reservation);
        let stored = reservation.store();
        assert_eq!(w.bytes(stored.block_ids()), before);
        assert!(stored.is_exact());
        w.check();
    }
}
