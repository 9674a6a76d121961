//! The answer to a request, in no dialect: decoded text and reports, while the engine computes.

use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures_util::future::poll_fn;
use kvengine::{Answer, AnswerEvent, FinishReason, Generation, TokenLogprobs};
use kvmodel::{AnswerPart, TextCodec, TextStream, ToolCall};
use parking_lot::Mutex;
use tokio::sync::mpsc::error::{SendTimeoutError, TrySendError};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{Instrument as _, info};

use crate::calls::CallReader;
use crate::metrics::{Ended, ServerMetrics};
use crate::page::{RecentRequest, RecentRequests};
use crate::refusal::Refusal;
use crate::report::{Described, KvReport};
use crate::shape::CallReading;
use crate::token_texts::TokenTexts;

/// The number of events that wait for a slow reader. The engine does not wait for the reader in any case.
const BUFFER: usize = 64;

/// The time that a reader may take for each event, beyond its patience for the whole answer.
const EACH_EVENT: Duration = Duration::from_secs(1);

/// An answer while it is computed.
///
/// # Drop behaviour
/// The request is cancelled if it has not ended.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) prompt_tokens: usize,
    /// The events, which end with the last sample or with a refusal.
    events: mpsc::Receiver<Result<ReplyEvent, Refusal>>,
    /// The number of samples that have not ended.
    open: usize,
    /// The refusal that had no room among the events.
    last_words: Arc<OnceLock<Refusal>>,
}

/// An event of an answer.
#[derive(Debug)]
pub(crate) enum ReplyEvent {
    /// More of a sample.
    Piece(Piece),
    /// A call of a tool in a sample.
    Call(usize, ToolCall),
    /// The end of a sample.
    End(SampleEnd),
}

/// New text of a sample, with its tokens.
#[derive(Debug, Default)]
pub(crate) struct Piece {
    pub(crate) sample: usize,
    pub(crate) text: String,
    /// The tokens since the last piece, if the request asks for log-probabilities.
    pub(crate) tokens: Vec<ReplyToken>,
}

/// A token with its log-probability.
#[derive(Debug, Clone)]
pub(crate) struct ReplyToken {
    pub(crate) chosen: LikelyToken,
    /// The likeliest tokens, likeliest first.
    pub(crate) top: Vec<LikelyToken>,
}

/// A token as text and as bytes, with its log-probability.
#[derive(Debug, Clone)]
pub(crate) struct LikelyToken {
    pub(crate) text: String,
    pub(crate) bytes: Vec<u8>,
    pub(crate) logprob: f32,
}

/// The end of a sample.
#[derive(Debug)]
pub(crate) struct SampleEnd {
    pub(crate) sample: usize,
    pub(crate) reason: EndReason,
    /// The number of tokens of the sample.
    pub(crate) tokens: usize,
    /// The costs of the request so far.
    pub(crate) report: KvReport,
}

/// Why a sample ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EndReason {
    /// The model ended its answer.
    Stop,
    /// A stop string of the request.
    StopString(String),
    /// The model called tools.
    Calls,
    /// A limit.
    Length,
}

impl EndReason {
    /// Returns a word for the log.
    fn word(&self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::StopString(_) => "stop_string",
            Self::Calls => "calls",
            Self::Length => "length",
        }
    }
}

/// The properties of a request that its reply needs.
#[derive(Debug)]
pub(crate) struct ReplyForm {
    pub(crate) samples: usize,
    pub(crate) stop: Vec<String>,
    pub(crate) logprobs: bool,
    pub(crate) texts: TokenTexts,
    /// The reading of calls of tools, if there may be some.
    pub(crate) calls: Option<CallReading>,
    /// Makes the report from the costs of a sample.
    pub(crate) describe: Described,
    pub(crate) metrics: Arc<ServerMetrics>,
    pub(crate) recent: Arc<RecentRequests>,
    /// True for a request of the server itself, which is in no metric.
    pub(crate) is_quiet: bool,
    /// Told at the first token, when the documents of the request are in the cache.
    pub(crate) computed: Mutex<Option<oneshot::Sender<()>>>,
    /// The tenant, for the page of the server and for metrics.
    pub(crate) tenant: Option<Arc<str>>,
    /// The client's label, for metrics.
    pub(crate) label: Option<Arc<str>>,
    /// The time at which the request arrived.
    pub(crate) arrived: Instant,
    /// The time from then to the submission to the engine, which happens between two steps.
    pub(crate) waited: Duration,
    /// The time for which events may wait for their reader before the request is cancelled.
    pub(crate) patience: Duration,
}

