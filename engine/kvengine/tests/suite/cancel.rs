//! Rule 8 for a request that is stopped: the request holds nothing afterwards, and the next answer is
//! correct.

use std::ops::ControlFlow;
use std::sync::Arc;

use kvchunk::{Recompute, ReuseCell};
use kvcore::DType;
use kvengine::{Error, PromptTokens, Request};
use kvmodel::Observer;
use rstest::rstest;

use crate::asking::engine;
use crate::common::{Golden, distance};
use crate::failure::assert_nothing_held;

/// An observer that stops a request after this many layers and tokens.
struct Patience(usize);

impl Patience {
    fn last(&mut self) -> ControlFlow<()> {
        match self.0.checked_sub(1) {
            Some(left) => {
                self.0 = left;
                ControlFlow::Continue(())
            }
            None => ControlFlow::Break(()),
        }
    }
}

impl Observer for Patience {
    fn layer(&mut self, _done: usize, _total: usize) -> ControlFlow<()> {
        self.last()
    }

    fn token(&mut self, _token: u32) -> ControlFlow<()> {
        self.last()
    }
}

#[rstest]
fn rule_8_a_request_that_is_stopped_anywhere_holds_nothing_and_the_next_one_is_right(
    #[values("llama", "deepseek-v3")] name: &str,
    #[values("plain", "none", "link:2", "blend:0.5@1:both")] how: &str,
) {
    const TOKENS: usize = 3;
    let prompt = Golden::load(name).prompt;
    let strategy = if how == "plain" { "none" } else { how };
    let request = Request {
        recompute: Arc::new(strategy.parse::<Recompute>().unwrap()),
        cell: ReuseCell::OVERLAPPED_WITH_SYSTEM,
        max_new_tokens: TOKENS,
        keep_logits: true,
        ..Request::new(match how {
            "plain" => PromptTokens::Plain(prompt.flatten()),
            _ => PromptTokens::Chunked(prompt),
        })
    };
    let fresh = || engine(name, DType::F32.into());
    let expected = fresh().generate(&request, &mut ()).unwrap();
    let layers = fresh().model().config().num_layers();
    for calls in 0.. {
        let mut engine = fresh();
        match engine.generate(&request, &mut Patience(calls)) {
            Err(Error::Cancelled) => {}
            Ok(_) => {
                let passes = if strategy == "none" { 1 } else { 2 };
                assert_eq!(
                    calls,
                    passes * layers + expected.tokens.len(),
                    "stopped after every layer and token"
                );
                break;
            }
            Err(error) => panic!("{calls}: {error}"),
        }
        assert_nothing_held(&engine);
        if calls < layers {
            assert_eq!(
                engine.chunks().unwrap().metrics().cached_chunks,
                0,
                "a piece half computed is not kept"
            );
        }
        let answer = engine.generate(&request, &mut ()).unwrap();
        assert_nothing_held(&engine);
        assert_eq!(answer.tokens, expected.tokens, "{calls}");
        for (got, expected) in answer.logits.iter().zip(&expected.logits) {
            assert!(distance(got, expected) < 1e-5, "{calls}");
        }
    }
}
