//! Registered documents that outlive the traffic between two checkpoints, and an interruption of the soak.
//!
//! Each segment registers one for every tenant, half of them with a system prompt, and finds those of the segments before.

use serde_json::{Value, json};

use crate::requests::{Dialect, SYSTEM, asked, document};
use crate::served::KEYS;
use crate::users::Place;

/// The number of segments that a document outlives.
const KEPT: u64 = 4;

/// The number of tokens in a block of keys and values.
const BLOCK: u64 = 16;

/// The beginning of the IDs.
const PREFIX: &str = "kept-";

fn id(segment: u64) -> String {
    format!("{PREFIX}{segment}")
}

fn path(id: &str) -> String {
    format!("/v1/documents/{id}")
}

fn text(segment: u64) -> String {
    format!("note {} .\n{}", id(segment), document(segment as usize % 60))
}

/// Finds the documents of earlier segments, registers that of this one, and deletes the one that has had its time. A
/// segment that was interrupted may have done a part of this.
pub(crate) async fn keep(place: &Place, segment: u64) {
    for (key, tenant) in KEYS {
        let place = place.with_key(key);
        for earlier in segment.saturating_sub(KEPT)..segment {
            find(&place, tenant, earlier).await;
        }
        let Some(known) = ids(&place).await else { continue };
        let mut body = json!({"text": text(segment), "title": "kept"});
        if segment.is_multiple_of(2) {
            body["system"] = json!(SYSTEM);
        }
        let new = id(segment);
        let status = if known.contains(&new) { 200 } else { 201 };
        place.json("documents kept", ("PUT", &path(&new), body), status).await;
        // The state of the soak that is in its file does not count on it any more.
        if let Some(old) = segment.checked_sub(KEPT + 1).map(id).filter(|old| known.contains(old)) {
            place.json("documents deleted", ("DELETE", &path(&old), Value::Null), 200).await;
        }
    }
}

/// Asks with the text of a document that must be registered.
async fn find(place: &Place, tenant: &str, segment: u64) {
    let (id, text) = (id(segment), text(segment));
    let Some(read) = place.json("documents kept", ("GET", &path(&id), Value::Null), 200).await else {
        return;
    };
    if read["text"] != text.as_str() {
        place.tally.violation(format!("the document {id} of {tenant} has the text {}", read["text"]));
    }
    let prompt = format!("{}{text}{}alba ?", document(1), document(2));
    let asks = asked(Dialect::Chat, &prompt, 2);
    let answer = place.json("documents kept", ("POST", Dialect::Chat.path(), asks), 200).await;
    if answer.is_some_and(|answer| !names(&answer, &id)) {
        place.tally.violation(format!("the kept document {id} of {tenant} was not found in a prompt"));
    }
}

/// Returns true if an answer says that a document stands in its prompt.
pub(crate) fn names(answer: &Value, id: &str) -> bool {
    answer["kv"]["parts"].as_array().into_iter().flatten().any(|part| part["id"] == id)
}

async fn listed(place: &Place) -> Option<Vec<Value>> {
    let list = place.json("documents listed", ("GET", "/v1/documents", Value::Null), 200).await?;
    list["data"].as_array().cloned()
}

async fn ids(place: &Place) -> Option<Vec<String>> {
    let list = listed(place).await?;
    Some(list.iter().filter_map(|document| document["id"].as_str().map(str::to_owned)).collect())
}

/// Deletes what clients of an interrupted segment have left registered, because it is repeated with the same IDs.
pub(crate) async fn remove_others(place: &Place) {
    for (key, _) in KEYS {
        let place = place.with_key(key);
        for id in ids(&place).await.unwrap_or_default().iter().filter(|id| !id.starts_with(PREFIX)) {
            // Its time may have passed since it was listed.
            place.json_with("documents deleted", ("DELETE", &path(id), Value::Null), &[200, 404]).await;
        }
    }
}

/// Returns the number of blocks of the documents that are pinned, or `None` if the server has not counted their tokens.
pub(crate) async fn pinned_blocks(place: &Place) -> Option<usize> {
    let mut blocks = 0;
    for (key, _) in KEYS {
        for document in listed(&place.with_key(key)).await? {
            if document["pinned"] == true {
                blocks += document["tokens"].as_u64()?.div_ceil(BLOCK);
            }
        }
    }
    usize::try_from(blocks).ok()
}
