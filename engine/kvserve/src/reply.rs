//! The answer to a request, in no dialect: decoded text and reports, while the engine computes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::poll_fn;
use kvengine::{Answer, AnswerEvent, FinishReason, Generation, TokenLogprobs};
use kvmodel::{AnswerPart, TextCodec, TextStream, ToolCall};
use tokio::sync::{mpsc, watch};

use crate::calls::CallReader;
use crate::metrics::{Ended, ServerMetrics};
use crate::page::{RecentRequest, RecentRequests};
use crate::refusal::Refusal;
use crate::report::{Described, KvReport};
use crate::shape::CallReading;

/// The number of events that wait for a slow reader. The engine does not wait for the reader in any case.
const BUFFER: usize = 64;

/// The longest time that a finished piece of text waits for its reader before the request is cancelled.
const PATIENCE: Duration = Duration::from_secs(120);

/// An answer while it is computed.
///
/// # Drop behaviour
/// The request is cancelled if it has not ended.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) prompt_tokens: usize,
    /// The events, which end with the last sample or with a refusal.
    pub(crate) events: mpsc::Receiver<Result<ReplyEvent, Refusal>>,
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
    pub(crate) text: String,
    pub(crate) logprob: f32,
    /// The likeliest tokens with their log-probabilities, likeliest first.
    pub(crate) top: Vec<(String, f32)>,
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

/// The properties of a request that its reply needs.
#[derive(Debug)]
pub(crate) struct ReplyForm {
    pub(crate) samples: usize,
    pub(crate) stop: Vec<String>,
    pub(crate) logprobs: bool,
    /// The reading of calls of tools, if there may be some.
    pub(crate) calls: Option<CallReading>,
    /// Makes the report from the costs of a sample.
    pub(crate) describe: Described,
    pub(crate) metrics: Arc<ServerMetrics>,
    pub(crate) recent: Arc<RecentRequests>,
    /// The tenant, for the page of the server.
    pub(crate) tenant: Option<Arc<str>>,
    /// The time at which the request arrived.
    pub(crate) arrived: Instant,
    /// The time from then to the submission to the engine, which happens between two steps.
    pub(crate) waited: Duration,
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
        tokio::spawn(async move {
            decode(answer, &codec, &form, closing, &sender).await;
            drop(guard);
        });
        Self { prompt_tokens, events }
    }

    /// Waits for all samples.
    ///
    /// # Errors
    /// Returns the refusal if the request fails.
    pub(crate) async fn whole(mut self, samples: usize) -> Result<(Vec<WholeSample>, KvReport), Refusal> {
        let mut all: Vec<WholeSample> = (0..samples).map(|_| WholeSample::default()).collect();
        let mut last = None;
        while let Some(event) = self.events.recv().await {
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

/// Decodes until the answer ends or its reader goes away. Dropping the answer cancels the request.
async fn decode(
    answer: Answer,
    codec: &TextCodec,
    form: &ReplyForm,
    closing: watch::Receiver<bool>,
    sender: &mpsc::Sender<Result<ReplyEvent, Refusal>>,
) {
    match decode_all(answer, codec, form, closing, sender).await {
        Ok(true) => {}
        Ok(false) => form.metrics.ended(Ended::Abort),
        Err(refusal) => {
            form.metrics.ended(Ended::Error);
            let _ = sender.send_timeout(Err(refusal), PATIENCE).await;
        }
    }
}

/// Decodes like [`decode`]. Returns true if all samples have ended, and false if the reader has gone.
async fn decode_all(
    mut answer: Answer,
    codec: &TextCodec,
    form: &ReplyForm,
    mut closing: watch::Receiver<bool>,
    sender: &mpsc::Sender<Result<ReplyEvent, Refusal>>,
) -> Result<bool, Refusal> {
    let mut decoder = Decoder::new(codec, form)?;
    loop {
        let event = tokio::select! {
            biased;
            () = sender.closed() => return Ok(false),
            _ = closing.wait_for(|&closing| closing) => return Err(Refusal::shutting_down()),
            event = poll_fn(|context| answer.poll_next(context)) => event,
        };
        let Some(event) = event else { return Ok(true) };
        for event in decoder.next(&answer, event?)? {
            if sender.send_timeout(Ok(event), PATIENCE).await.is_err() {
                return Ok(false);
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
        if let Some(last) = decoding.last.replace(now) {
            self.form.metrics.next_token(now - last);
        }
        if self.first.is_none() {
            let after = now - self.form.arrived;
            self.form.metrics.first_token(after);
            self.first = Some(after);
        }
        decoding.tokens += 1;
        let text = decoding.stream.push(token)?.to_owned();
        if let Some(logprobs) = logprobs.filter(|_| self.form.logprobs) {
            decoding.fresh.push(described(self.codec, logprobs)?);
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
        let (metrics, tokens) = (&self.form.metrics, decoding.tokens);
        let (elapsed, queued) = (self.form.arrived.elapsed(), self.form.waited + generation.queued);
        metrics.sample(generation, tokens, (elapsed, queued), self.ended == 0);
        let report = self.form.describe.report(generation, self.first.unwrap_or(elapsed), queued);
        if self.ended == 0 {
            let form = self.form;
            let segments = form.describe.segments(generation);
            form.recent.add(RecentRequest::new(&report, segments, elapsed, form.tenant.as_deref()));
        }
        metrics.ended(if reason == EndReason::Length { Ended::Length } else { Ended::Stop });
        self.ended += 1;
        events.push(ReplyEvent::End(SampleEnd { sample, reason, tokens, report }));
        Ok(events)
    }
}

/// Returns a token with the texts of the likeliest tokens at its position.
fn described(codec: &TextCodec, logprobs: &TokenLogprobs) -> Result<ReplyToken, Refusal> {
    let top = logprobs.top.iter().map(|&(token, logprob)| Ok((codec.token_text(token)?, logprob)));
    Ok(ReplyToken {
        text: codec.token_text(logprobs.token)?,
        logprob: logprobs.logprob,
        top: top.collect::<Result<_, Refusal>>()?,
    })
}
