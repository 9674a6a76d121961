//! Reading of request bodies: within limits of size and time, as JSON, with errors that name the field.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use futures_util::StreamExt as _;
use serde::de::DeserializeOwned;

use crate::ask::Owner;
use crate::body_memory::BodyShare;
use crate::refusal::{Kind, Refusal};
use crate::service::Service;
use crate::tenants;
use crate::text_work;

/// The bytes of a body that is parsed on a thread for such work.
const LARGE: usize = 64 << 10;

impl Service {
    /// Reads a request: who sends it, and its body as JSON.
    ///
    /// # Errors
    /// Refuses an unknown key before the body is read, a body that is too large, too slow or not JSON, and a wrong or
    /// unknown field, by its name.
    pub(crate) async fn read<T: DeserializeOwned + Send + 'static>(
        &self,
        request: Request,
    ) -> Result<(Owner, T), Refusal> {
        let (parts, body) = request.into_parts();
        let tenant = tenants::tenant(self.keys.as_ref(), &parts.headers)?;
        check_type(&parts)?;
        let mut share = self.bodies.share();
        let read = bytes(body, self.limits.body_bytes, &mut share);
        let bytes = tokio::time::timeout(self.limits.receive_time, read).await;
        let bytes = bytes.map_err(|_| {
            let reason =
                format!("the body did not arrive within {:?}; send it faster", self.limits.receive_time);
            Refusal::new(Kind::TimedOut, reason)
        })??;
        share.grow_by_values(&bytes)?;
        // Parsing a large body would hold up the streams of others on this thread.
        let (request, share) = if bytes.len() > LARGE {
            text_work::run(share, move || parse(&bytes)).await?
        } else {
            (parse(&bytes)?, share)
        };
        Ok((Owner { tenant, salt: None, body: Some(Arc::new(share)) }, request))
    }

    /// Checks that a request without a body comes from a client with a key.
    pub(crate) fn check_key(&self, parts: &Parts) -> Result<(), Refusal> {
        tenants::tenant(self.keys.as_ref(), &parts.headers).map(drop)
    }

    /// Checks that a request comes from the operator. Without keys, everybody is.
    pub(crate) fn check_operator(&self, parts: &Parts) -> Result<(), Refusal> {
        match tenants::tenant(self.keys.as_ref(), &parts.headers)? {
            Some(tenant) if &*tenant != tenants::OPERATOR => Err(Refusal::new(
                Kind::Forbidden,
                format!("only keys of the tenant {:?} may do this", tenants::OPERATOR),
            )),
            _ => Ok(()),
        }
    }
}

/// Checks that a body claims to be JSON, so that no web page can send it across sites without being asked.
fn check_type(parts: &Parts) -> Result<(), Refusal> {
    let kind = parts.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let reason = format!("the content type is {kind:?}; send JSON with `content-type: application/json`");
    Err(Refusal::new(Kind::Invalid, reason))
}

/// Reads a body of at most `most` bytes, each of which is taken from `share`.
async fn bytes(body: Body, most: usize, share: &mut BodyShare) -> Result<Vec<u8>, Refusal> {
    let mut stream = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(data) = stream.next().await {
        let data =
            data.map_err(|error| Refusal::new(Kind::Invalid, format!("the body ended early: {error}")))?;
        if bytes.len() + data.len() > most {
            let reason = format!("the body is larger than the limit of {most} bytes; shorten it");
            return Err(Refusal::new(Kind::TooLarge, reason));
        }
        share.grow(data.len())?;
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

/// Parses JSON.
///
/// # Errors
/// Refuses malformed JSON with its line and column, and a wrong, missing or unknown field with its name.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refusal> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let reason = format!("the body is not UTF-8 at byte {}", error.valid_up_to());
        Refusal::new(Kind::Invalid, reason)
    })?;
    let deserializer = &mut serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut *deserializer).map_err(|error| wrong(&error))?;
    deserializer.end().map_err(|error| not_json(&error))?;
    Ok(value)
}

fn wrong(error: &serde_path_to_error::Error<serde_json::Error>) -> Refusal {
    let inner = error.inner();
    if !inner.is_data() {
        return not_json(inner);
    }
    let message = inner.to_string();
    let quoted = |start: &str| Some(message.strip_prefix(start)?.split_once('`')?.0.to_owned());
    let path = error.path().to_string();
    if let Some(field) = quoted("unknown field `") {
        let within = if path == "." || path == field { field.clone() } else { path };
        let reason = format!("unknown parameter: {field:?}; remove it, or check its spelling");
        return Refusal { code: Some("unknown_parameter"), ..Refusal::field(within, reason) };
    }
    if let Some(field) = quoted("missing field `") {
        let reason = format!("missing parameter: {field:?}");
        return Refusal { code: Some("missing_required_parameter"), ..Refusal::field(field, reason) };
    }
    if path == "." {
        return Refusal::new(Kind::Invalid, plain(&message));
    }
    Refusal {
        code: Some("invalid_type"),
        ..Refusal::field(path.clone(), format!("{path}: {}", plain(&message)))
    }
}

/// Replaces the names of Rust's types.
fn plain(message: &str) -> String {
    let words = [
        ("u64", "a whole number, 0 or more"),
        ("u32", "a whole number, 0 or more"),
        ("u16", "a whole number, 0 or more"),
        ("usize", "a whole number, 0 or more"),
        ("i64", "a whole number"),
        ("i32", "a whole number"),
        ("f32", "a number"),
        ("f64", "a number"),
        ("a boolean", "true or false"),
    ];
    words.iter().fold(message.to_owned(), |text, (kind, plain)| {
        text.replace(&format!("expected {kind}"), &format!("expected {plain}"))
    })
}

fn not_json(error: &serde_json::Error) -> Refusal {
    Refusal {
        code: Some("invalid_json"),
        ..Refusal::new(Kind::Invalid, format!("the body is not valid JSON: {error}"))
    }
}
