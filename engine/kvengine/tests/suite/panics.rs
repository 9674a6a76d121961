//! Panics in code that the engine calls: observers, backends and strategies, at every call of a request. The
//! panic reaches the caller, nothing stays held, other requests end, and the next request is answered as if
//! nothing had happened.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Wake};

use kvchunk::{ChunkSpan, Evidence, Findings, Recompute, RecomputeStrategy, ReuseCell, TokenSelection};
use kvengine::{
    Answer, AnswerEvent, BeamSearch, Engine, EngineConfig, Error, PromptTokens, Request, Scheduling,
};
use kvmodel::Observer;
use rstest::rstest;

use crate::common::{Golden, load_model};
use crate::crowd::{self, Read, run};
use crate::failure::assert_nothing_held;
use crate::faulty::Faulty;

fn engine(backend: Arc<Faulty>) -> Engine {
    let config = EngineConfig { block_size: 4, kv_memory: Some(1 << 20), ..EngineConfig::default() };
    Engine::new(load_model("llama"), backend, b"t", &config).unwrap()
}

fn chunked(strategy: &str) -> Request {
    Request {
        recompute: Arc::new(strategy.parse::<Recompute>().unwrap()),
        cell: ReuseCell::OVERLAPPED_WITH_SYSTEM,
        max_new_tokens: 4,
        ..Request::new(PromptTokens::Chunked(Golden::load("llama").prompt))
    }
}

fn plain() -> Request {
    Request { max_new_tokens: 4, ..Request::new(PromptTokens::Plain((3..20).collect())) }
}

/// Returns true if the call panics.
fn panics<T>(call: impl FnOnce() -> T) -> bool {
    catch_unwind(AssertUnwindSafe(call)).is_err()
}

#[rstest]
#[case::plain(plain())]
#[case::chunks(chunked("none"))]
#[case::recomputed(chunked("link:2"))]
#[case::blended(chunked("blend:0.5@1:both"))]
#[case::asked(chunked("question:0.4@0"))]
#[case::samples(Request { samples: 3, ..plain() })]
fn a_backend_may_panic_in_any_operation(#[case] request: Request) {
    let backend = Faulty::new();
    let expected = engine(Arc::clone(&backend)).generate(&request, &mut ()).unwrap().tokens;
    for n in 0.. {
        let mut engine = engine(Arc::clone(&backend));
        backend.panic_after(n);
        let panicked = panics(|| engine.generate(&request, &mut ()).map(drop));
        if backend.disarm() {
            assert!(!panicked && n > 20, "only {n} operations");
            break;
        }
        assert!(panicked, "{n}");
        assert_nothing_held(&engine);
        assert_eq!(engine.generate(&request, &mut ()).unwrap().tokens, expected, "{n}");
        assert_nothing_held(&engine);
    }
    let refused = backend.refused();
    assert!(refused.is_superset(&BTreeSet::from(["scatter", "attend"])), "{refused:?}");
}

/// An observer that panics after this many calls.
struct Brittle(usize);

impl Brittle {
    fn call(&mut self) -> ControlFlow<()> {
        self.0 = self.0.checked_sub(1).expect("the observer is done");
        ControlFlow::Continue(())
    }
}

impl Observer for Brittle {
    fn layer(&mut self, _done: usize, _total: usize) -> ControlFlow<()> {
        self.call()
    }

    fn token(&mut self, _token: u32) -> ControlFlow<()> {
        self.call()
    }
}

#[rstest]
fn an_observer_may_panic_at_any_call(#[values("plain", "none", "link:2", "blend:0.5@1:both")] how: &str) {
    let request = if how == "plain" { plain() } else { chunked(how) };
    let expected = engine(Faulty::new()).generate(&request, &mut ()).unwrap().tokens;
    for calls in 0.. {
        let mut engine = engine(Faulty::new());
        if !panics(|| engine.generate(&request, &mut Brittle(calls)).map(drop)) {
            assert!(calls > 4, "only {calls} calls");
            break;
        }
        assert_nothing_held(&engine);
        assert_eq!(engine.generate(&request, &mut ()).unwrap().tokens, expected, "{calls}");
    }
}

/// A strategy that panics when it is asked for its choice.
#[derive(Debug)]
struct Undecided(Evidence);

impl RecomputeStrategy for Undecided {
    fn name(&self) -> String {
        "undecided".to_owned()
    }

    fn evidence(&self) -> Evidence {
        self.0
    }

    fn select(&self, _chunks: &[ChunkSpan], _findings: &Findings) -> TokenSelection {
        panic!("no choice")
    }
}

