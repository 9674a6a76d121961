//! The origins of web pages: which of them may use the server, in a browser on anybody's machine.

use std::net::IpAddr;
use std::time::Duration;

use axum::http::header::{HOST, ORIGIN, RETRY_AFTER};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::error::{Error, Result};
use crate::refusal::{Kind, Refusal};

/// The time for which a browser remembers that a page may use the server.
const REMEMBERED: Duration = Duration::from_secs(3600);

/// The origins of pages that may use the server, beside its own.
#[derive(Debug, Default)]
pub(crate) struct Origins {
    named: Vec<HeaderValue>,
    /// True for the pages of every site.
    any: bool,
}

impl Origins {
    /// Reads the names of origins, or `*` for all.
    ///
    /// # Errors
    /// Returns [`Error::Origin`] for a name that no browser sends, and [`Error::AnyOrigin`] for `*` without keys.
    // Decision: docs/decisions/serve.md#web-pages-of-others-cannot-use-a-server-without-keys
    pub(crate) fn new(names: &[String], has_keys: bool) -> Result<Self> {
        let any = names.iter().any(|name| name == "*");
        if any && !has_keys {
            return Err(Error::AnyOrigin);
        }
        let named = names.iter().filter(|name| *name != "*").map(|name| named(name));
        Ok(Self { named: named.collect::<Result<_>>()?, any })
    }

    /// Returns the layer that tells browsers about the origins, or `None` if only the server's own pages may use it.
    pub(crate) fn layer(&self, exposed: impl IntoIterator<Item = HeaderName>) -> Option<CorsLayer> {
        let origins = match &*self.named {
            _ if self.any => AllowOrigin::any(),
            [] => return None,
            named => AllowOrigin::list(named.iter().cloned()),
        };
        let exposed: Vec<HeaderName> = exposed.into_iter().chain([RETRY_AFTER]).collect();
        let layer = CorsLayer::new()
            .allow_origin(origins)
            .allow_methods([Method::GET, Method::POST, Method::PUT, Method::DELETE])
            // Clients send headers about themselves, which differ from version to version and change nothing here.
            .allow_headers(AllowHeaders::mirror_request())
            .allow_private_network(true)
            .expose_headers(exposed)
            .max_age(REMEMBERED);
        Some(layer)
    }

    /// Checks that a request does not come from another site's page. Browsers say from which page a request comes, and
    /// other clients say nothing. `is_local` is true for a server that only this machine reaches: pages reach it by a name
    /// of their own that leads to this machine, so its name must be `localhost` or an address.
    ///
    /// # Errors
    /// Refuses other origins and names.
    // Decision: docs/decisions/serve.md#web-pages-of-others-cannot-use-a-server-without-keys
    pub(crate) fn check(&self, headers: &HeaderMap, is_local: bool) -> Result<(), Refusal> {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let refused = |what: &str, remedy: &str| {
            let reason = format!("{what}; a server without keys answers no web pages of others: {remedy}");
            Err(Refusal::new(Kind::Forbidden, reason))
        };
        let host = text(HOST).unwrap_or_default();
        if let Some(value) = headers.get(ORIGIN) {
            let origin = text(ORIGIN).unwrap_or_default();
            let own = origin.split_once("://").map(|(_, own)| own);
            if own.is_none_or(|own| !own.eq_ignore_ascii_case(host)) && !self.named.contains(value) {
                return refused(
                    &format!("the request comes from a page of {origin:?}"),
                    "give it --allow-origin or --api-key-file",
                );
            }
        }
        if is_local && !host.is_empty() && !is_this_machine(host) {
            return refused(
                &format!("the request is for the host {host:?}, which is not localhost"),
                "give it --api-key-file",
            );
        }
        Ok(())
    }
}

/// Reads an origin as browsers send it: a scheme, a host, and a port unless it is the scheme's own.
fn named(name: &str) -> Result<HeaderValue> {
    let wrong = |reason| Error::Origin { origin: name.to_owned(), reason };
    if name == "null" {
        return Err(wrong("pages of every site can send it"));
    }
    let uri: Uri = name.parse().map_err(|_| wrong("it is not SCHEME://HOST or SCHEME://HOST:PORT"))?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err(wrong("it has no scheme, such as https://"));
    };
    if authority.as_str().contains('@') || name != format!("{scheme}://{authority}") {
        return Err(wrong("it has more than a scheme, a host and a port; leave out the path and the slash"));
    }
    if let ("http", Some(80)) | ("https", Some(443)) = (scheme, uri.port_u16()) {
        return Err(wrong("browsers leave out the port of the scheme"));
    }
    if name.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err(wrong("browsers send it in small letters"));
    }
    HeaderValue::from_str(name).map_err(|_| wrong("no header can have it"))
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
    #[case::allowed(Some("https://app.example:8443"), "localhost:8000", true)]
    #[case::allowed_on_another_port(Some("https://app.example"), "localhost:8000", false)]
    #[case::allowed_as_a_beginning(Some("https://app.example:8443.evil.example"), "localhost:8000", false)]
    #[case::allowed_at_a_name(Some("https://app.example:8443"), "evil.example", false)]
    #[case::rebound(Some("http://evil.example:8000"), "evil.example:8000", false)]
    #[case::rebound_without_origin(None, "evil.example", false)]
    #[case::name_that_begins_so(None, "localhost.example", false)]
    fn pages_of_others_are_refused(#[case] origin: Option<&str>, #[case] host: &str, #[case] fits: bool) {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, host.parse().unwrap());
        if let Some(origin) = origin {
            headers.insert(ORIGIN, origin.parse().unwrap());
        }
        let origins = Origins::new(&["https://app.example:8443".to_owned()], false).unwrap();
        assert_eq!(origins.check(&headers, true).is_ok(), fits);
    }

    #[test]
    fn a_server_for_other_machines_may_have_any_name() {
        let headers: HeaderMap = [(HOST, "models.lan:8000".parse().unwrap())].into_iter().collect();
        let origins = Origins::default();
        assert!(origins.check(&headers, false).is_ok() && origins.check(&headers, true).is_err());
    }

    #[rstest]
    #[case("http://localhost:3000", "")]
    #[case("https://app.example", "")]
    #[case("chrome-extension://abcdefgh", "")]
    #[case("http://[::1]:3000", "")]
    #[case("app.example", "no scheme")]
    #[case("https://app.example/", "the slash")]
    #[case("https://app.example/page", "the path")]
    #[case("https://me@app.example", "more than")]
    #[case("https://app.example:443", "the port of the scheme")]
    #[case("https://App.example", "small letters")]
    #[case("null", "every site")]
    #[case("https://a b", "SCHEME://HOST")]
    #[case("", "SCHEME://HOST")]
    fn origins_are_those_that_browsers_send(#[case] name: &str, #[case] reason: &str) {
        match Origins::new(&[name.to_owned()], false) {
            Ok(_) => assert_eq!(reason, ""),
            Err(error) => {
                let error = error.to_string();
                assert!(!reason.is_empty() && error.contains(reason) && error.contains(name), "{error}");
            }
        }
    }

    #[test]
    fn every_origin_needs_keys() {
        let any = ["*".to_owned()];
        assert!(matches!(Origins::new(&any, false), Err(Error::AnyOrigin)));
        assert!(Origins::new(&any, true).is_ok());
    }
}