/// The whole text of a sample.
#[derive(Debug, Default)]
pub(crate) struct WholeSample {
    pub(crate) text: String,
    pub(crate) calls: Vec<ToolCall>,
    pub(crate) tokens: Vec<ReplyToken>,
    pub(crate) num_tokens: usize,
    pub(crate) reason: Option<EndReason>,
}

impl Reply {
    /// Decodes an answer in a task of its own. `closing` turns true when the server ends all answers. `guard` is dropped
    /// at the end.
    pub(crate) fn start(
        (answer, prompt_tokens): (Answer, usize),
        codec: TextCodec,
        form: ReplyForm,
        closing: watch::Receiver<bool>,
        guard: impl Send + 'static,
    ) -> Self {
        let (sender, events) = mpsc::channel(BUFFER);
        let (open, last_words) = (form.samples, Arc::new(OnceLock::new()));
        let words = Arc::clone(&last_words);
        let decoding = async move {
            let mut sender = PatientSender::new(sender, form.patience);
            if let Err(refusal) = decode(answer, &codec, &form, closing, &mut sender).await {
                let _ = words.set(refusal);
            }
            drop(guard);
        };
        tokio::spawn(decoding.in_current_span());
        Self { prompt_tokens, events, open, last_words }
    }

    /// Returns the next event, or `None` behind the last one. An answer whose samples do not all end, ends with a refusal.
    pub(crate) async fn next(&mut self) -> Option<Result<ReplyEvent, Refusal>> {
        let event = self.events.recv().await;
        match &event {
            Some(Ok(ReplyEvent::End(_))) => self.open = self.open.saturating_sub(1),
            Some(Ok(_)) => {}
            Some(Err(_)) => self.open = 0,
            None if self.open == 0 => {}
            None => {
                self.open = 0;
                let refusal = self.last_words.get().cloned();
                return Some(Err(refusal.unwrap_or_else(Refusal::failed)));
            }
        }
        event
    }

    /// Waits for all samples.
    ///
    /// # Errors
    /// Returns the refusal if the request fails.
    pub(crate) async fn whole(mut self, samples: usize) -> Result<(Vec<WholeSample>, KvReport), Refusal> {
        let mut all: Vec<WholeSample> = (0..samples).map(|_| WholeSample::default()).collect();
        let mut last = None;
        while let Some(event) = self.next().await {
            match event? {
                ReplyEvent::Piece(piece) => {
                    let sample = &mut all[piece.sample];
                    sample.text += &piece.text;
                    sample.tokens.extend(piece.tokens);
                }
                ReplyEvent::Call(sample, call) => all[sample].calls.push(call),
                ReplyEvent::End(end) => {
                    let sample = &mut all[end.sample];
                    (sample.num_tokens, sample.reason) = (end.tokens, Some(end.reason));
                    last = Some(end.report);
                }
            }
        }
        last.map(|report| (all, report)).ok_or_else(Refusal::engine_gone)
    }
}

/// A sample that is being decoded.
struct Decoding<'a> {
    stream: TextStream<'a>,
    calls: Option<CallReader>,
    /// The tokens since the last piece.
    fresh: Vec<ReplyToken>,
    /// The number of tokens so far, up to the stop string.
    tokens: usize,
    /// The time of the last token.
    last: Option<Instant>,
    stopped: bool,
}

