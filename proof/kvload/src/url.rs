//! The address of a server.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// The address of a server, such as `http://127.0.0.1:8000`. A path in it stands before the paths of requests; a `/v1` at
/// its end is left out, because the paths of requests contain it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerUrl {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) path: String,
}

impl FromStr for ServerUrl {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self> {
        let wrong = |reason| Error::Url { url: url.to_owned(), reason };
        let Some(rest) = url.strip_prefix("http://") else {
            return Err(wrong(if url.starts_with("https://") {
                "the client does not encrypt"
            } else {
                "it does not begin with http://"
            }));
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let path = path.trim_end_matches('/');
        let path = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        // The colons of an IPv6 address stand between brackets.
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                (host, port.parse().map_err(|_| wrong("the port is no number below 65536"))?)
            }
            _ => (authority, 80),
        };
        if host.is_empty() || host.contains([' ', '@']) {
            return Err(wrong("it has no host"));
        }
        Ok(Self { host: host.to_owned(), port, path })
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}:{}{}", self.host, self.port, self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_host_a_port_and_a_path() {
        let parsed = |url: &str| url.parse::<ServerUrl>().map(|url| url.to_string());
        for (url, same) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
            ("http://localhost", "http://localhost:80"),
            ("http://[::1]:8080/v1/", "http://[::1]:8080"),
            ("http://host:1/proxy/v1", "http://host:1/proxy"),
        ] {
            assert_eq!(parsed(url).unwrap(), same);
        }
        for (url, reason) in [
            ("https://a:1", "encrypt"),
            ("127.0.0.1:8000", "http://"),
            ("http://:80", "host"),
            ("http://a:x", "port"),
        ] {
            assert!(parsed(url).unwrap_err().to_string().contains(reason), "{url}");
        }
    }
}
