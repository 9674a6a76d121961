//! Models that compute something else than numbers: the request ends with an error that names the reason, and
//! other requests, the caches and later requests are not affected. Settings that exclude every token.

use std::sync::Arc;

use kvchunk::{ChunkedPrompt, Recompute};
use kvcore::{DType, KvFormat};
use kvengine::{BeamSearch, Engine, EngineConfig, Error, PromptTokens, Request, Sampling, Scheduling};
use kvmodel::{Model, WeightFormat, Weights};
use rstest::rstest;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

use crate::asking::{engine, engine_of};
use crate::common::{Golden, config, folder};
use crate::crowd::answer_all;
use crate::failure::assert_nothing_held;

/// Loads a golden model, with one of its weights changed.
fn changed(name: &str, weight: &str, change: impl Fn(usize, f32) -> f32) -> Model {
    let bytes = std::fs::read(folder(name).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            assert_eq!(view.dtype(), Dtype::F32);
            let values = view.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            let values = values.enumerate().map(|(i, x)| if name == weight { change(i, x) } else { x });
            let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
            (name, view.shape().to_vec(), bytes)
        })
        .collect();
    assert!(tensors.iter().any(|(name, ..)| name == weight), "{weight}");
    let views = tensors
        .iter()
        .map(|(name, shape, data)| (name.clone(), TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
    let bytes = safetensors::serialize(views, None).unwrap();
    let config = kvmodel::ModelConfig { eos: Vec::new(), ..config(name) };
    Model::new(config, Weights::from_bytes(&bytes).unwrap(), WeightFormat::Stored).unwrap()
}

fn engine_for(model: Model, kv_format: KvFormat) -> Engine {
    engine_of(model, EngineConfig { kv_format, ..EngineConfig::default() })
}

fn plain(tokens: impl IntoIterator<Item = u32>) -> Request {
    let tokens = tokens.into_iter().collect();
    Request { max_new_tokens: 4, ..Request::new(PromptTokens::Plain(tokens)) }
}

#[rstest]
#[case::nan_in_a_layer("model.layers.1.self_attn.v_proj.weight", |_, _| f32::NAN, Some(1))]
#[case::infinite_in_a_layer("model.layers.0.self_attn.k_proj.weight", |_, _| f32::INFINITY, Some(0))]
#[case::a_finite_overflow("model.layers.0.mlp.down_proj.weight", |_, x| x * f32::MAX, Some(1))]
#[case::nan_after_the_layers("model.norm.weight", |i, x| if i == 7 { f32::NAN } else { x }, None)]
#[case::no_finite_logit("model.norm.weight", |_, _| f32::INFINITY, None)]
fn logits_that_are_no_numbers_are_an_error(
    #[case] weight: &str,
    #[case] change: fn(usize, f32) -> f32,
    #[case] broken: Option<usize>,
) {
    let mut engine = engine_for(changed("llama", weight, change), DType::F32.into());
    let samples = Request { samples: 3, ..plain(3..12) };
    let warm = Request { sampling: Sampling { temperature: 0.7, ..Sampling::default() }, ..plain(5..25) };
    let chunked =
        Request { max_new_tokens: 2, ..Request::new(PromptTokens::Chunked(Golden::load("llama").prompt)) };
    for request in [&plain(3..12), &samples, &warm, &chunked] {
        let (_, mut reads) = answer_all(&mut engine, std::slice::from_ref(request));
        let error = reads[0].error.take();
        let layer = match error {
            Some(Error::NotNumbers { layer }) => layer,
            other => panic!("{other:?}"),
        };
        assert_eq!(layer, broken);
        assert!(reads[0].tokens.iter().all(Vec::is_empty));
        assert_nothing_held(&engine);
    }
}

#[rstest]
#[case::keys(DType::F16.into(), "model.layers.1.self_attn.k_proj.weight", 1)]
#[case::values(DType::F16.into(), "model.layers.0.self_attn.v_proj.weight", 0)]
#[case::values_of_the_last_layer(DType::F16.into(), "model.layers.1.self_attn.v_proj.weight", 1)]
#[case::keys_of_bytes("int8:8".parse().unwrap(), "model.layers.1.self_attn.k_proj.weight", 1)]
#[case::values_of_bytes("int8:8".parse().unwrap(), "model.layers.0.self_attn.v_proj.weight", 0)]
#[case::keys_of_half_bytes("int4:8".parse().unwrap(), "model.layers.0.self_attn.k_proj.weight", 0)]
#[case::values_of_half_bytes("int4:8".parse().unwrap(), "model.layers.1.self_attn.v_proj.weight", 1)]
fn an_overflow_of_the_cache_names_the_layer_and_the_format(
    #[case] format: KvFormat,
    #[case] weight: &str,
    #[case] broken: usize,
) {
    let large = |_, x| x * 1e9;
    let mut engine = engine_for(changed("llama", weight, large), format);
    let error = engine.generate(&plain(3..12), &mut ()).unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error, Error::CacheOverflow { layer, format: named } if layer == broken && named == format),
        "{error:?}"
    );
    assert!(text.contains(&format!("layer {broken}")) && text.contains("bf16"), "{text}");
    assert_nothing_held(&engine);
    // The same model has numbers in a cache with a larger range.
    let mut wide = engine_for(changed("llama", weight, large), DType::F32.into());
    assert_eq!(wide.generate(&plain(3..12), &mut ()).unwrap().tokens.len(), 4);
}

