//! Tests of the server with raw HTTP.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]
#![allow(clippy::needless_pass_by_value, reason = "JSON is written where it is passed")]

mod alert_rules;
mod answer_form;
mod anthropic;
mod anthropic_tools;
mod arrivals;
mod bad_input;
mod chat;
mod client;
mod cohere;
mod cohere_tools;
mod common;
mod documents;
mod endpoints;
mod hostile;
mod kept_documents;
mod leisure;
mod many_documents;
mod origins;
mod page;
mod pinned_places;
mod pins;
mod recorded;
mod references;
mod registered;
mod registered_use;
mod responses;
mod responses_tools;
mod roles;
mod shutdown;
mod tenants;
mod tooled;
mod tools;
mod vanishing;
