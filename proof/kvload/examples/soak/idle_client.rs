//! The process of the clients of idle connections. It gets orders from the soak, one per line, and answers each with a
//! report. Without a soak, it ends.

use std::io::{BufRead as _, ErrorKind, Read as _, Result, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::served::RECEIVE_TIME;
use crate::users::Stop;

/// An order of the soak.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Open the connections that are missing, but no longer than this time.
    Open(Duration),
    /// Forget the connections that the server has closed.
    Count,
}

/// The connections after an order.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    /// The number of connections that are open.
    pub(crate) open: usize,
    /// The number of those that the server has closed since the last report, sooner than it may.
    pub(crate) early: usize,
}

/// Follows orders until there are no more.
pub(crate) fn follow(address: SocketAddr, wanted: usize) -> Result<()> {
    let mut open = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let early = match serde_json::from_str(&line?)? {
            Order::Open(time) => {
                open_missing(&mut open, wanted, address, &Stop::at(Instant::now() + time));
                0
            }
            Order::Count => forget_closed(&mut open),
        };
        let report = serde_json::to_string(&Report { open: open.len(), early })?;
        writeln!(std::io::stdout().lock(), "{report}")?;
    }
    Ok(())
}

fn open_missing(open: &mut Vec<(Instant, TcpStream)>, wanted: usize, address: SocketAddr, stop: &Stop) {
    while open.len() < wanted && !stop.is_over() {
        let began = Instant::now();
        let Ok(mut stream) = TcpStream::connect_timeout(&address, Duration::from_secs(5)) else { break };
        // Every other client begins a request that it never ends.
        if open.len().is_multiple_of(2)
            && stream.write_all(b"POST /v1/chat/completions HTTP/1.1\r\n").is_err()
        {
            break;
        }
        if stream.set_nonblocking(true).is_err() {
            break;
        }
        open.push((began, stream));
    }
}

/// Returns the number of connections that were closed before the server may do so.
fn forget_closed(open: &mut Vec<(Instant, TcpStream)>) -> usize {
    let mut early = 0;
    open.retain_mut(|(since, stream)| {
        let is_open = matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        early += usize::from(!is_open && since.elapsed() < RECEIVE_TIME);
        is_open
    });
    early
}
