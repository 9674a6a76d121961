//! Connections on which nothing, or only the beginning of a request, is sent. Their clients are in a process of their own,
//! because each end of a connection takes one of the files that a process may open.

use std::io::{BufRead as _, BufReader, Error, Result, Write as _};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::idle_client::{Order, Report};
use crate::served::RECEIVE_TIME;
use crate::tally::Tally;
use crate::users::Stop;

/// The number of files that are open besides idle connections: other connections, at both ends, and what the process has.
const OTHERS: u64 = 1000;

/// The least share of the idle connections that are wanted that must be open at the same time.
const LEAST: f64 = 0.9;

/// The time in which all can be opened while there is no traffic, before the server closes the first ones.
pub(crate) const TO_OPEN: Duration = Duration::from_secs(20);

/// Raises the limit of open files as far as the process may, and returns it.
pub(crate) fn raise_limit() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = setrlimit(Resource::Nofile, raised);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns the number of idle connections that a limit of open files leaves room for at the server's end.
pub(crate) fn room(files: u64, users: u64) -> usize {
    usize::try_from(files.saturating_sub(OTHERS + 4 * users)).unwrap_or(usize::MAX)
}

/// Idle connections, as the process of their clients reports them.
///
/// # Drop behaviour
/// Ends the process, which closes the connections, and waits for it.
pub(crate) struct IdleConnections {
    wanted: usize,
    open: usize,
    most: usize,
    /// The time that there was to open them.
    time: Duration,
    clients: Child,
    /// `None` once the process is to end.
    orders: Option<ChildStdin>,
    reports: BufReader<ChildStdout>,
    failed: Option<Error>,
}

impl IdleConnections {
    /// Starts the process of the clients, without connections.
    pub(crate) fn start(address: SocketAddr, wanted: usize) -> Result<Self> {
        let mut clients = Command::new(std::env::current_exe()?)
            .args(["--idle-client", &address.to_string(), "--idle", &wanted.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = clients.stdin.take();
        let reports = clients.stdout.take().map(BufReader::new);
        let reports = reports.ok_or_else(|| Error::other("the idle clients have no output"))?;
        Ok(Self { wanted, open: 0, most: 0, time: Duration::ZERO, clients, orders, reports, failed: None })
    }

    /// Checks that most of the connections that are wanted were open at the same time, unless there was nothing left to do.
    pub(crate) fn judge(&self, tally: &Tally) {
        println!("up to {} of {} idle connections were open", self.most, self.wanted);
        if self.time >= TO_OPEN && (self.most as f64) < LEAST * self.wanted as f64 {
            tally.violation(format!(
                "at most {} of {} idle connections were open at the same time",
                self.most, self.wanted
            ));
        }
    }

    /// Returns how many are open.
    pub(crate) fn now(&self) -> usize {
        self.open
    }

    /// Opens the connections that are missing.
    pub(crate) fn open(&mut self, stop: &Stop) {
        self.time += stop.left();
        match self.ask(Order::Open(stop.left())) {
            Ok(report) => self.most = self.most.max(report.open),
            Err(error) => self.failed = Some(error),
        }
    }

    /// Forgets the connections that the server has closed, which it may do only after the time that it gives a client.
    pub(crate) fn count_open(&mut self, tally: &Tally) {
        let counted = match self.failed.take() {
            Some(error) => Err(error),
            None => self.ask(Order::Count),
        };
        match counted {
            Ok(Report { early: 0, .. }) => {}
            Ok(Report { early, .. }) => {
                tally.violation(format!(
                    "{early} idle connections were closed before {RECEIVE_TIME:?} had passed"
                ));
            }
            Err(error) => tally.violation(format!("the idle clients do not answer: {error}")),
        }
    }

    /// Sends an order to the process of the clients, and waits for its report.
    fn ask(&mut self, order: Order) -> Result<Report> {
        let orders = self.orders.as_mut().ok_or_else(|| Error::other("they have ended"))?;
        writeln!(orders, "{}", serde_json::to_string(&order)?)?;
        let mut line = String::new();
        self.reports.read_line(&mut line)?;
        let report: Report = serde_json::from_str(&line)?;
        self.open = report.open;
        Ok(report)
    }
}

impl Drop for IdleConnections {
    fn drop(&mut self) {
        // Without orders, the process ends.
        drop(self.orders.take());
        let _ = self.clients.wait();
    }
}
