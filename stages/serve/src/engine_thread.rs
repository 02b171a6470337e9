//! The loop that owns the engine: takes requests, steps, and hands out news, until the server stops.
//!
//! Everything that touches a model happens on this one thread. Requests come through a channel; the news of each go out
//! through a channel of its own that has room for all of its tokens, so that a client who reads slowly holds up nobody.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::Sender;

use super::metrics::{DraftTotals, Metrics, Outcome, Step};
use deepspec_engine::IDLE_TAU;
use deepspec_engine::progress::{Context, Event};
use deepspec_engine::{Engine, Request, Update};
use deepspec_engine::{Error, Result};

/// How often an idle server looks whether it is to stop.
const PATIENCE: Duration = Duration::from_millis(50);
/// Rounds after which a drafter is judged, those included in which it was left out because it did not pay.
const TRIAL: u64 = 200;
/// Share of such rounds from which on a drafter does not pay.
const MOSTLY_LEFT_OUT: f64 = 0.9;

/// News of one of a client's requests: its number among them, and an update, or why there will be none.
pub(super) type News = (usize, Result<Update, String>);

/// What the routes tell the engine.
#[derive(Debug)]
pub(super) enum Command {
    /// A request to run.
    Submit(Box<Job>),
    /// Nobody waits for this request any more.
    Cancel(u64),
}

/// A request and who waits for it.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) request: Request,
    /// Its number among the client's requests.
    pub(super) index: usize,
    pub(super) news: Sender<News>,
    /// Its place in the server.
    pub(super) place: Place,
}

/// What engine and routes both see.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) metrics: Metrics,
    /// Requests in work or waiting.
    held: AtomicUsize,
    /// Most of them.
    most: usize,
    stopping: AtomicBool,
}

impl Shared {
    /// For at most `most` requests at a time.
    pub(super) fn new(most: usize) -> Self {
        let (held, stopping) = (AtomicUsize::new(0), AtomicBool::new(false));
        Self { metrics: Metrics::default(), held, most, stopping }
    }

    /// Places for several requests, or the number held if there are not so many.
    pub(super) fn places(self: &Arc<Self>, count: usize) -> Result<Vec<Place>, usize> {
        let taken = self.held.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |held| {
            (held + count <= self.most).then_some(held + count)
        });
        taken.map(|_| (0..count).map(|_| Place(self.clone())).collect())
    }

    /// Requests in work or waiting.
    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }

    /// Most requests in work or waiting.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Whether the server takes no more requests.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }
}

/// A place of a request in the server, given back when dropped.
#[derive(Debug)]
pub(super) struct Place(Arc<Shared>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Requests of one client; dropped, it cancels those that are not finished.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) ids: Vec<u64>,
    pub(super) commands: mpsc::Sender<Command>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        for &id in &self.ids {
            // Without an engine there is nothing to cancel.
            let _ = self.commands.send(Command::Cancel(id));
        }
    }
}

/// Somebody who waits for a request.
struct Listener {
    index: usize,
    news: Sender<News>,
    begun: Instant,
    first: Option<Duration>,
    _place: Place,
}

/// The loop's state.
pub(super) struct EngineLoop<'e, 'm> {
    engine: &'e mut Engine<'m>,
    listeners: HashMap<u64, Listener>,
    shared: Arc<Shared>,
    /// Whether there is a drafter to be judged.
    has_drafter: bool,
    /// What the drafter had brought when it was judged last.
    judged: DraftTotals,
    /// Requests in which the drafter had failed when it was looked at last.
    drafter_faults: usize,
}

impl<'e, 'm> EngineLoop<'e, 'm> {
    pub(super) fn new(engine: &'e mut Engine<'m>, shared: Arc<Shared>, has_drafter: bool) -> Self {
        let (listeners, judged) = (HashMap::new(), DraftTotals::default());
        Self { engine, listeners, shared, has_drafter, judged, drafter_faults: 0 }
    }

