//! Signs that the server has a request whose answer waits.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Mutex, Once};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::client::call;

/// The longest time until a request arrives.
const PATIENCE: Duration = Duration::from_secs(60);

/// The IDs of the requests that any server of the process has.
static ARRIVED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Notes the ID of each request from the span in which it is answered.
struct Arrivals;

/// Posts to a path in a thread of its own, and waits until the server answers the request. The thread returns the status.
/// The ID must be that of no other request.
pub(crate) fn posted(address: SocketAddr, path: &'static str, id: &'static str) -> JoinHandle<u16> {
    static NOTED: Once = Once::new();
    NOTED.call_once(|| tracing::subscriber::set_global_default(Arrivals).unwrap());
    let posting = thread::spawn(move || call(address, "POST", path, &[("x-request-id", id)], b"{}").status);
    let until = Instant::now() + PATIENCE;
    while !ARRIVED.lock().unwrap().contains(id) {
        assert!(Instant::now() < until, "{path} does not arrive");
        thread::sleep(Duration::from_millis(2));
    }
    // The handler, which runs next, may begin a task.
    assert_eq!(call(address, "GET", "/health", &[], b"").status, 200);
    posting
}

impl Visit for Arrivals {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "id" {
            ARRIVED.lock().unwrap().insert(format!("{value:?}").trim_matches('"').to_owned());
        }
    }
}

impl Subscriber for Arrivals {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_span() && metadata.name() == "request"
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        span.record(&mut Self);
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
