//! The time to the first token of chats that are asked one after another.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::client::Client;
use crate::error::{Error, Result};
use crate::trace::runtime;
use crate::url::ServerUrl;

/// The first token of an answer, as the client sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct FirstToken {
    /// The time from sending the request to its first text, or to its end if it has none.
    pub after: Duration,
    /// The number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// The number of those that were found in a cache.
    pub cached_tokens: usize,
}

/// Asks for chats one after another, streamed, on one connection. `bodies` are requests to `/v1/chat/completions` without
/// the fields about streams. Calls `progress` with the number of answers so far and the total.
///
/// # Errors
/// Returns an error if a request fails, or its stream has neither text nor an end.
pub fn first_tokens(
    url: &ServerUrl,
    bodies: Vec<Value>,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<FirstToken>> {
    let (client, total) = (Client::new(url.clone()), bodies.len());
    runtime()?.block_on(async {
        let mut all = Vec::with_capacity(total);
        for mut body in bodies {
            body["stream"] = true.into();
            body["stream_options"] = serde_json::json!({"include_usage": true});
            all.push(first(&client, &body).await?);
            progress(all.len(), total);
        }
        Ok(all)
    })
}

async fn first(client: &Client, body: &Value) -> Result<FirstToken> {
    let began = Instant::now();
    let mut events = client.post("/v1/chat/completions", body).await?.ok().await?.events();
    let (mut after, mut usage) = (None, Value::Null);
    while let Some(event) = events.next().await? {
        if event.as_ref() == b"[DONE]" {
            continue;
        }
        let now = began.elapsed();
        let chunk: Value = serde_json::from_slice(&event)
            .map_err(|source| Error::Json { text: String::from_utf8_lossy(&event).into_owned(), source })?;
        if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
            return Err(Error::Stream(error.to_string()));
        }
        let choice = &chunk["choices"][0];
        let has_text = choice["delta"]["content"].as_str().is_some_and(|text| !text.is_empty());
        // A first token may have no text, as an end token that the request ignores.
        if has_text || choice["finish_reason"].is_string() {
            after.get_or_insert(now);
        }
        if chunk["usage"].is_object() {
            usage = chunk["usage"].clone();
        }
    }
    let after = after.ok_or_else(|| Error::Stream("it ended without a finish_reason".to_owned()))?;
    let number = |value: &Value| value.as_u64().unwrap_or(0) as usize;
    let cached_tokens = number(&usage["prompt_tokens_details"]["cached_tokens"]);
    Ok(FirstToken { after, prompt_tokens: number(&usage["prompt_tokens"]), cached_tokens })
}