#[rstest]
fn a_strategy_may_panic(#[values("none", "blend:0.5@1:both", "question:0.4@0")] like: &str) {
    let strategy = Undecided(like.parse::<Recompute>().unwrap().evidence());
    let request = Request { recompute: Arc::new(strategy), ..chunked("none") };
    let mut engine = engine(Faulty::new());
    assert!(panics(|| engine.generate(&request, &mut ()).map(drop)));
    assert_nothing_held(&engine);
    assert!(engine.generate(&chunked(like), &mut ()).is_ok());
    assert_nothing_held(&engine);
}

/// Requests that preempt each other, fork, search with beams and use documents are interrupted at every
/// operation of their steps.
#[test]
fn a_panic_ends_the_requests_that_have_begun_and_waiting_requests_go_on() {
    let beams = Some(BeamSearch { width: 3, length_penalty: 1.0 });
    let requests = [
        Request { samples: 3, ..plain() },
        Request { beams, samples: 2, priority: 1, ..plain() },
        Request { max_new_tokens: 30, ignore_end: true, priority: -1, ..plain() },
        chunked("link:2"),
        Request { priority: -2, ..plain() },
    ];
    let backend = Faulty::new();
    let scheduling = Scheduling { running: 5, step_tokens: 24, ..Scheduling::default() };
    let fresh = || crowd::engine_on(Arc::clone(&backend) as _, 26, scheduling, 1 << 20);
    let expected = fresh().generate(&plain(), &mut ()).unwrap().tokens;
    let mut interrupted = 0;
    for n in (0..).step_by(3) {
        let mut engine = fresh();
        let mut answers: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        let mut reads: Vec<Read> = requests.iter().map(Read::new).collect();
        backend.panic_after(n);
        let panicked = panics(|| while !engine.step().unwrap().is_idle() {});
        if backend.disarm() {
            assert!(!panicked && n > 100, "only {n} operations");
            break;
        }
        assert!(panicked);
        engine.check_invariants().unwrap();
        run(&mut engine, &mut answers, &mut reads);
        for read in &mut reads {
            match read.error.take() {
                Some(Error::Interrupted) => interrupted += 1,
                Some(error) => panic!("{n}: {error}"),
                None => assert!(read.ends.iter().all(Option::is_some), "{n}"),
            }
        }
        assert_nothing_held(&engine);
        assert_eq!(engine.generate(&plain(), &mut ()).unwrap().tokens, expected, "{n}");
    }
    assert!(interrupted > 50, "{interrupted}");
}

/// A waker that reads the answer it waits for, and panics when it is woken.
struct Rude {
    answer: Mutex<Option<Weak<Mutex<Answer>>>>,
    woken: AtomicUsize,
}

impl Wake for Rude {
    fn wake(self: Arc<Self>) {
        let answer = self.answer.lock().unwrap().as_ref().and_then(Weak::upgrade);
        if let Some(Ok(answer)) = answer.as_ref().map(|answer| answer.try_lock()) {
            assert!(!answer.is_over() || self.woken.load(Ordering::Relaxed) > 0);
        }
        self.woken.fetch_add(1, Ordering::Relaxed);
        panic!("the task is gone");
    }
}

impl Drop for Rude {
    fn drop(&mut self) {
        // The last clone is dropped while another waker takes its place.
        if let Some(answer) = self.answer.lock().unwrap().as_ref().and_then(Weak::upgrade) {
            drop(answer.try_lock().map(|answer| answer.is_over()));
        }
    }
}

#[rstest]
fn a_waker_may_panic_at_every_event(#[values("plain", "link:2")] how: &str) {
    let request = if how == "plain" { plain() } else { chunked(how) };
    let mut engine = engine(Faulty::new());
    let expected = engine.generate(&request, &mut ()).unwrap().tokens;
    let answer = Arc::new(Mutex::new(engine.submit(request).unwrap()));
    let (mut tokens, mut woken) = (Vec::new(), 0);
    loop {
        let waker =
            Arc::new(Rude { answer: Mutex::new(Some(Arc::downgrade(&answer))), woken: AtomicUsize::new(0) });
        let polled = {
            let waker = std::task::Waker::from(Arc::clone(&waker));
            answer.lock().unwrap().poll_next(&mut Context::from_waker(&waker))
        };
        match polled {
            Poll::Ready(None) => break,
            Poll::Ready(Some(event)) => match event.unwrap() {
                AnswerEvent::Token { token, .. } => tokens.push(token),
                AnswerEvent::End { .. } => {}
            },
            Poll::Pending => {
                // The step goes on for the other requests.
                engine.step().unwrap();
                woken += waker.woken.load(Ordering::Relaxed);
            }
        }
    }
    assert!(tokens == expected && woken > 2, "{tokens:?}, woken {woken} times");
    assert_nothing_held(&engine);
}