impl Decoding<'_> {
    /// Divides new text into text for the reader and calls.
    fn read(&mut self, text: String) -> Vec<AnswerPart> {
        match &mut self.calls {
            Some(calls) => calls.push(&text),
            None if text.is_empty() => Vec::new(),
            None => vec![AnswerPart::Text(text)],
        }
    }

    /// Returns the events for parts of a sample. Tokens are reported with the first text behind them.
    fn events(&mut self, sample: usize, parts: Vec<AnswerPart>) -> Vec<ReplyEvent> {
        let event = |part| match part {
            AnswerPart::Call(call) => ReplyEvent::Call(sample, call),
            AnswerPart::Text(text) => {
                ReplyEvent::Piece(Piece { sample, text, tokens: std::mem::take(&mut self.fresh) })
            }
        };
        parts.into_iter().map(event).collect()
    }
}

/// The samples of an answer that is being decoded.
struct Decoder<'a> {
    codec: &'a TextCodec,
    form: &'a ReplyForm,
    samples: Vec<Decoding<'a>>,
    /// The number of samples that have ended.
    ended: usize,
    /// The time from the arrival of the request to its first token.
    first: Option<Duration>,
}

/// Sends events to a reader that may be slow.
struct PatientSender {
    sender: mpsc::Sender<Result<ReplyEvent, Refusal>>,
    /// The time for which events may still wait.
    left: Duration,
}

/// Why an event was not sent.
enum Unsent {
    ReaderGone,
    ReaderSlow,
}

impl PatientSender {
    fn new(sender: mpsc::Sender<Result<ReplyEvent, Refusal>>, patience: Duration) -> Self {
        Self { sender, left: patience }
    }

    async fn send(&mut self, event: Result<ReplyEvent, Refusal>) -> Result<(), Unsent> {
        let event = match self.sender.try_send(event) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Closed(_)) => return Err(Unsent::ReaderGone),
            Err(TrySendError::Full(event)) => event,
        };
        let begun = Instant::now();
        let sent = self.sender.send_timeout(event, self.left.saturating_add(EACH_EVENT)).await;
        self.left = self.left.saturating_sub(begun.elapsed().saturating_sub(EACH_EVENT));
        sent.map_err(|error| match error {
            SendTimeoutError::Timeout(_) => Unsent::ReaderSlow,
            SendTimeoutError::Closed(_) => Unsent::ReaderGone,
        })
    }
}

/// Decodes until the answer ends or its reader goes away. Dropping the answer cancels the request.
///
/// # Errors
/// Returns a refusal that the reader does not get as an event.
async fn decode(
    answer: Answer,
    codec: &TextCodec,
    form: &ReplyForm,
    closing: watch::Receiver<bool>,
    sender: &mut PatientSender,
) -> Result<(), Refusal> {
    let count = |how| {
        if !form.is_quiet {
            form.metrics.ended(how);
        }
    };
    match decode_all(answer, codec, form, closing, sender).await {
        Ok(None) => Ok(()),
        Ok(Some(Unsent::ReaderGone)) => {
            info!("the client has gone; its request is cancelled");
            count(Ended::Abort);
            Ok(())
        }
        Ok(Some(Unsent::ReaderSlow)) => {
            info!("the client reads too slowly; its request is cancelled");
            count(Ended::Abort);
            Err(Refusal::slow_reader())
        }
        Err(refusal) => {
            info!(reason = refusal.message, "the answer has ended early");
            count(Ended::Error);
            let unsent = sender.send(Err(refusal.clone())).await;
            unsent.map_err(|_| refusal)
        }
    }
}

/// Decodes like [`decode`]. Returns why the reader does not get everything, if it does not.
async fn decode_all(
    mut answer: Answer,
    codec: &TextCodec,
    form: &ReplyForm,
    mut closing: watch::Receiver<bool>,
    sender: &mut PatientSender,
) -> Result<Option<Unsent>, Refusal> {
    let mut decoder = Decoder::new(codec, form)?;
    let reader = sender.sender.clone();
    // Both wait once for the whole answer, and not for each token.
    let (mut gone, mut ends) = (pin!(reader.closed()), pin!(closing.wait_for(|&closing| closing)));
    loop {
        let event = tokio::select! {
            biased;
            event = poll_fn(|context| answer.poll_next(context)) => event,
            () = &mut gone => return Ok(Some(Unsent::ReaderGone)),
            _ = &mut ends => return Err(Refusal::shutting_down()),
        };
        let Some(event) = event else { return Ok(None) };
        for event in decoder.next(&answer, event?)? {
            if let Err(unsent) = sender.send(Ok(event)).await {
                return Ok(Some(unsent));
            }
        }
    }
}

