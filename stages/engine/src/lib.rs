//! The decoding engine: used by regenerate, eval, generate and serve alike.
//!
//! Requests become sequences with a slot of the target's cache each. Every step runs one ragged target forward over all of
//! them: chunks of prompts still to be read, and for the others the anchor with the proposed tokens after it. Accepted
//! tokens are committed one by one through the `commit` function; the rest is rolled back by moving a length.
//!
//! What a sequence emits depends on its own request alone: kernels compute each row in one order of operations whatever
//! the batch, and random numbers are keyed by (seed, purpose, position). With [`Engine::adapt`] that still holds for greedy
//! decoding; a sampled text then also depends on the clock, its distribution does not (see [`adaptive`]).

pub mod adaptive;
pub mod commit;
mod draft;
mod drafter_faults;
pub mod error;
mod estimates;
mod length;
pub mod prefix_scheduler;
pub mod progress;
pub mod round;
pub mod schedule;
pub mod sequence;
mod share;
pub mod step_costs;
pub mod text;
pub mod text_side;

use std::collections::VecDeque;
use std::time::Instant;

use deepspec_models::kv_cache::KvCache;
use deepspec_models::speculate::{Proposer, TokenLogprobs};
use deepspec_models::target::Target;

pub use adaptive::Adaptive;
pub use drafter_faults::DrafterFaults;
pub use error::{Error, Result};
pub use schedule::{Schedule, Sources};
pub use sequence::{FinishReason, Finished, Request, RequestOptions, RequestStats, RoundRecord};
pub use share::Allocation;
pub use step_costs::{StepCost, StepCosts};
pub use text::{Piece, Reasoning, ReasoningMarks, TextOptions};
pub use text_side::TextSide;

use sequence::Sequence;

/// Tokens per round below which speculation is of no use: next to nothing is accepted.
pub const IDLE_TAU: f64 = 1.05;
/// Prompt tokens of one sequence that a step reads at most.
pub const PREFILL_CHUNK: usize = 256;
/// Prompt tokens that a step reads at most, of all sequences together: the others wait for it.
const PREFILL_STEP: usize = 512;
/// Positions of one sequence whose features may wait before a drafter that is not asked is given them all the same.
pub const MOST_UNSEEN: usize = 256;

/// Wall-clock time of a number of steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PhaseTimes {
    /// Steps.
    pub steps: u64,
    /// Drafting, in seconds; what the drafter has to be told of the committed tokens first is part of it.
    pub draft_s: f64,
    /// Target forward passes, in seconds.
    pub target_s: f64,
    /// Everything else: accepting, committing, bookkeeping.
    pub other_s: f64,
}

impl PhaseTimes {
    /// All phases together, in seconds.
    pub fn total_s(&self) -> f64 {
        self.draft_s + self.target_s + self.other_s
    }

    fn add(&mut self, step: Self) {
        self.steps += step.steps;
        self.draft_s += step.draft_s;
        self.target_s += step.target_s;
        self.other_s += step.other_s;
    }
}

/// News of one sequence from one step.
#[derive(Debug)]
pub struct Update {
    /// The request's id.
    pub id: u64,
    /// Tokens committed in this step, in order.
    pub tokens: Vec<u32>,
    /// Text that has become certain, for requests that want text.
    pub text: String,
    /// The same of the reasoning, for requests that want it apart.
    pub reasoning: String,
    /// One entry per token, for requests that want log probabilities.
    pub logprobs: Vec<TokenLogprobs>,
    /// The round that gave the tokens; `None` for the first token, which the prompt gives.
    pub round: Option<RoundRecord>,
    /// Set when the sequence has ended.
    pub finished: Option<Finished>,
    /// Set when it could not go on and was dropped; nothing more comes of it then.
    pub failed: Option<Error>,
}

impl Update {
    /// News of request `id` with nothing in them yet.
    fn of(id: u64) -> Self {
        Self {
            id,
            tokens: Vec::new(),
            text: String::new(),
            reasoning: String::new(),
            logprobs: Vec::new(),
            round: None,
            finished: None,
            failed: None,
        }
    }
}

