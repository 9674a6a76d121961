//! Tests of the server with raw HTTP.

mod bad_input;
mod chat;
mod client;
mod common;
mod documents;
mod endpoints;
mod shutdown;
mod tenants;