/// These formats store large values as their largest one.
#[rstest]
fn formats_that_saturate_have_no_overflow(
    #[values("fp8-e4m3", "fp8-e5m2", "fp8-e4m3:head", "fp8-e5m2:head")] format: &str,
) {
    let large = |_, x| x * 1e9;
    for weight in ["model.layers.0.self_attn.v_proj.weight", "model.layers.1.self_attn.k_proj.weight"] {
        let mut engine = engine_for(changed("llama", weight, large), format.parse().unwrap());
        assert_eq!(engine.generate(&plain(3..12), &mut ()).unwrap().tokens.len(), 4);
        assert_nothing_held(&engine);
    }
}

#[test]
fn other_requests_of_the_pass_are_answered() {
    // Only the token 9 has an embedding that is not a number.
    let width = config("qwen3").hidden_size;
    let spoil = |i: usize, x: f32| if i / width == 9 { f32::NAN } else { x };
    let model = changed("qwen3", "model.embed_tokens.weight", spoil);
    let mut engine = engine_for(model, DType::F32.into());
    let good = plain(20..29);
    let alone = engine.generate(&Request { reuse: false, ..good.clone() }, &mut ()).unwrap();
    let (_, mut reads) = answer_all(&mut engine, &[good.clone(), plain(3..12), good]);
    assert!(matches!(reads[1].error.take(), Some(Error::NotNumbers { .. })));
    for read in [&reads[0], &reads[2]] {
        assert_eq!(read.samples()[0].tokens, alone.tokens);
    }
    assert_nothing_held(&engine);
}