impl<'a> Decoder<'a> {
    fn new(codec: &'a TextCodec, form: &'a ReplyForm) -> Result<Self, Refusal> {
        let sample = |_| {
            let stream = TextStream::new(codec, form.stop.iter().cloned())?;
            let marks = form.calls.map(|calls| calls.format.marks()).unwrap_or_default();
            let (stream, calls) = (stream.showing(marks), form.calls.map(CallReader::new));
            Ok(Decoding { stream, calls, fresh: Vec::new(), tokens: 0, last: None, stopped: false })
        };
        let samples = (0..form.samples).map(sample).collect::<Result<_, Refusal>>()?;
        Ok(Self { codec, form, samples, ended: 0, first: None })
    }

    /// Decodes an event of the engine.
    fn next(&mut self, answer: &Answer, event: AnswerEvent) -> Result<Vec<ReplyEvent>, Refusal> {
        match event {
            AnswerEvent::Token { sample, token, logprobs } => {
                self.token(answer, sample, token, logprobs.as_deref())
            }
            AnswerEvent::End { sample, generation } => self.end(sample, &generation),
        }
    }

    fn token(
        &mut self,
        answer: &Answer,
        sample: usize,
        token: u32,
        logprobs: Option<&TokenLogprobs>,
    ) -> Result<Vec<ReplyEvent>, Refusal> {
        let Some(decoding) = self.samples.get_mut(sample).filter(|decoding| !decoding.stopped) else {
            return Ok(Vec::new());
        };
        let now = Instant::now();
        let metrics = (!self.form.is_quiet).then_some(&self.form.metrics);
        if let Some((last, metrics)) = decoding.last.replace(now).zip(metrics) {
            metrics.next_token(now - last);
        }
        if self.first.is_none() {
            let after = now - self.form.arrived;
            if let Some(metrics) = metrics {
                metrics.first_token(after);
            }
            self.first = Some(after);
            if let Some(computed) = self.form.computed.lock().take() {
                // Nobody may wait, at the end of the server.
                let _ = computed.send(());
            }
        }
        decoding.tokens += 1;
        let text = decoding.stream.push(token)?.to_owned();
        if let Some(logprobs) = logprobs.filter(|_| self.form.logprobs) {
            decoding.fresh.push(described(self.codec, &self.form.texts, logprobs)?);
        }
        let parts = decoding.read(text);
        if decoding.stream.is_stopped() || decoding.calls.as_ref().is_some_and(CallReader::is_complete) {
            decoding.stopped = true;
            answer.complete(sample);
        }
        Ok(decoding.events(sample, parts))
    }

