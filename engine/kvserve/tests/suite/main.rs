//! Tests of the server with raw HTTP.

mod anthropic;
mod bad_input;
mod chat;
mod client;
mod cohere;
mod common;
mod documents;
mod endpoints;
mod page;
mod recorded;
mod registered;
mod responses;
mod shutdown;
mod tenants;