    /// Serves until the interrupt; then requests in work have `drain` to finish.
    pub(super) fn run(&mut self, commands: &Receiver<Command>, drain: Duration, ctx: Context<'_>) {
        let mut deadline: Option<Instant> = None;
        loop {
            if deadline.is_none() && ctx.interrupt.is_set() {
                self.shared.stop();
                deadline = Some(Instant::now() + drain);
                if self.shared.held() > 0 {
                    ctx.note(format!("stopping: {} requests are being finished", self.shared.held()));
                }
            }
            let is_open = self.take(commands);
            if self.engine.is_idle() {
                self.shared.metrics.idle();
                // A request that has a place but has not come yet is waited for.
                if !is_open || deadline.is_some_and(|deadline| self.shared.held() == 0 || Instant::now() > deadline) {
                    return;
                }
                continue;
            }
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                self.end_all("the server is stopping", Outcome::Aborted);
                return;
            }
            self.step(ctx);
        }
    }

    /// Takes in what the routes have sent, waiting a little where there is nothing else to do.
    fn take(&mut self, commands: &Receiver<Command>) -> bool {
        if self.engine.is_idle() {
            match commands.recv_timeout(PATIENCE) {
                Ok(command) => self.handle(command),
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        loop {
            match commands.try_recv() {
                Ok(command) => self.handle(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Cancel(id) => self.cancel(id),
            Command::Submit(job) => {
                let Job { request, index, news, place } = *job;
                let (id, prompt_tokens) = (request.id, request.prompt.len());
                match self.engine.submit(request) {
                    Ok(()) => {
                        self.shared.metrics.admitted(prompt_tokens);
                        let listener = Listener { index, news, begun: Instant::now(), first: None, _place: place };
                        self.listeners.insert(id, listener);
                    }
                    // There is room for it: the channel is new.
                    Err(error) => drop(news.try_send((index, Err(error.to_string())))),
                }
            }
        }
    }

    fn cancel(&mut self, id: u64) {
        if let Some(listener) = self.listeners.remove(&id) {
            self.engine.cancel(id);
            self.shared.metrics.left(Outcome::Aborted, listener.begun.elapsed(), listener.first, 0);
        }
    }

    fn step(&mut self, ctx: Context<'_>) {
        let (begun, rows_before, rounds_before) = (Instant::now(), self.engine.rows(), self.engine.round_times().steps);
        let updates = match self.engine.step() {
            Ok(updates) => updates,
            Err(error) => {
                ctx.warn(format!("a step failed, and with it {} requests: {error}", self.listeners.len()));
                self.end_all(&error.to_string(), Outcome::Failed);
                return;
            }
        };
        let tokens = updates.iter().map(|update| update.tokens.len()).sum();
        let running = self.engine.active() + updates.iter().filter(|update| update.finished.is_some()).count();
        let step = Step {
            duration: begun.elapsed(),
            tokens,
            running,
            waiting: self.engine.waiting(),
            plain_s: self.engine.step_costs().map(|costs| costs.seconds(running.max(1))),
            times: self.engine.times(),
            reads_prompt: self.engine.round_times().steps == rounds_before,
        };
        self.shared.metrics.step(step, (self.engine.rows() - rows_before) as usize);
        for update in updates {
            self.deliver(update, ctx);
        }
        self.report_drafter_faults(ctx);
        self.judge_drafter(ctx);
    }

    fn deliver(&mut self, update: Update, ctx: Context<'_>) {
        if let Some(round) = &update.round {
            self.shared.metrics.round(round);
        }
        if let Some(error) = &update.failed {
            self.fail(update.id, error, ctx);
            return;
        }
        let (id, is_finished) = (update.id, update.finished.is_some());
        let Some(listener) = self.listeners.get_mut(&id) else { return };
        if listener.first.is_none() {
            let after = listener.begun.elapsed();
            listener.first = Some(after);
            self.shared.metrics.first_token(after);
        }
        if let Some(done) = &update.finished {
            let (whole, first, tokens) = (listener.begun.elapsed(), listener.first, done.output.len());
            self.shared.metrics.left(Outcome::Finished(done.reason), whole, first, tokens);
            let line = format!(
                "request {id}: {} prompt tokens, {tokens} new ones in {:.2} s ({}), tau {:.2}",
                done.request.prompt.len(),
                whole.as_secs_f64(),
                done.reason.name(),
                done.stats().tau
            );
            ctx.reporter.event(Event::Line(&line));
        }
        // The channel has room for every token; it fails when the client has left.
        let is_heard = listener.news.try_send((listener.index, Ok(update))).is_ok();
        if is_finished {
            self.listeners.remove(&id);
        } else if !is_heard {
            self.cancel(id);
        }
    }

    /// Ends every request without an answer.
    fn end_all(&mut self, reason: &str, outcome: Outcome) {
        for (id, listener) in std::mem::take(&mut self.listeners) {
            self.engine.cancel(id);
            self.shared.metrics.left(outcome, listener.begun.elapsed(), listener.first, 0);
            let _ = listener.news.try_send((listener.index, Err(reason.to_owned())));
        }
    }

    /// Ends one request that the engine could not go on with.
    fn fail(&mut self, id: u64, error: &Error, ctx: Context<'_>) {
        ctx.warn(format!("request {id} failed: {error}"));
        if let Some(listener) = self.listeners.remove(&id) {
            self.shared.metrics.left(Outcome::Failed, listener.begun.elapsed(), listener.first, 0);
            // Where the client has left there is nobody to tell.
            let _ = listener.news.try_send((listener.index, Err(error.to_string())));
        }
    }

    /// Says what went wrong with the drafter: the answers stay right without it, so nothing else would tell.
    fn report_drafter_faults(&mut self, ctx: Context<'_>) {
        let Some(faults) = self.engine.drafter_faults().filter(|faults| faults.requests > self.drafter_faults) else {
            return;
        };
        self.drafter_faults = faults.requests;
        ctx.warn(faults.message());
        self.shared.metrics.drafter_failed(faults);
    }

    /// Judges every [`TRIAL`] rounds whether the drafter is of use, and says so when it is not: output stays right without it,
    /// so nothing else would tell.
    fn judge_drafter(&mut self, ctx: Context<'_>) {
        let totals = self.shared.metrics.draft_totals();
        let trial = totals.since(self.judged);
        if !self.has_drafter || trial.considered() < TRIAL {
            return;
        }
        self.judged = totals;
        let left_out = trial.left_out as f64 / trial.considered() as f64;
        let tau = trial.tokens as f64 / trial.drafted.max(1) as f64;
        let is_useless = tau < IDLE_TAU;
        let is_idle = is_useless || left_out > MOSTLY_LEFT_OUT;
        if self.shared.metrics.set_drafter_idle(is_idle) || !is_idle {
            return;
        }
        let tried = format!("{tau:.3} tokens per round in the {} rounds that asked it", trial.drafted);
        ctx.warn(if is_useless {
            format!(
                "the drafter is of no use here: {tried}; check that it was trained for this target, and its block layout"
            )
        } else {
            format!(
                "the drafter does not pay here: it was left out of {:.0} % of the last {} rounds ({tried})",
                100.0 * left_out,
                trial.considered()
            )
        });
    }
}
