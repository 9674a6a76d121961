//! JSON schemas, regular expressions and grammars as constraints on answers.
//!
//! The grammars are those of the library `llguidance`. The library knows the bytes of each token, so an answer obeys a
//! grammar byte by byte, wherever the tokens' boundaries are.

mod form;
mod grammar;
mod levels;
mod vocabulary;

pub use form::AnswerForm;

use std::sync::Arc;
use std::thread::{self, Builder};

use kvmodel::{ModelConfig, TextCodec};
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use toktrie::InferenceCapabilities;

use crate::constraint::AnswerConstraint;
use crate::error::{Error, Result};
use grammar::Grammar;

/// The stack of a thread that compiles a form, of which only what is used takes memory. The library calls itself for each
/// level of a schema.
const STACK: usize = 256 << 20;

/// Compiles the forms of answers to constraints, for one model.
///
/// ```
/// use kvengine::{AnswerForm, AnswerGuide};
/// use kvmodel::ModelDirectory;
///
/// let loaded = ModelDirectory::load("../../models/tiny-rag".as_ref(), Default::default(), &mut |_, _| ())?;
/// let guide = AnswerGuide::new(&loaded.codec, loaded.model.config())?;
/// let colour = guide.constraint(&AnswerForm::Regex(" (red|blue|green)".to_owned()))?;
/// // Request { constraint: Some(colour), ..Request::new(prompt) }
/// # drop(colour);
/// assert!(guide.constraint(&AnswerForm::Regex("(".to_owned())).is_err());
/// # Ok::<(), kvengine::Error>(())
/// ```
///
/// Creating a guide takes up to a second for a large vocabulary, so keep it.
pub struct AnswerGuide {
    factory: ParserFactory,
    ends: Arc<[u32]>,
}

impl AnswerGuide {
    /// Creates a guide for a model and its tokenizer.
    ///
    /// # Errors
    /// Returns [`kvmodel::Error::Tokenizer`] if the tokenizer's tokens do not have bytes of their own.
    pub fn new(codec: &TextCodec, config: &ModelConfig) -> Result<Self> {
        let vocabulary = config.vocab_size;
        let ends: Arc<[u32]> =
            config.eos.iter().copied().filter(|&token| (token as usize) < vocabulary).collect();
        let environment = vocabulary::environment(codec.token_bytes()?, vocabulary, &ends);
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
            .map_err(|error| Error::Constraint(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory, ends })
    }

    /// Compiles a form to a constraint. This takes milliseconds, and at most about a second for forms of the maximum
    /// size.
    ///
    /// # Errors
    /// Returns [`Error::Constraint`] if the form is malformed, too large or too deep, uses what is not supported, or
    /// cannot be met by any answer, and [`Error::Thread`] if no thread can be started for it.
    pub fn constraint(&self, form: &AnswerForm) -> Result<Arc<dyn AnswerConstraint>> {
        let grammar: TopLevelGrammar = form.grammar()?;
        thread::scope(|scope| {
            let compiler = Builder::new().name("kv-grammar".to_owned()).stack_size(STACK);
            let compiled = compiler.spawn_scoped(scope, || self.compile(grammar)).map_err(Error::Thread)?;
            compiled.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    fn compile(&self, grammar: TopLevelGrammar) -> Result<Arc<dyn AnswerConstraint>> {
        let beginning = Matcher::new(self.factory.create_parser(grammar));
        Ok(Arc::new(Grammar::new(beginning, Arc::clone(&self.ends))?))
    }
}

/// Limits on the work and the memory of a grammar. A state of the lexer takes one or two kilobytes.
fn limits() -> ParserLimits {
    ParserLimits { max_lexer_states: 50_000, verbose_errors: false, ..ParserLimits::default() }
}

impl std::fmt::Debug for AnswerGuide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AnswerGuide").field("ends", &self.ends).finish_non_exhaustive()
    }
}
