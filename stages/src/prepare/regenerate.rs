//! Answers by the target itself, turn by turn: the prompt of a turn holds the target's own answers before it.
//!
//! Room: a prompt is answered while it leaves at least [`MIN_NEW_TOKENS`] (or `prepare.max_new_tokens`, if that is less) of
//! `prepare.max_length`, and one token more for the end of an answer that is cut. A row whose first prompt does not fit is
//! refused; a later turn that does not fit ends the conversation before it, as do an empty answer, one that holds the mask
//! token, and a prompt that cannot be rendered. A cut answer is the last of its conversation, since no history of the
//! target's own goes on after it.
//!
//! Every draw is keyed by (seed, row, sample, turn) and every row of a batch is computed alone, so that neither the batch
//! size nor an interruption changes an answer.

use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::time::Instant;

use deepspec_datasets::conversation::{Conversation, Message, Prompts, RejectReason, Repair, Role};
use deepspec_models::speculate::NoProposer;
use deepspec_models::target::Target;
use sha2::{Digest, Sha256};

use super::answers::{self, Answer, AnswerTurn, End, Finish};
use super::rejects::Refusal;
use super::space::Needed;
use super::{Settings, mask_token_in_data};
use crate::error::{Error, Result};
use crate::recipe::PrepareRecipe;
use crate::run_dir::Journal;
use deepspec_engine::progress::{Context, Event};
use deepspec_engine::{Engine, Finished, Request, RequestOptions};

/// New tokens for which a prompt must leave room.
pub const MIN_NEW_TOKENS: usize = 16;

/// Answers between two flushes of the journal to the disk.
const SYNC_EVERY: u64 = 32;

/// Answers between two looks at the free space.
const CHECK_SPACE_EVERY: usize = 16;

/// What an interrupted run can rely on.
const SAFE: &str = "all finished answers are saved";

/// A row to be answered.
#[derive(Debug)]
pub(super) struct Prompt {
    /// The row; its messages are the system messages and the user turns.
    pub(super) conversation: Conversation,
    /// Numbers of messages after which an answer is due, rising.
    pub(super) answers: Vec<usize>,
    /// Tokens of the prompt of the first turn.
    pub(super) first_tokens: usize,
}

impl Prompt {
    /// Takes the prompts of a row.
    pub(super) fn new(mut conversation: Conversation, settings: &Settings<'_>) -> Result<(Self, Vec<Repair>), Refusal> {
        let Prompts { messages, answers, repairs } = conversation.prompts();
        conversation.messages = messages;
        let first = *answers.first().ok_or(RejectReason::NoUserTurn)?;
        let ids = settings.renderer.render_prompt(&conversation.messages[..first], conversation.tools.as_ref())?;
        let mask_token_id = settings.recipe.draft.mask_token_id;
        if let Some(at) = ids.iter().position(|id| *id == mask_token_id) {
            return Err(Refusal::Fatal(mask_token_in_data(mask_token_id, conversation.line, at).into()));
        }
        if room(&settings.recipe.prepare, ids.len()).is_none() {
            let reason = format!(
                "the prompt has {} tokens, which leaves too few of the {} of `prepare.max_length` for an answer",
                ids.len(),
                settings.recipe.prepare.max_length
            );
            let hint = "raise `prepare.max_length`, or leave such rows out";
            return Err(Refusal::left_out("prompt too long", reason, hint));
        }
        Ok((Self { conversation, answers, first_tokens: ids.len() }, repairs))
    }

    /// Number of user turns.
    pub(super) fn turns(&self) -> usize {
        self.answers.len()
    }

    /// Most tokens that a sample made from this row can have.
    pub(super) fn tokens_at_most(&self, prepare: &PrepareRecipe) -> usize {
        match self.turns() {
            1 => self.first_tokens + room(prepare, self.first_tokens).unwrap_or(0) + 1,
            _ => prepare.max_length,
        }
    }
}

/// New tokens that a prompt leaves room for, if they are enough.
fn room(prepare: &PrepareRecipe, prompt_tokens: usize) -> Option<usize> {
    let left = prepare.max_length.checked_sub(prompt_tokens + 1)?;
    let new_tokens = left.min(prepare.max_new_tokens);
    (new_tokens >= MIN_NEW_TOKENS.min(prepare.max_new_tokens)).then_some(new_tokens)
}

/// All answers, and what making them took.
#[derive(Debug)]
pub(super) struct Regenerated {
    /// In the order of the data, samples of a row side by side.
    pub(super) answers: Vec<Answer>,
    /// Tokens generated now, not by an earlier run.
    pub(super) new_tokens: u64,
}

