//! Values that Python passes by name.

use kvcore::DType;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde::de::DeserializeOwned;

/// Parses an element type, such as `"bfloat16"`, `"torch.bfloat16"` or `"bf16"`.
pub(crate) fn dtype(name: &str) -> PyResult<DType> {
    match name.rsplit('.').next().unwrap_or(name) {
        "float32" | "f32" | "float" => Ok(DType::F32),
        "float16" | "f16" | "half" => Ok(DType::F16),
        "bfloat16" | "bf16" => Ok(DType::BF16),
        _ => Err(PyValueError::new_err(format!(
            "unknown element type {name:?}; use float32, float16 or bfloat16"
        ))),
    }
}

/// Returns the name of a device or an element type: `"cuda:0"` for `torch.device("cuda:0")`, `"float16"` for
/// `numpy.float16`.
pub(crate) fn text_of(object: &Bound<'_, PyAny>) -> PyResult<String> {
    let name = object.getattr_opt("__name__")?;
    Ok(name.as_ref().unwrap_or(object).str()?.to_string())
}

/// Returns the value that configurations call `name`. `what` is the name of the setting in errors.
///
/// # Errors
/// Returns a `ValueError` that lists the known names.
pub(crate) fn named<T: DeserializeOwned>(what: &str, name: &str) -> PyResult<T> {
    let value = serde_json::Value::String(name.to_owned());
    serde_json::from_value(value).map_err(|error| PyValueError::new_err(format!("{what}: {error}")))
}
