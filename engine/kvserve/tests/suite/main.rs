//! Tests of the server with raw HTTP.

mod anthropic;
mod bad_input;
mod chat;
mod client;
mod common;
mod documents;
mod endpoints;
mod page;
mod responses;
mod shutdown;
mod tenants;