/// Returns requests whose tokens are chosen by beams, guessed from the prompt, or given.
fn other_ways(forced: &[u32]) -> [(&'static str, Request); 3] {
    let base = Request { max_new_tokens: 6, ..plain([3, 4, 5, 6, 3, 4, 5, 6, 3, 4, 5]) };
    let beams = Some(BeamSearch { width: 3, ..BeamSearch::default() });
    [
        ("beams", Request { beams, samples: 2, ..base.clone() }),
        ("lookup", Request { lookup: 4, ..base.clone() }),
        ("forced", Request { forced: Some(forced.into()), ..base }),
    ]
}

#[rstest]
#[case::keys_of_halves(DType::F16.into(), "model.layers.1.self_attn.k_proj.weight", 1)]
#[case::values_of_halves(DType::F16.into(), "model.layers.0.self_attn.v_proj.weight", 0)]
#[case::values_of_bytes("int8:8".parse().unwrap(), "model.layers.1.self_attn.v_proj.weight", 1)]
#[case::keys_of_half_bytes("int4:8".parse().unwrap(), "model.layers.0.self_attn.k_proj.weight", 0)]
fn beams_guesses_and_given_tokens_end_with_the_format_that_overflowed(
    #[case] format: KvFormat,
    #[case] weight: &str,
    #[case] broken: usize,
) {
    let mut engine = engine_for(changed("llama", weight, |_, x| x * 1e9), format);
    for (way, request) in other_ways(&[7, 8, 9]) {
        // Twice, as the first one could have left something held.
        for _ in 0..2 {
            let (_, mut reads) = answer_all(&mut engine, std::slice::from_ref(&request));
            let error = reads[0].error.take();
            assert!(
                matches!(error, Some(Error::CacheOverflow { layer, format: named }) if layer == broken && named == format),
                "{way}: {error:?}"
            );
            let text = error.unwrap().to_string();
            assert!(text.contains(&format.to_string()) && text.contains("bf16"), "{way}: {text}");
            assert_nothing_held(&engine);
        }
    }
}

#[rstest]
#[case::nan("model.layers.1.self_attn.v_proj.weight", f32::NAN, Some(1))]
#[case::infinite("model.norm.weight", f32::INFINITY, None)]
fn beams_guesses_and_given_tokens_end_where_logits_are_no_numbers(
    #[case] weight: &str,
    #[case] value: f32,
    #[case] broken: Option<usize>,
) {
    let mut engine = engine_for(changed("llama", weight, |_, _| value), DType::F32.into());
    for (way, request) in other_ways(&[7, 8, 9]) {
        let (_, mut reads) = answer_all(&mut engine, std::slice::from_ref(&request));
        let error = reads[0].error.take();
        assert!(matches!(error, Some(Error::NotNumbers { layer }) if layer == broken), "{way}: {error:?}");
        assert_nothing_held(&engine);
    }
}

/// The first token of the answer has an embedding that is not a number, so only the second pass fails.
#[test]
fn beams_guesses_and_given_tokens_may_fail_in_the_middle_of_an_answer() {
    let width = config("qwen3").hidden_size;
    for way in 0..3 {
        let (name, request) = other_ways(&[7, 8, 9])[way].clone();
        let mut healthy = engine_for(changed("qwen3", "model.norm.weight", |_, x| x), DType::F32.into());
        let first = healthy.generate(&Request { samples: 1, ..request.clone() }, &mut ()).unwrap().tokens[0];
        assert!(![3, 4, 5, 6].contains(&first), "{name}: {first} is in the prompt");
        let spoil = |i: usize, x: f32| if i / width == first as usize { f32::NAN } else { x };
        let mut engine = engine_for(changed("qwen3", "model.embed_tokens.weight", spoil), DType::F32.into());
        let (_, mut reads) = answer_all(&mut engine, &[request, plain([3, 4, 5])]);
        let error = reads[0].error.take();
        assert!(matches!(error, Some(Error::NotNumbers { layer: Some(0) })), "{name}: {error:?}");
        assert_nothing_held(&engine);
    }
}

/// Returns a prompt with a document, which is computed in several passes of eight tokens.
fn behind_a_document(document: Vec<u32>, question: Vec<u32>, strategy: &str) -> Request {
    let prompt = ChunkedPrompt::new((20..26).collect(), vec![document], question).unwrap();
    let recompute = Arc::new(strategy.parse::<Recompute>().unwrap());
    Request { recompute, max_new_tokens: 1, ..Request::new(PromptTokens::Chunked(prompt)) }
}

/// Returns an engine that computes eight tokens in a pass, and has a number for every token but one.
fn engine_without(token: u32) -> Engine {
    let width = config("qwen3").hidden_size;
    let spoil = |i: usize, x: f32| if i / width == token as usize { f32::NAN } else { x };
    let scheduling = Scheduling { step_tokens: 8, ..Scheduling::default() };
    let config = EngineConfig { scheduling, ..EngineConfig::default() };
    engine_of(changed("qwen3", "model.embed_tokens.weight", spoil), config)
}

/// Returns the numbers of blocks and of chunks that an engine can find.
fn findable(engine: &Engine) -> (usize, usize) {
    assert_nothing_held(engine);
    (engine.report().main.unwrap().cached, engine.chunks().unwrap().chunks().len())
}

/// A long part of a prompt is computed in several passes. The tokens behind the one that is not a number are in later
/// passes, so that the first blocks are full before the last token has its logits.
#[rstest]
fn nothing_is_found_that_is_no_number(
    #[values("none", "link:2", "question:0.4", "blend:0.5@1")] strategy: &str,
) {
    const BROKEN: u32 = 9;
    let mut engine = engine_without(BROKEN);
    let fails = |engine: &mut Engine, request: &Request| {
        let error = engine.generate(request, &mut ()).unwrap_err();
        assert!(matches!(error, Error::NotNumbers { .. }), "{error}");
    };
    let (document, question): (Vec<u32>, Vec<u32>) = ((30..43).collect(), vec![40, 41, 42]);
    let broken: Vec<u32> = (3..33).collect();
    assert_eq!(broken.iter().position(|&token| token == BROKEN), Some(6));
    fails(&mut engine, &plain(broken.clone()));
    assert_eq!(findable(&engine), (0, 0), "an ordinary prompt");
    fails(&mut engine, &behind_a_document(broken.clone(), question.clone(), strategy));
    assert_eq!(findable(&engine), (0, 0), "a document");
    // The short question fills no block.
    engine.generate(&behind_a_document(document.clone(), question, strategy), &mut ()).unwrap();
    let kept = findable(&engine);
    assert_eq!(kept, (2, 1), "the system prompt and the document");
    fails(&mut engine, &behind_a_document(document, broken, strategy));
    assert_eq!(findable(&engine), kept, "a question");
}

/// The first token of an answer would fill a block.
#[test]
fn an_answer_leaves_only_what_are_numbers() {
    let prompt = plain(3..18);
    let first = engine_without(47).generate(&prompt, &mut ()).unwrap().tokens[0];
    assert!(!(3..18).contains(&first), "{first} is in the prompt");
    let mut engine = engine_without(first);
    for (name, request) in [("alone", prompt.clone()), ("with guesses", Request { lookup: 4, ..prompt })] {
        let error = engine.generate(&request, &mut ()).unwrap_err();
        assert!(matches!(error, Error::NotNumbers { .. }), "{name}: {error}");
        assert_eq!(findable(&engine), (3, 0), "{name}");
    }
}

#[rstest]
fn a_tiny_temperature_chooses_as_zero_does(#[values(1e-30, 1e-37, 1e-38, 1e-40, 1e-45)] temperature: f32) {
    let mut engine = engine("llama", DType::F32.into());
    let greedy = engine.generate(&Request { max_new_tokens: 20, ..plain(3..12) }, &mut ()).unwrap();
    for (top_k, top_p, min_p) in [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1)] {
        let sampling = Sampling { temperature, top_k, top_p, min_p, seed: 3, ..Sampling::default() };
        let cold = Request { max_new_tokens: 20, sampling, ..plain(3..12) };
        assert_eq!(engine.generate(&cold, &mut ()).unwrap().tokens, greedy.tokens, "{sampling:?}");
    }
}

