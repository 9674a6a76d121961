//! Cases for a communicator: every collective against plain loops, for any group of ranks.

use std::sync::Arc;
use std::thread;

use half::{bf16, f16};
use kvcore::{
    Backend, Communicator, CopyTensor, DType, Error, MemoryKind, ReduceOp, Stream, TensorView, Transfer,
    allocate_tensor,
};

use crate::bench::{Failure, Outcome, ensure, numbers};

/// One rank of a group under test: its communicator, and the backend that allocates its tensors.
pub type RankUnderTest = (Arc<dyn Communicator>, Arc<dyn Backend>);

/// Runs every case on all ranks of a group, each rank in a separate thread. If no case fails, the group is
/// still intact afterwards.
///
/// Cases in which groups fail are in [`run_groups`](crate::run_groups). Calls that differ between ranks are
/// left to each implementation's own tests, because implementations detect different things.
pub fn run_collectives(group: &[RankUnderTest]) -> Outcome {
    thread::scope(|scope| {
        let run = |(communicator, backend): &RankUnderTest| {
            let stream = backend.stream()?;
            let rank = TestedRank { of: &**communicator, backend: &**backend, stream: &*stream };
            rank.all().inspect_err(|_| communicator.abort())
        };
        let threads: Vec<_> = group.iter().map(|member| scope.spawn(move || run(member))).collect();
        let outcomes = threads.into_iter().enumerate().map(|(rank, thread)| {
            let outcome = thread.join().unwrap_or_else(|_| Err(Failure::new("a panic")));
            outcome.map_err(|failure| Failure {
                message: format!("rank {rank} of {}: {failure}", group.len()),
                ..failure
            })
        });
        // The rank that failed has aborted the other ranks.
        let mut failures: Vec<Failure> = outcomes.filter_map(Result::err).collect();
        failures.sort_by_key(|failure| matches!(failure.error, Some(Error::RankAborted(_))));
        failures.into_iter().next().map_or(Ok(()), Err)
    })
}

/// The element counts to test; doubled for 4-bit elements.
const SIZES: [usize; 4] = [0, 1, 7, 1001];

#[derive(Clone, Copy)]
struct TestedRank<'a> {
    of: &'a dyn Communicator,
    backend: &'a dyn Backend,
    stream: &'a dyn Stream,
}

