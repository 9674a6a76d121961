//! `/v1/models`.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use super::respond;
use crate::refusal::Refusal;
use crate::service::Service;

/// Lists the names of the model.
pub(crate) async fn models(State(service): State<Arc<Service>>, request: Request) -> Response {
    let list = || {
        service.check_key(&request.into_parts().0)?;
        let all: Vec<Value> = service.names.iter().map(|name| described(&service, name)).collect();
        Ok(Json(json!({"object": "list", "data": all})).into_response())
    };
    respond(list())
}

/// Describes the model with a name.
pub(crate) async fn model(
    State(service): State<Arc<Service>>,
    name: Result<Path<String>, PathRejection>,
    request: Request,
) -> Response {
    let one = || -> Result<Response, Refusal> {
        service.check_key(&request.into_parts().0)?;
        let Ok(Path(name)) = name else {
            return Err(Refusal::field("model", "the name in the path must be UTF-8"));
        };
        let name = service.check_model(Some(&name))?;
        Ok(Json(described(&service, &name)).into_response())
    };
    respond(one())
}

fn described(service: &Service, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": service.started,
        "owned_by": "kvcache",
        "max_model_len": service.context,
    })
}