#[test]
fn settings_that_leave_no_choice_are_refused() {
    let mut engine = engine("llama", DType::F32.into());
    let vocabulary = engine.model().config().vocab_size as u32;
    let bias = |bias: Vec<(u32, f32)>| Request { logit_bias: bias.into(), ..plain(3..12) };
    let sampling = |sampling| Request { sampling, ..plain(3..12) };
    let cold = Sampling::default();
    for (request, setting) in [
        (bias((0..vocabulary).map(|token| (token, f32::NEG_INFINITY)).collect()), "logit_bias"),
        (bias(vec![(4, f32::INFINITY)]), "logit_bias"),
        (bias(vec![(4, f32::NAN)]), "logit_bias"),
        (sampling(Sampling { temperature: -0.5, ..cold }), "temperature"),
        (sampling(Sampling { temperature: f32::NAN, ..cold }), "temperature"),
        (sampling(Sampling { repetition_penalty: f32::INFINITY, ..cold }), "repetition_penalty"),
        (sampling(Sampling { frequency_penalty: f32::NAN, ..cold }), "frequency_penalty"),
    ] {
        let error = engine.generate(&request, &mut ()).unwrap_err();
        assert!(matches!(error, Error::Sampling { setting: named, .. } if named == setting), "{error}");
    }
    let all_but_one = bias((1..vocabulary).map(|token| (token, f32::NEG_INFINITY)).collect());
    assert_eq!(engine.generate(&all_but_one, &mut ()).unwrap().tokens, [0; 4]);
}
