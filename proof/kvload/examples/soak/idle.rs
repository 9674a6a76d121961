//! Connections on which nothing, or only the beginning of a request, is sent.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::served::RECEIVE_TIME;
use crate::tally::Tally;
use crate::users::Stop;

/// The number of files that are open besides idle connections: other connections, at both ends, and what the process has.
const OTHERS: u64 = 1000;

/// Raises the limit of open files as far as the process may, and returns it.
pub(crate) fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = setrlimit(Resource::Nofile, raised);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns the number of idle connections that a limit of open files leaves room for. Both ends are in this process.
pub(crate) fn room(files: u64, users: u64) -> usize {
    usize::try_from(files.saturating_sub(OTHERS + 4 * users) / 2).unwrap_or(usize::MAX)
}

/// Idle connections.
pub(crate) struct IdleConnections {
    address: SocketAddr,
    wanted: usize,
    open: Vec<(Instant, TcpStream)>,
    most: usize,
}

impl IdleConnections {
    pub(crate) fn new(address: SocketAddr, wanted: usize) -> Self {
        Self { address, wanted, open: Vec::new(), most: 0 }
    }

    /// Returns how many are wanted, and how many were open at the same time.
    pub(crate) fn reached(&self) -> (usize, usize) {
        (self.wanted, self.most)
    }

    /// Returns how many are open.
    pub(crate) fn now(&self) -> usize {
        self.open.len()
    }

    /// Opens the connections that are missing, while there is traffic.
    pub(crate) fn open(&mut self, stop: &Stop) {
        while self.open.len() < self.wanted && !stop.is_over() {
            let began = Instant::now();
            let Ok(mut stream) = TcpStream::connect_timeout(&self.address, Duration::from_secs(5)) else {
                break;
            };
            // Every other client begins a request that it never ends.
            if self.open.len().is_multiple_of(2)
                && stream.write_all(b"POST /v1/chat/completions HTTP/1.1\r\n").is_err()
            {
                break;
            }
            if stream.set_nonblocking(true).is_err() {
                break;
            }
            self.open.push((began, stream));
        }
        self.most = self.most.max(self.open.len());
    }

    /// Forgets the connections that the server has closed, which it may do only after the time that it gives a client.
    pub(crate) fn count_open(&mut self, tally: &Tally) {
        let mut early = 0;
        self.open.retain_mut(|(since, stream)| {
            let is_open =
                matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
            early += usize::from(!is_open && since.elapsed() < RECEIVE_TIME);
            is_open
        });
        if early > 0 {
            tally.violation(format!(
                "{early} idle connections were closed before {RECEIVE_TIME:?} had passed"
            ));
        }
    }
}
