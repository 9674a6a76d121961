//! Chooses how documents are reused: the options, a tuned file or the default, with the decoys.

use std::sync::Arc;

use kvchunk::Reuse;
use kvengine::{BUILT_IN_DECOYS, DefaultReuse, TunedReuse};
use kvmodel::{Model, TextCodec};

use crate::args::WayArgs;
use crate::decoys;
use crate::error::Result;

/// The settings for the reuse of documents.
pub(crate) struct ChosenWay {
    pub(crate) reuse: Reuse,
    /// The decoys for modes that have some, as tokens.
    pub(crate) decoys: Arc<[Vec<u32>]>,
    /// The default settings for the model.
    pub(crate) usual: DefaultReuse,
}

impl ChosenWay {
    /// Reads the files that the options name.
    pub(crate) fn new(args: &WayArgs, model: &Model, codec: &TextCodec) -> Result<Self> {
        let tuned = args.reuse.as_deref().map(TunedReuse::read).transpose()?;
        let own = decoys::read(&args.decoys, &[])?;
        let usual = DefaultReuse::of(model.config(), own.len());
        let reuse = match &tuned {
            Some(tuned) => tuned.of(model)?,
            None => args.asked_for(usual.reuse),
        };
        let built_in = BUILT_IN_DECOYS.map(str::to_owned);
        let tuned = tuned.as_ref().map_or(&[][..], TunedReuse::decoys);
        let texts = [&own[..], tuned].into_iter().find(|decoys| !decoys.is_empty()).unwrap_or(&built_in);
        let decoys = texts.iter().map(|text| codec.encode(text, false)).collect::<kvmodel::Result<_>>()?;
        Ok(Self { reuse, decoys, usual })
    }
}
