//! The origin of requests to a server without keys: other people's web pages may not use it.

use std::net::IpAddr;

use axum::http::HeaderMap;
use axum::http::header::{HOST, ORIGIN};

use crate::refusal::{Kind, Refusal};

/// Checks that a request does not come from another site's page. Browsers say from which page a request comes, and other
/// clients say nothing. `is_local` is true for a server that only this machine reaches: pages reach it by a name of their own
/// that leads to this machine, so its name must be `localhost` or an address.
///
/// # Errors
/// Refuses other origins and names.
// Decision: docs/decisions/serve.md#web-pages-of-others-cannot-use-a-server-without-keys
pub(crate) fn check(headers: &HeaderMap, is_local: bool) -> Result<(), Refusal> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let refused = |what: &str| {
        let reason =
            format!("{what}; a server without keys answers no web pages of others: give it --api-key-file");
        Err(Refusal::new(Kind::Forbidden, reason))
    };
    let host = text(HOST).unwrap_or_default();
    if headers.contains_key(ORIGIN) {
        let origin = text(ORIGIN).unwrap_or_default();
        let own = origin.split_once("://").map(|(_, own)| own);
        if own.is_none_or(|own| !own.eq_ignore_ascii_case(host)) {
            return refused(&format!("the request comes from a page of {origin:?}"));
        }
    }
    if is_local && !host.is_empty() && !is_this_machine(host) {
        return refused(&format!("the request is for the host {host:?}, which is not localhost"));
    }
    Ok(())
}

/// Returns true for an address or `localhost`, with a port or without.
fn is_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::program(None, "127.0.0.1:8000", true)]
    #[case::own_page(Some("http://localhost:8000"), "localhost:8000", true)]
    #[case::six(None, "[::1]:8000", true)]
    #[case::no_name(None, "", true)]
    #[case::other_page(Some("https://example.com"), "127.0.0.1:8000", false)]
    #[case::other_port(Some("http://localhost:9000"), "localhost:8000", false)]
    #[case::file(Some("null"), "localhost:8000", false)]
    #[case::rebound(Some("http://evil.example:8000"), "evil.example:8000", false)]
    #[case::rebound_without_origin(None, "evil.example", false)]
    #[case::name_that_begins_so(None, "localhost.example", false)]
    fn pages_of_others_are_refused(#[case] origin: Option<&str>, #[case] host: &str, #[case] fits: bool) {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, host.parse().unwrap());
        if let Some(origin) = origin {
            headers.insert(ORIGIN, origin.parse().unwrap());
        }
        assert_eq!(check(&headers, true).is_ok(), fits);
    }

    #[test]
    fn a_server_for_other_machines_may_have_any_name() {
        let headers: HeaderMap = [(HOST, "models.lan:8000".parse().unwrap())].into_iter().collect();
        assert!(check(&headers, false).is_ok() && check(&headers, true).is_err());
    }
}