impl TestedRank<'_> {
    fn all(self) -> Outcome {
        for dtype in DType::ALL {
            for n in SIZES.map(|n| if dtype == DType::I4 { 2 * n } else { n }) {
                self.broadcasts(dtype, n)?;
                self.gathers(dtype, n)?;
                self.passes_on(dtype, n)?;
                self.rings(dtype, n)?;
                self.collects(dtype, n)?;
                for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
                    self.reduces(dtype, n, op)?;
                }
            }
        }
        self.keeps_the_order_of_the_stream()?;
        self.refuses_what_does_not_fit()?;
        Ok(self.of.check()?)
    }

    /// Returns a zeroed tensor. It may be empty.
    fn tensor(self, dtype: DType, shape: &[usize]) -> Outcome<TensorView> {
        let room: Vec<usize> = shape.iter().map(|&n| n.max(2)).collect();
        let view = allocate_tensor(self.backend, MemoryKind::Device, dtype, &room)?;
        let storage = Arc::clone(view.storage());
        Ok(TensorView::new(storage, dtype, shape)?)
    }

    fn upload(self, dtype: DType, shape: &[usize], bytes: &[u8]) -> Outcome<TensorView> {
        let view = self.tensor(dtype, shape)?;
        self.write(&view, bytes)?;
        Ok(view)
    }

    fn write(self, view: &TensorView, bytes: &[u8]) -> Outcome {
        if bytes.is_empty() { Ok(()) } else { Ok(self.stream.write(view, bytes)?) }
    }

    /// Waits for the work, and compares the bytes of a view.
    fn expect(self, what: &str, view: &TensorView, expected: &[u8]) -> Outcome {
        self.of.wait(self.stream)?;
        let mut bytes = vec![0; view.dtype().bytes_for(view.len())?];
        if !bytes.is_empty() {
            self.stream.read(view, &mut bytes)?;
        }
        ensure(bytes == expected, || {
            let at = bytes.iter().zip(expected).position(|(a, b)| a != b);
            format!("{what} of {} elements of {}: byte {at:?} differs", view.len(), view.dtype())
        })
    }

    /// Returns bytes that differ by rank and turn.
    fn bytes(rank: usize, turn: usize, dtype: DType, n: usize) -> Outcome<Vec<u8>> {
        let seed = 31 + 7 * rank as u32 + 1009 * turn as u32;
        Ok(numbers(seed, dtype.bytes_for(n)?).iter().map(|x| (127.5 + 127.5 * x) as u8).collect())
    }

    fn broadcasts(self, dtype: DType, n: usize) -> Outcome {
        for root in 0..self.of.ranks() {
            let view = self.upload(dtype, &[n], &Self::bytes(self.of.rank(), root, dtype, n)?)?;
            self.of.broadcast(self.stream, &view, root)?;
            self.expect("a broadcast", &view, &Self::bytes(root, root, dtype, n)?)?;
        }
        Ok(())
    }

    fn gathers(self, dtype: DType, n: usize) -> Outcome {
        let (own, ranks) = (Self::bytes(self.of.rank(), 0, dtype, n)?, self.of.ranks());
        let all =
            (0..ranks).map(|rank| Self::bytes(rank, 0, dtype, n)).collect::<Outcome<Vec<_>>>()?.concat();
        let (src, dst) = (self.upload(dtype, &[n], &own)?, self.tensor(dtype, &[ranks, n])?);
        self.of.all_gather(self.stream, &src, &dst)?;
        self.expect("an all-gather", &dst, &all)?;
        if n == 0 {
            return Ok(()); // without elements, a rank has no part to gather in place
        }
        let dst = self.tensor(dtype, &[ranks, n])?;
        let src = dst.select(0, self.of.rank())?;
        self.write(&src, &own)?;
        self.of.all_gather(self.stream, &src, &dst)?;
        self.expect("an all-gather in place", &dst, &all)
    }

    /// Reduces numbers whose sums are exact in every type, in any order.
    fn reduces(self, dtype: DType, n: usize, op: ReduceOp) -> Outcome {
        let encode: fn(f32) -> Vec<u8> = match dtype {
            DType::F32 => |x| x.to_ne_bytes().to_vec(),
            DType::F16 => |x| f16::from_f32(x).to_ne_bytes().to_vec(),
            DType::BF16 => |x| bf16::from_f32(x).to_ne_bytes().to_vec(),
            DType::I8 => |x| vec![x as i8 as u8],
            _ => return Ok(()),
        };
        let of = |rank: usize, at: usize| ((rank * 5 + at * 3) % 23) as f32 - 11.0;
        let combined = |at: usize| {
            let all = (0..self.of.ranks()).map(|rank| of(rank, at));
            match op {
                ReduceOp::Sum => all.sum(),
                ReduceOp::Min => all.fold(f32::INFINITY, f32::min),
                ReduceOp::Max => all.fold(f32::NEG_INFINITY, f32::max),
            }
        };
        let own: Vec<u8> = (0..n).flat_map(|at| encode(of(self.of.rank(), at))).collect();
        let view = self.upload(dtype, &[n], &own)?;
        self.of.all_reduce(self.stream, &view, op)?;
        let expected: Vec<u8> = (0..n).flat_map(|at| encode(combined(at))).collect();
        self.expect(&format!("an all-reduce ({op:?})"), &view, &expected)
    }

    /// Passes a tensor from rank to rank: each rank receives it from the previous rank, and sends it to the
    /// next one.
    fn passes_on(self, dtype: DType, n: usize) -> Outcome {
        let (rank, first) = (self.of.rank(), Self::bytes(0, 1, dtype, n)?);
        let view = self.tensor(dtype, &[n])?;
        if rank == 0 {
            self.write(&view, &first)?;
        } else {
            self.of.receive(self.stream, &view, rank - 1)?;
        }
        if rank + 1 < self.of.ranks() {
            self.of.send(self.stream, &view, rank + 1)?;
        }
        self.expect("a tensor that is passed on", &view, &first)
    }

    /// All ranks send to the next rank and receive from the previous one at the same time.
    fn rings(self, dtype: DType, n: usize) -> Outcome {
        let (rank, ranks) = (self.of.rank(), self.of.ranks());
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let (out, into) =
            (self.upload(dtype, &[n], &Self::bytes(rank, 2, dtype, n)?)?, self.tensor(dtype, &[n])?);
        if ranks == 1 {
            return Ok(self.of.exchange(self.stream, &[], &[])?);
        }
        self.of.exchange(self.stream, &[(&out, next)], &[(&into, before)])?;
        self.expect("a tensor from the rank before", &into, &Self::bytes(before, 2, dtype, n)?)
    }

    /// Every other rank sends two tensors of different sizes to the last rank, which receives them in the
    /// same order.
    fn collects(self, dtype: DType, n: usize) -> Outcome {
        let (rank, last) = (self.of.rank(), self.of.ranks() - 1);
        if rank != last {
            let both = [(3, n), (4, 2 * n)].map(|(turn, n)| {
                Self::bytes(rank, turn, dtype, n).and_then(|bytes| self.upload(dtype, &[n], &bytes))
            });
            let [a, b] = both;
            return Ok(self.of.exchange(self.stream, &[(&a?, last), (&b?, last)], &[])?);
        }
        let mut views = Vec::new();
        for (turn, n) in [(3, n), (4, 2 * n)] {
            for from in 0..last {
                views.push((self.tensor(dtype, &[n])?, from, Self::bytes(from, turn, dtype, n)?));
            }
        }
        let receives: Vec<Transfer> = views.iter().map(|(view, from, _)| (view, *from)).collect();
        self.of.exchange(self.stream, &[], &receives)?;
        views.iter().try_for_each(|(view, _, bytes)| self.expect("a collected tensor", view, bytes))
    }

    /// Copies before and after collectives for several rounds, with one wait at the end. Each round writes to
    /// the memory that the previous round's collective reads.
    fn keeps_the_order_of_the_stream(self) -> Outcome {
        let n = 1 << 16;
        let src = self.upload(DType::I8, &[n], &vec![self.of.rank() as u8 + 1; n])?;
        let (view, dst) = (self.tensor(DType::I8, &[n])?, self.tensor(DType::I8, &[n])?);
        for _ in 0..5 {
            self.stream.copy_tensor(&CopyTensor { src: src.clone(), dst: view.clone() })?;
            for op in [ReduceOp::Max, ReduceOp::Sum] {
                self.of.all_reduce(self.stream, &view, op)?;
            }
            self.stream.copy_tensor(&CopyTensor { src: view.clone(), dst: dst.clone() })?;
        }
        self.write(&view, &vec![0; n])?;
        let ranks = self.of.ranks() as u8;
        self.expect("a copy after collectives", &dst, &vec![ranks * ranks; n])
    }

    fn refuses_what_does_not_fit(self) -> Outcome {
        let (of, stream, ranks) = (self.of, self.stream, self.of.ranks());
        let view = self.tensor(DType::F32, &[4, 6])?;
        let column = view.slice(1, 0, 1)?;
        let codes = self.tensor(DType::U8, &[8])?;
        let packed = self.tensor(DType::I4, &[3])?;
        let gathered = self.tensor(DType::F32, &[ranks, 4, 6])?;
        let other = (of.rank() + 1) % ranks;
        let fails = |what: &str, result: kvcore::Result<()>, expected: fn(&Error) -> bool| {
            ensure(result.as_ref().is_err_and(expected), || format!("{what}: {result:?}"))
        };
        fails("a strided view", of.broadcast(stream, &column, 0), |e| {
            matches!(e, Error::InvalidStrides { .. })
        })?;
        fails("half a byte", of.broadcast(stream, &packed, 0), |e| matches!(e, Error::NotMultiple { .. }))?;
        fails("an unknown root", of.broadcast(stream, &view, ranks), |e| {
            matches!(e, Error::OutOfRange { .. })
        })?;
        fails("an unknown receiver", of.send(stream, &view, ranks), |e| {
            matches!(e, Error::OutOfRange { .. })
        })?;
        fails("a rank to itself", of.receive(stream, &view, of.rank()), |e| {
            matches!(e, Error::Unsupported { .. })
        })?;
        fails("a sum of codes", of.all_reduce(stream, &codes, ReduceOp::Sum), |e| {
            matches!(e, Error::Unsupported { .. })
        })?;
        fails("other parts", of.all_gather(stream, &view, &view), |e| matches!(e, Error::Mismatch { .. }))?;
        fails("another type", of.all_gather(stream, &codes, &view), |e| matches!(e, Error::Mismatch { .. }))?;
        if ranks > 1 {
            let part = gathered.select(0, other)?;
            fails("another's part", of.all_gather(stream, &part, &gathered), |e| {
                matches!(e, Error::Aliased { .. })
            })?;
            let half = view.slice(0, 0, 2)?;
            let result = of.exchange(stream, &[(&view, other)], &[(&half, other)]);
            fails("one memory", result, |e| matches!(e, Error::Aliased { .. }))?;
        }
        // Nothing was enqueued, and the group is intact.
        of.broadcast(stream, &view, 0)?;
        self.expect("a broadcast after refusals", &view, &[0; 96])
    }
}