/// Answers every prompt that `path` does not hold answers to yet.
///
/// # Errors
/// [`Error::Interrupted`] when the user asks to stop; the file belongs to other settings or is damaged; answers and cache will not fit
/// on the disk; the target fails.
pub(super) fn regenerate(
    prompts: &[Prompt],
    settings: &Settings<'_>,
    target: &Target,
    fingerprint: &str,
    path: &Path,
    mut needed: Needed<'_>,
    ctx: Context<'_>,
) -> Result<Regenerated> {
    let hash = answers::settings_hash(settings.recipe, settings.renderer, fingerprint);
    let mut journal = Journal::open(path, SYNC_EVERY)?;
    let mut known = answers::load(path, &hash)?;
    let samples = settings.recipe.prepare.samples_per_prompt;
    let items = prompts.iter().flat_map(|prompt| (0..samples).map(move |sample| (prompt, sample)));
    let mut done: Vec<Option<Answer>> = Vec::with_capacity(prompts.len() * samples);
    let mut missing = VecDeque::new();
    for (index, (prompt, sample)) in items.enumerate() {
        done.push(known.remove(&(prompt.conversation.key.clone(), sample)));
        match &done[index] {
            Some(answer) => needed.answered(answer),
            None => missing.push_back((index, prompt, sample)),
        }
    }
    if !known.is_empty() {
        ctx.warn(format!(
            "{} answers of `{}` belong to no row of the data and are dropped",
            known.len(),
            path.display()
        ));
    }
    let total = done.len();
    let finished = total - missing.len();
    ctx.reporter.event(Event::Started {
        task: "regenerate",
        total: total as u64,
        done: finished as u64,
        unit: "answers",
    });
    let mut new_tokens = 0;
    if !missing.is_empty() {
        needed.check()?;
        let mut work = Work::new(settings, target, missing, &hash)?;
        let started = Instant::now();
        let mut finished = finished;
        let mut next_check = finished + CHECK_SPACE_EVERY;
        while work.refill()? {
            if ctx.interrupt.is_set() {
                journal.sync()?;
            }
            ctx.check_interrupt(SAFE)?;
            for (index, answer) in work.step()? {
                journal.append(&answer)?;
                needed.answered(&answer);
                done[index] = Some(answer);
                finished += 1;
            }
            if finished >= next_check {
                // Want of space is the error to report, also where it keeps the journal from the disk.
                needed.check().inspect_err(|_| _ = journal.sync())?;
                next_check = finished + CHECK_SPACE_EVERY;
            }
            let rate = work.new_tokens as f64 / started.elapsed().as_secs_f64().max(1e-9);
            ctx.reporter.event(Event::Advanced { done: finished as u64, detail: &format!("{rate:.0} tok/s") });
        }
        journal.sync()?;
        new_tokens = work.new_tokens;
    }
    drop(journal);
    ctx.reporter.event(Event::Finished);
    let answers: Vec<Answer> = done.into_iter().flatten().collect();
    if answers.len() != total {
        return Err(Error::Invariant(format!("{} answers to {total} prompts", answers.len())));
    }
    answers::store(path, &answers)?;
    Ok(Regenerated { answers, new_tokens })
}

/// Conversations in work: as many at a time as the batch has places, one turn each.
struct Work<'a> {
    settings: &'a Settings<'a>,
    hash: &'a str,
    engine: Engine<'a>,
    waiting: VecDeque<(usize, &'a Prompt, usize)>,
    talks: HashMap<u64, Talk<'a>>,
    /// Answers that ended without a step of the engine.
    ended: Vec<(usize, Answer)>,
    new_tokens: u64,
}

/// One conversation in work.
struct Talk<'a> {
    index: usize,
    prompt: &'a Prompt,
    sample: usize,
    /// History and the user turn that is to be answered next.
    messages: Vec<Message>,
    turns: Vec<AnswerTurn>,
}

