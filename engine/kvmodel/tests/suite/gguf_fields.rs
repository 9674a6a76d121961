//! Fields of GGUF files that change the model: scalings of the rotary embedding, ends of turns, and fields
//! that are not used.

use kvcore::RopeScaling;
use rstest::rstest;

use crate::gguf::{Draft, Field, converted, load, real, text, whole};
use crate::gguf_tokenizers::with_tokens;

fn with_fields(fields: &[(&str, Field)]) -> Draft {
    let mut draft = converted("llama");
    for (name, field) in fields {
        draft.set(&format!("llama.rope.{name}"), field.clone());
    }
    draft
}

fn scaling_of(fields: &[(&str, Field)]) -> Result<RopeScaling, String> {
    let place = tempfile::tempdir().unwrap();
    let loaded = load(&with_fields(fields).write(place.path())).map_err(|error| error.to_string())?;
    Ok(loaded.model.config().layers[0].rope.scaling.clone())
}

#[test]
fn a_factor_without_a_type_is_linear_and_has_an_old_name() {
    let linear = RopeScaling::Linear { factor: 4.0 };
    for fields in [
        &[("scaling.factor", real(4.0))][..],
        &[("scale_linear", real(4.0))],
        &[("scaling.type", text("linear")), ("scaling.factor", real(4.0))],
        &[("scaling.type", text("linear")), ("scale_linear", real(4.0))],
        &[("scaling.factor", real(4.0)), ("scale_linear", real(8.0))],
    ] {
        assert_eq!(scaling_of(fields).unwrap(), linear, "{fields:?}");
    }
    for fields in [
        &[("scaling.factor", real(0.0))][..],
        &[("scaling.type", text("none")), ("scaling.factor", real(4.0))],
        &[("scaling.attn_factor", real(1.0))],
        &[("scaling.original_context_length", whole(64))],
    ] {
        assert_eq!(scaling_of(fields).unwrap(), RopeScaling::None, "{fields:?}");
    }
}

#[test]
fn the_fields_of_yarn_are_used() {
    let yarn = |more: &[(&str, Field)]| {
        let base = [
            ("scaling.type", text("yarn")),
            ("scaling.factor", real(4.0)),
            ("scaling.original_context_length", whole(64)),
        ];
        match scaling_of(&[&base, more].concat()) {
            Ok(RopeScaling::Yarn {
                attention_factor, beta_fast, beta_slow, original_max_position, ..
            }) => {
                assert_eq!(original_max_position, 64);
                Ok((attention_factor, beta_fast, beta_slow))
            }
            other => Err(format!("{other:?}")),
        }
    };
    let usual = 0.1 * 4f64.ln() + 1.0;
    assert_eq!(yarn(&[]).unwrap(), (usual, 32.0, 1.0));
    assert_eq!(yarn(&[("scaling.attn_factor", real(0.5))]).unwrap(), (0.5 * usual, 32.0, 1.0));
    let both = [("scaling.attn_factor", real(0.5)), ("scaling.yarn_attn_factor", real(4.0))];
    // llama.cpp overwrites the other factor: see the answers of the model "yarn_yarn_attn_factor".
    assert_eq!(yarn(&both).unwrap().0, 0.5 * usual);
    let betas = [("scaling.yarn_beta_fast", real(16.0)), ("scaling.yarn_beta_slow", real(2.0))];
    assert_eq!(yarn(&betas).unwrap(), (usual, 16.0, 2.0));
    assert!(yarn(&[("scaling.yarn_ext_factor", real(1.0))]).is_ok());
}

#[rstest]
#[case("attn_factor", 1.5, None)]
#[case("yarn_attn_factor", 0.5, None)]
#[case("yarn_ext_factor", 1.0, None)]
#[case("attn_factor", 1.5, Some("linear"))]
#[case("yarn_ext_factor", 0.5, Some("yarn"))]
#[case("yarn_log_multiplier", 0.1, Some("yarn"))]
fn a_scaling_that_is_not_supported_is_refused_by_its_field(
    #[case] field: &str,
    #[case] value: f32,
    #[case] kind: Option<&str>,
) {
    let name = format!("scaling.{field}");
    let mut fields = vec![(name.as_str(), real(value)), ("scaling.factor", real(4.0))];
    fields.extend(kind.map(|kind| ("scaling.type", text(kind))));
    let error = scaling_of(&fields).unwrap_err();
    assert!(error.contains(&format!("\"llama.rope.scaling.{field}\" is {value}")), "{error}");
}