/// The engine over one target and its proposers.
pub struct Engine<'a> {
    target: &'a Target,
    /// In the order in which they are asked.
    sources: Vec<Box<dyn Proposer + 'a>>,
    adaptive: Option<Adaptive>,
    /// Most tokens drafted in a round.
    longest_draft: usize,
    cache: KvCache,
    free: Vec<usize>,
    active: Vec<Sequence>,
    waiting: VecDeque<Request>,
    times: PhaseTimes,
    round_times: PhaseTimes,
    /// End of the last step, where it left something to go on with.
    paused: Option<Instant>,
    rows: u64,
    drafter_faults: Option<DrafterFaults>,
}

impl<'a> Engine<'a> {
    /// An engine with `slots` sequences at a time, each of at most `capacity` tokens.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn new(target: &'a Target, proposer: Box<dyn Proposer + 'a>, slots: usize, capacity: usize) -> Result<Self> {
        Self::with_sources(target, vec![proposer], slots, capacity)
    }

    /// An engine in which the lookup is asked first and the drafter where it finds nothing; with [`Engine::adapt`], where
    /// the drafter promises more tokens per unit of time.
    ///
    /// # Errors
    /// When the memory cannot be had.
    pub fn hybrid(
        target: &'a Target,
        lookup: Box<dyn Proposer + 'a>,
        drafter: Box<dyn Proposer + 'a>,
        slots: usize,
        capacity: usize,
    ) -> Result<Self> {
        if !lookup.is_lookup() || drafter.is_lookup() {
            let (first, second) = (lookup.name(), drafter.name());
            return Err(Error::Invariant(format!(
                "a hybrid of `{first}` and `{second}`, not of a lookup and a drafter"
            )));
        }
        Self::with_sources(target, vec![lookup, drafter], slots, capacity)
    }

    fn with_sources(
        target: &'a Target,
        sources: Vec<Box<dyn Proposer + 'a>>,
        slots: usize,
        capacity: usize,
    ) -> Result<Self> {
        let cache = target.new_cache(slots, capacity)?;
        Ok(Self {
            target,
            sources,
            adaptive: None,
            longest_draft: usize::MAX,
            cache,
            free: (0..slots).rev().collect(),
            active: Vec::new(),
            waiting: VecDeque::new(),
            times: PhaseTimes::default(),
            round_times: PhaseTimes::default(),
            paused: None,
            rows: 0,
            drafter_faults: None,
        })
    }

    /// Lets the engine choose in each round whether to draft and how much to verify, instead of always all.
    #[must_use]
    pub fn adapt(mut self, adaptive: Adaptive) -> Self {
        self.adaptive = Some(adaptive);
        self
    }

    /// Lets proposers draft at most so many tokens in a round.
    #[must_use]
    pub fn limit_drafts(mut self, tokens: usize) -> Self {
        self.longest_draft = tokens;
        self
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`Error::Input`] when the prompt is empty or prompt and budget do not fit into a slot.
    pub fn submit(&mut self, request: Request) -> Result<()> {
        let needed = request.prompt.len() + request.max_new_tokens;
        if request.prompt.is_empty() {
            return Err(Error::Input(format!("request {} has an empty prompt", request.id)));
        }
        let vocab = self.vocab_size();
        if let Some(&token) = request.prompt.iter().find(|&&token| token as usize >= vocab) {
            return Err(deepspec_models::Error::TokenRange { token, vocab }.into());
        }
        if needed > self.cache.capacity() {
            return Err(Error::Input(format!(
                "request {}: {} prompt tokens and {} new ones exceed the context capacity of {}",
                request.id,
                request.prompt.len(),
                request.max_new_tokens,
                self.cache.capacity()
            )));
        }
        let mut held = self.waiting.iter().chain(self.active.iter().map(|sequence| &sequence.request));
        if held.any(|other| other.id == request.id) {
            return Err(Error::Input(format!("request {} is there already", request.id)));
        }
        request.sampling.validate()?;
        request.options.adjustments.validate(self.target.config().vocab_size)?;
        if let Some(text) = &request.options.text
            && text.stop.iter().any(String::is_empty)
        {
            return Err(Error::Input(format!("request {} has an empty stop text", request.id)));
        }
        self.waiting.push_back(request);
        Ok(())
    }

    /// Requests that wait for a slot.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences in work.
    pub fn active(&self) -> usize {
        self.active.len()
    }

    /// Sequences at a time.
    pub fn slots(&self) -> usize {
        self.cache.slots()
    }

    /// Slots that no sequence is in.
    pub fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// Most tokens of a sequence, prompt included.
    pub fn capacity(&self) -> usize {
        self.cache.capacity()
    }

    /// What a pass of the target costs, where the engine keeps track of it.
    pub fn step_costs(&self) -> Option<&StepCosts> {
        self.adaptive.as_ref().map(Adaptive::step_costs)
    }

    /// Whether there is nothing left to do.
    pub fn is_idle(&self) -> bool {
        self.active.is_empty() && self.waiting.is_empty()
    }

    /// Time spent per phase so far.
    pub fn times(&self) -> PhaseTimes {
        self.times
    }

    /// Time spent in steps in which no prompt was read: what rounds cost.
    pub fn round_times(&self) -> PhaseTimes {
        self.round_times
    }

    /// Tokens of the target's vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.target.config().vocab_size
    }

    /// What went wrong with the drafter, where something did.
    pub fn drafter_faults(&self) -> Option<&DrafterFaults> {
        self.drafter_faults.as_ref()
    }

    /// Rows that have gone through the target.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Name of the proposer.
    pub fn proposer_name(&self) -> &'static str {
        match &self.sources[..] {
            [only] => only.name(),
            _ => "hybrid",
        }
    }

    /// Drops a request, waiting or in work, and frees its slot; returns whether it was there.
    pub fn cancel(&mut self, id: u64) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|request| request.id != id);
        if let Some(at) = self.active.iter().position(|sequence| sequence.request.id == id) {
            let sequence = self.active.remove(at);
            self.release(sequence.slot);
            return true;
        }
        self.waiting.len() != before
    }

    /// Runs one step: admits what fits, drafts, verifies, commits. Returns news of the sequences that moved.
    ///
    /// A sequence that the target cannot go on with is dropped, with an update that says why; the others go on. So does
    /// decoding after a drafter has failed, see [`Engine::drafter_faults`].
    ///
    /// # Errors
    /// When an invariant does not hold.
    pub fn step(&mut self) -> Result<Vec<Update>> {
        let started = Instant::now();
        let mut updates = self.admit();
        if self.active.is_empty() {
            self.paused = None;
            return Ok(updates);
        }
        let is_reading = self.active.iter().any(Sequence::is_prefilling);
        let (news, mut times) = self.round()?;
        updates.extend(news);
        times.other_s = started.elapsed().as_secs_f64() - times.draft_s - times.target_s;
        self.times.add(times);
        if !is_reading {
            self.round_times.add(times);
        }
        self.paused = (!self.active.is_empty()).then(Instant::now);
        Ok(updates)
    }

    /// Says that the time since the last step went elsewhere, and is none of this engine's costs.
    pub fn forget_pause(&mut self) {
        self.paused = None;
    }

    /// Runs all requests and returns them in the order in which they finish; `progress` sees every update and may stop
    /// the run by returning an error.
    ///
    /// # Errors
    /// As [`Engine::submit`] and [`Engine::step`], and when a sequence fails.
    pub fn run(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        mut progress: impl FnMut(&Update) -> Result<()>,
    ) -> Result<Vec<Finished>> {
        for request in requests {
            self.submit(request)?;
        }
        let mut finished = Vec::new();
        while !self.is_idle() {
            for update in self.step()? {
                progress(&update)?;
                if let Some(error) = update.failed {
                    return Err(error);
                }
                finished.extend(update.finished);
            }
        }
        Ok(finished)
    }

    fn admit(&mut self) -> Vec<Update> {
        let mut updates = Vec::new();
        while let Some(request) = self.waiting.front() {
            if request.max_new_tokens == 0 {
                let Some(request) = self.waiting.pop_front() else { break };
                let sequence = Sequence::new(request, 0);
                let id = sequence.request.id;
                updates.push(Update { finished: Some(sequence.finish(FinishReason::Length)), ..Update::of(id) });
                continue;
            }
            let Some(slot) = self.free.pop() else { break };
            let Some(request) = self.waiting.pop_front() else { break };
            self.active.push(Sequence::new(request, slot));
        }
        updates
    }

    fn release(&mut self, slot: usize) {
        self.cache.truncate(slot, 0);
        for source in &mut self.sources {
            source.release(slot);
        }
        self.free.push(slot);
    }
}
