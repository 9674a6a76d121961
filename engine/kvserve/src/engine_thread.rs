//! The thread that owns the engine.
//!
//! Other threads send it commands. Between commands it steps the engine while there are requests, and sleeps
//! otherwise. Answers reach their readers through their own channels, so a slow reader does not delay a step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use kvengine::{Engine, Step};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tracing::error;

use crate::refusal::Refusal;

/// Work for the thread.
type Command = Box<dyn FnOnce(&mut Engine) + Send>;

/// The thread that owns the engine.
///
/// # Drop behaviour
/// Ends the thread, which drops the engine with all its requests, and waits for it.
#[derive(Debug)]
pub(crate) struct EngineThread {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

/// Sends commands to the thread.
#[derive(Debug, Clone)]
pub(crate) struct EngineHandle {
    commands: Arc<Mutex<Option<Sender<Command>>>>,
    /// Gone once the thread has ended.
    thread: Weak<()>,
    last: Arc<Mutex<Step>>,
}

impl EngineThread {
    /// Starts the thread.
    pub(crate) fn start(engine: Engine) -> std::io::Result<Self> {
        let (sender, commands) = channel();
        let last = Arc::default();
        let steps = Arc::clone(&last);
        let alive = Arc::new(());
        let life = Arc::downgrade(&alive);
        let thread = std::thread::Builder::new().name("kv-engine".to_owned()).spawn(move || {
            run(engine, &commands, &steps);
            drop(alive);
        })?;
        let handle = EngineHandle { commands: Arc::new(Mutex::new(Some(sender))), thread: life, last };
        Ok(Self { handle, thread: Some(thread) })
    }

    pub(crate) fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        // Without senders, the thread ends after its current step.
        self.handle.commands.lock().take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl EngineHandle {
    /// Runs `work` on the engine's thread, between two steps, and returns its result.
    ///
    /// # Errors
    /// Returns a refusal if the thread has ended, or if `work` panics.
    pub(crate) async fn call<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Engine) -> R + Send + 'static,
    ) -> Result<R, Refusal> {
        let (sender, result) = oneshot::channel();
        let command: Command = Box::new(move |engine| {
            // The caller may have gone.
            let _ = sender.send(work(engine));
        });
        let sent = self.commands.lock().as_ref().is_some_and(|commands| commands.send(command).is_ok());
        if !sent {
            return Err(Refusal::engine_gone());
        }
        result.await.map_err(|_| Refusal::engine_gone())
    }

    /// Returns true unless the thread is ending.
    pub(crate) fn is_running(&self) -> bool {
        self.commands.lock().is_some() && self.thread.strong_count() > 0
    }

    /// Returns what the last step left.
    pub(crate) fn last_step(&self) -> Step {
        *self.last.lock()
    }
}

fn run(mut engine: Engine, commands: &Receiver<Command>, last: &Mutex<Step>) {
    let mut idle = true;
    loop {
        let command = if idle {
            // Nothing to compute: the thread sleeps until there is.
            commands.recv().map_err(|_| TryRecvError::Disconnected)
        } else {
            commands.try_recv()
        };
        match command {
            Ok(command) => {
                if catch_unwind(AssertUnwindSafe(|| command(&mut engine))).is_err() {
                    error!("a command panicked on the engine's thread");
                }
                idle = false;
                continue;
            }
            Err(TryRecvError::Disconnected) => return,
            Err(TryRecvError::Empty) => {}
        }
        // A sleeping engine has no requests: it does not fall asleep with some, and refuses new ones.
        let Ok(step) = catch_unwind(AssertUnwindSafe(|| engine.step())) else {
            error!("a step panicked; its requests have ended, and the engine goes on");
            continue;
        };
        let step = step.unwrap_or(Step { tokens: 0, running: 0, waiting: 0, ..*last.lock() });
        idle = step.is_idle();
        *last.lock() = step;
    }
}
