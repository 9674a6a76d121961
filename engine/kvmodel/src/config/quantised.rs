//! Rejects Hugging Face directories with quantised weights, which must not be read as floats.

use serde_json::Value;

use super::bad;
use crate::error::Result;

/// The fields that describe how weights are quantised: the one that transformers uses, and an older one
/// from compressed-tensors.
const FIELDS: [&str; 2] = ["quantization_config", "compression_config"];

/// Rejects a model with quantised weights. The error names the method. A field that is `null` counts as
/// absent.
pub(super) fn refuse(json: &Value) -> Result<()> {
    let given = |name: &&str| json.get(*name).filter(|value| !value.is_null());
    let Some((field, value)) = FIELDS.iter().find_map(|name| given(name).map(|value| (name, value))) else {
        return Ok(());
    };
    let method = match value.get("quant_method").filter(|method| !method.is_null()) {
        Some(method) => format!("quant_method {method}"),
        None => "no quant_method".to_owned(),
    };
    bad(format!(
        "{field} has {method}: such weights are not supported (supported: f32, f16 and bf16 in safetensors, and the \
         blocks of GGUF files); use the model without quantisation, or as a GGUF file"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_method_is_refused_by_its_name_and_null_is_none() {
        for method in ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors", "mxfp4"] {
            let error = refuse(&json!({ "quantization_config": { "quant_method": method, "bits": 4 } }));
            let error = error.unwrap_err().to_string();
            assert!(error.contains(&format!("quantization_config has quant_method {method:?}")), "{error}");
            assert!(error.contains("bf16 in safetensors") && error.contains("as a GGUF file"), "{error}");
        }
        let unnamed = refuse(&json!({ "quantization_config": { "load_in_4bit": true } })).unwrap_err();
        assert!(unnamed.to_string().contains("quantization_config has no quant_method"), "{unnamed}");
        assert!(refuse(&json!({ "compression_config": {} })).is_err());
        assert!(refuse(&json!({ "quantization_config": null })).is_ok());
    }
}