    fn end(&mut self, sample: usize, generation: &Generation) -> Result<Vec<ReplyEvent>, Refusal> {
        let Some(decoding) = self.samples.get_mut(sample) else { return Ok(Vec::new()) };
        let text = decoding.stream.rest()?.to_owned();
        let reason = match (decoding.stream.stop_string(), generation.finish) {
            (Some(stop), _) => EndReason::StopString(stop.to_owned()),
            (None, FinishReason::Length) => EndReason::Length,
            (None, FinishReason::Stop | FinishReason::StopString) => EndReason::Stop,
        };
        let mut parts = decoding.read(text);
        let reason = match decoding.calls.as_mut() {
            None => reason,
            Some(calls) => {
                parts.extend(calls.finish(reason == EndReason::Stop));
                let was_cut = reason == EndReason::Length && !calls.is_complete();
                if calls.has_called() && !was_cut { EndReason::Calls } else { reason }
            }
        };
        let mut events = decoding.events(sample, parts);
        if !decoding.fresh.is_empty() {
            let tokens = std::mem::take(&mut decoding.fresh);
            events.push(ReplyEvent::Piece(Piece { sample, text: String::new(), tokens }));
        }
        let (form, tokens, is_first) = (self.form, decoding.tokens, self.ended == 0);
        let (elapsed, queued) = (form.arrived.elapsed(), form.waited + generation.queued);
        let report = form.describe.report(generation, self.first.unwrap_or(elapsed), queued);
        self.ended += 1;
        if !form.is_quiet {
            form.metrics.sample(generation, tokens, (elapsed, queued), is_first);
            form.metrics.ended(if reason == EndReason::Length { Ended::Length } else { Ended::Stop });
            if let Some(label) = form.label.as_ref().filter(|_| is_first) {
                form.metrics.labels.count(form.tenant.as_ref(), label, generation);
            }
            if is_first {
                let segments = form.describe.segments(generation);
                form.recent.add(RecentRequest::new(&report, segments, elapsed, form.tenant.as_deref()));
            }
            let ms = elapsed.as_millis() as u64;
            info!(sample, tokens, prompt_tokens = report.prompt_tokens, reason = reason.word(), ms, "ended");
        }
        events.push(ReplyEvent::End(SampleEnd { sample, reason, tokens, report }));
        Ok(events)
    }
}

/// Returns a token with the texts of the likeliest tokens at its position.
fn described(codec: &TextCodec, texts: &TokenTexts, logprobs: &TokenLogprobs) -> Result<ReplyToken, Refusal> {
    let one = |token, logprob| -> Result<LikelyToken, Refusal> {
        let (text, bytes) = texts.of(codec, token)?;
        Ok(LikelyToken { text, bytes, logprob })
    };
    let top = logprobs.top.iter().map(|&(token, logprob)| one(token, logprob));
    Ok(ReplyToken { chosen: one(logprobs.token, logprobs.logprob)?, top: top.collect::<Result<_, _>>()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(open: usize) -> (mpsc::Sender<Result<ReplyEvent, Refusal>>, Reply) {
        let (sender, events) = mpsc::channel(1);
        (sender, Reply { prompt_tokens: 1, events, open, last_words: Arc::default() })
    }

    #[test]
    fn an_answer_that_stops_before_its_end_is_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (sender, mut gone) = reply(1);
            drop(sender);
            assert!(matches!(gone.next().await, Some(Err(_))));
            assert!(gone.next().await.is_none());
            // A reader that takes nothing gets what waits, and then the reason.
            let (sender, mut slow) = reply(1);
            let mut sender = PatientSender::new(sender, Duration::ZERO);
            let piece = || Ok(ReplyEvent::Piece(Piece::default()));
            assert!(sender.send(piece()).await.is_ok());
            assert!(matches!(sender.send(piece()).await, Err(Unsent::ReaderSlow)));
            slow.last_words.set(Refusal::slow_reader()).unwrap();
            drop(sender);
            assert!(matches!(slow.next().await, Some(Ok(_))));
            assert_eq!(slow.next().await.unwrap().unwrap_err(), Refusal::slow_reader());
            assert!(slow.next().await.is_none());
        });
    }

    #[test]
    fn patience_is_for_the_whole_answer() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (sender, mut reply) = reply(1);
            let mut sender = PatientSender::new(sender, Duration::ZERO);
            let taken = tokio::spawn(async move {
                let mut taken = 0;
                while reply.events.recv().await.is_some() {
                    taken += 1;
                    tokio::time::sleep(EACH_EVENT / 50).await;
                }
                taken
            });
            // A reader that is only a little slow is waited for without any patience.
            for _ in 0..20 {
                assert!(sender.send(Ok(ReplyEvent::Piece(Piece::default()))).await.is_ok());
            }
            drop(sender);
            assert_eq!(taken.await.unwrap(), 20);
        });
    }
}