impl<'a> Work<'a> {
    fn new(
        settings: &'a Settings<'a>,
        target: &'a Target,
        waiting: VecDeque<(usize, &'a Prompt, usize)>,
        hash: &'a str,
    ) -> Result<Self> {
        let prepare = &settings.recipe.prepare;
        let slots = prepare.batch_size.min(waiting.len());
        let engine = Engine::new(target, Box::new(NoProposer), slots, prepare.max_length)?;
        Ok(Self { settings, hash, engine, waiting, talks: HashMap::new(), ended: Vec::new(), new_tokens: 0 })
    }

    /// Starts conversations while there are places; returns whether there is anything left to do.
    fn refill(&mut self) -> Result<bool> {
        while self.talks.len() < self.settings.recipe.prepare.batch_size {
            let Some((index, prompt, sample)) = self.waiting.pop_front() else { break };
            self.ask(Talk { index, prompt, sample, messages: Vec::new(), turns: Vec::new() })?;
        }
        Ok(!self.talks.is_empty() || !self.ended.is_empty())
    }

    /// Runs the batch one step and returns the conversations that ended.
    fn step(&mut self) -> Result<Vec<(usize, Answer)>> {
        for update in self.engine.step()? {
            self.new_tokens += update.tokens.len() as u64;
            if let Some(error) = update.failed {
                return Err(error.into());
            }
            if let Some(finished) = update.finished {
                let talk = self.talks.remove(&update.id);
                let talk =
                    talk.ok_or_else(|| Error::Invariant(format!("an answer to unknown request {}", update.id)))?;
                self.hear(talk, finished)?;
            }
        }
        Ok(std::mem::take(&mut self.ended))
    }

    /// Puts the next user turn to the target, or ends the conversation.
    fn ask(&mut self, mut talk: Talk<'a>) -> Result<()> {
        match self.request(&mut talk) {
            Ok(request) => {
                self.talks.insert(request.id, talk);
                self.engine.submit(request)?;
            }
            Err(end) => self.end(talk, end),
        }
        Ok(())
    }

    /// The request for the next user turn, or why there is none.
    fn request(&self, talk: &mut Talk<'_>) -> Result<Request, End> {
        let Conversation { messages, tools, key, .. } = &talk.prompt.conversation;
        let asked = talk.messages.len() - talk.turns.len();
        let end = *talk.prompt.answers.get(talk.turns.len()).ok_or(End::Complete)?;
        talk.messages.extend_from_slice(&messages[asked..end]);
        let Settings { recipe, renderer, .. } = self.settings;
        let prompt = renderer.render_prompt(&talk.messages, tools.as_ref()).map_err(|_| End::NotRenderable)?;
        if prompt.contains(&recipe.draft.mask_token_id) {
            return Err(End::MaskToken);
        }
        Ok(Request {
            id: talk.index as u64,
            max_new_tokens: room(&recipe.prepare, prompt.len()).ok_or(End::TooLong)?,
            prompt,
            sampling: recipe.prepare.sampling(),
            seed: answer_seed(recipe.prepare.seed, key, talk.sample, talk.turns.len()),
            stop_ids: renderer.stop_ids().into(),
            confidence_threshold: 0.0,
            options: RequestOptions::default(),
        })
    }

    /// Takes the target's answer and goes on.
    fn hear(&mut self, mut talk: Talk<'a>, finished: Finished) -> Result<()> {
        let Settings { recipe, renderer, .. } = self.settings;
        let finish_reason = Finish::from(finished.reason);
        let ids = finished.output;
        let words = ids.len() - usize::from(finish_reason == Finish::Stop);
        let text = renderer.tokenizer().decode(&ids[..words], true);
        if text.trim().is_empty() || ids.contains(&recipe.draft.mask_token_id) {
            let end = if text.trim().is_empty() { End::Empty } else { End::MaskToken };
            self.end(talk, end);
            return Ok(());
        }
        talk.messages.push(Message::new(Role::Assistant, text.clone()));
        talk.turns.push(AnswerTurn { ids, text, finish_reason });
        match finish_reason {
            Finish::Stop => self.ask(talk),
            Finish::Length => {
                self.end(talk, End::Cut);
                Ok(())
            }
        }
    }

    fn end(&mut self, talk: Talk<'a>, end: End) {
        let Conversation { line, key, id, domain, .. } = &talk.prompt.conversation;
        let answer = Answer {
            key: key.clone(),
            sample: talk.sample,
            line: *line,
            id: id.clone(),
            domain: domain.clone(),
            settings: self.hash.to_owned(),
            end,
            turns: talk.turns,
        };
        self.ended.push((talk.index, answer));
    }
}

/// Seed of one answer: the first 8 bytes of SHA-256 over the recipe's seed, the row's key, the sample and the turn.
fn answer_seed(seed: u64, key: &str, sample: usize, turn: usize) -> u64 {
    let mut hash = Sha256::new();
    hash.update(b"answer");
    for number in [seed, sample as u64, turn as u64] {
        hash.update(number.to_le_bytes());
    }
    hash.update(key.as_bytes());
    let digest = hash.finalize();
    digest.iter().take(8).fold(0, |seed, byte| seed << 8 | u64::from(*byte))
}