/// The IDs of tokens that end an answer, by vocabulary: the tokens behind `a` and `b` have the IDs 2, 3, ….
#[rstest]
#[case(&["<|im_end|>"], &[], &[2])]
#[case(&["<|eot_id|>", "<|eom_id|>", "x"], &[], &[2, 3])]
#[case(&["<end_of_turn>", "x", "<eos>"], &[("eos", 3)], &[2, 3, 4])]
#[case(&["x", "y", "z"], &[("eos", 2), ("eot", 3), ("eom", 4)], &[2, 3, 4])]
#[case(&["<|end|>", "<|user|>"], &[], &[2])]
#[case(&["<|end|>", "<|return|>", "<|call|>"], &[], &[3, 4])]
#[case(&["<|end|>", "<|calls|>", "<|flush|>"], &[], &[3, 4])]
#[case(&["<|end|>", "<|return|>", "<|call|>"], &[("eos", 3)], &[3, 4])]
#[case(&["<｜end▁of▁sentence｜>", "[EOT]"], &[], &[2, 3])]
#[case(&["</s>", "<|tool_response>", "<turn|>"], &[], &[3, 4])]
#[case(&["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"], &[], &[2, 3, 4])]
#[case(&["<|IM_END|>", "im_end"], &[], &[])]
fn answers_end_at_tokens_that_are_named_or_known_by_their_text(
    #[case] tokens: &[&str],
    #[case] named: &[(&str, u32)],
    #[case] expected: &[u32],
) {
    let place = tempfile::tempdir().unwrap();
    let mut draft = with_tokens(["a", "b"].iter().chain(tokens).copied());
    for (name, id) in named {
        draft.set(&format!("tokenizer.ggml.{name}_token_id"), whole(*id));
    }
    let loaded = load(&draft.write(place.path())).unwrap();
    assert_eq!(loaded.model.config().eos, expected);
    // An end token is whole in a prompt and has no text, although its type is that of ordinary tokens.
    for &end in expected.iter().filter(|end| !named.iter().any(|(_, id)| id == *end)) {
        assert_eq!(
            loaded.codec.encode(&format!("a{}b", tokens[end as usize - 2]), false).unwrap(),
            [0, end, 1]
        );
        assert_eq!(loaded.codec.decode(&[0, end, 1]).unwrap(), "ab");
    }
}

#[test]
fn fields_that_nobody_reads_are_named() {
    let place = tempfile::tempdir().unwrap();
    let notes = |fields: &[&str]| {
        let mut draft = converted("llama");
        for field in fields {
            draft.set(field, real(0.5));
        }
        load(&draft.write(place.path())).unwrap().notes.join("")
    };
    assert_eq!(notes(&[]), "");
    assert_eq!(notes(&["general.note", "llama.vocab_size", "other.attention.scale"]), "");
    for field in [
        "llama.attention.scale",
        "llama.logit_scale",
        "tokenizer.ggml.precompiled_charsmap",
        "llama.attn_logit_softcapping",
        "llama.final_logit_softcapping",
        "llama.rope.freq_base_swa",
    ] {
        assert!(notes(&[field]).ends_with(&format!("not used: {field}")), "{field}");
    }
    let both = notes(&["llama.residual_scale", "llama.attention.causal"]);
    assert!(both.ends_with("llama.attention.causal, llama.residual_scale"), "{both}");
}

#[test]
fn what_nobody_uses_is_named() {
    let place = tempfile::tempdir().unwrap();
    let notes = |tensors: &[&str], change: &dyn Fn(&mut crate::gguf::Draft)| {
        let mut draft = converted("llama");
        for name in tensors {
            draft.tensors.push(((*name).to_owned(), vec![8], 0, vec![0; 32]));
        }
        change(&mut draft);
        load(&draft.write(place.path())).unwrap().notes.join("; ")
    };
    for name in
        ["blk.0.attn_output.bias", "output.bias", "blk.0.attn_q_norm.weight", "blk.1.attn_sinks.weight"]
    {
        let said = notes(&[name], &|_| ());
        assert!(said.starts_with("these tensors of the files are not used: "), "{name}: {said}");
    }
    let many: Vec<String> = (0..6).map(|number| format!("other.{number}.weight")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert!(notes(&many, &|_| ()).ends_with("other.3.weight and 2 more"), "{}", notes(&many, &|_| ()));
    for field in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        let name = format!("tokenizer.ggml.{field}");
        let said = notes(&[], &|draft| draft.set(&name, whole(99_999)));
        assert!(said.contains(&format!("outside the vocabulary and are not used: {field} 99999")), "{said}");
    }
}
