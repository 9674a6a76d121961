//! Four threads acquire real chunks, and put chunks and the whole pool to sleep and wake them, at the same
//! time.

use super::*;
use kvchunk::Error;
use rstest::rstest;

const THREADS: u64 = 4;
const ROUNDS: u64 = 15;
const CALLS: u64 = 100;
const CHUNKS: u32 = 30;

#[rstest]
fn four_threads_sleep_and_wake_and_every_byte_stays_right(
    #[values(SleepForm::Plain, SleepForm::Compressed)] form: SleepForm,
) {
    let w = World::over(40..80, "bf16", Execution::Immediate, form, 1 << 20);
    let expected: Vec<Vec<u8>> = (0..CHUNKS)
        .map(|chunk| {
            let fresh = World::plain("bf16", Execution::Immediate);
            fresh.answer(&fresh.store(&tokens(chunk)))
        })
        .collect();
    let rule = ColdRule { min_accesses: 50, spare_younger_than: Duration::ZERO, ..ColdRule::default() };
    let work = |seed: u64| {
        let mut random = 0x1234_5678_9abc_def1 ^ (seed << 7);
        for _ in 0..CALLS {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let chunk = (random >> 8) as u32 % CHUNKS;
            match random % 32 {
                0 | 1 => match w.cache.sleep_pool(&w.reserved, w.stream.as_ref()) {
                    Ok(_) | Err(Error::PoolInUse { .. } | Error::PoolAsleep | Error::PoolMoving) => {}
                    Err(error) => panic!("{error}"),
                },
                2..6 => match w.cache.wake_pool(w.stream.as_ref()) {
                    Ok(_) | Err(Error::PoolMoving) => {}
                    Err(error) => panic!("{error}"),
                },
                6 | 7 => drop(w.cache.sleep_cold_chunks(rule)),
                8 => drop(w.cache.wake_up_chunks(&[w.hash(&tokens(chunk))])),
                9 => drop(w.cache.evict_lru()),
                _ => match w.acquire(&tokens(chunk)) {
                    Acquired::Hit(found) => {
                        assert_eq!(w.answer(&found), expected[chunk as usize], "chunk {chunk}");
                    }
                    Acquired::Compute(reservation) => {
                        w.compute(&reservation);
                        let stored = reservation.store();
                        assert_eq!(w.answer(&stored), expected[chunk as usize], "chunk {chunk}");
                    }
                    Acquired::Busy(waiter) => waiter.wait(),
                    Acquired::NoRoom => {}
                },
            }
        }
    };
    for round in 0..ROUNDS {
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let work = &work;
                scope.spawn(move || work(round * THREADS + thread));
            }
        });
        w.check();
        // At this point, no piece is held.
        match w.cache.sleep_pool(&w.reserved, w.stream.as_ref()) {
            Ok(_) | Err(Error::PoolAsleep) => assert!(!w.cache.is_pool_awake()),
            Err(error) => panic!("{error}"),
        }
    }
    w.cache.wake_pool(w.stream.as_ref()).unwrap();
    w.check();
    let m = w.cache.metrics();
    assert!(m.hit_count > 50 && m.slept > 20 && m.woken > 5 && m.lost == 0, "{m:?}");
    for chunk in 0..CHUNKS {
        if let Acquired::Hit(found) = w.acquire(&tokens(chunk)) {
            assert_eq!(w.answer(&found), expected[chunk as usize]);
        }
    }
    w.cache.clear();
    assert_eq!((w.free(), w.sleep.usage().pieces), (40, 0));
    assert_eq!(w.reserved.asleep(), []);
    w.check();
}
