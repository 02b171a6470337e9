//! Conversation to token ids and loss mask: the one renderer for regeneration, the target cache, evaluation and serving,
//! so that the tokens before the first supervised one are those that serving sends to the model.
//!
//! Content is data. The text of a control token inside a message never becomes that token: before rendering, each such
//! text is broken by a *sentinel*, a noncharacter that the conversation does not hold; the rendered text is split at the
//! control tokens that the template wrote, and the sentinels are taken out of the pieces between, which are encoded with
//! control tokens off. A template that itself looks for control text in the content renders the broken text otherwise than
//! the plain one; the two are compared, and such a conversation is refused.
//!
//! The loss mask comes from renderings of the first messages: the text of an answer lies between the rendering of all messages
//! before it, generation prompt included, and the rendering up to and with it. The whole is rendered once; beginnings are rendered
//! only for the answers that start before the [`Limits`], so that a conversation far longer than those costs no more than its text.
//! What the generation prompt gives, such as an empty
//! think block, is thus never supervised, while the token that ends the turn is. Text that follows that token is not.

mod prefixes;
mod sentinel;

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use serde_json::Value;

use crate::chat_template::ChatTemplate;
use crate::conversation::{Message, Role};
use crate::error::Error;
use crate::tokenizer::{Segment, Spanned, Tokenizer};
use prefixes::Prefixes;

/// Which answers of a conversation are supervised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossOn {
    /// Every answer.
    All,
    /// Only the last one.
    Last,
}

/// A conversation as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    /// Token ids.
    pub ids: Vec<u32>,
    /// 1 for each supervised token, else 0; as long as `ids`.
    pub loss_mask: Vec<u8>,
    /// The supervised answers, in order.
    pub spans: Vec<AnswerSpan>,
    /// Answers that were to be supervised and could not be, since the template prints them otherwise in history than
    /// after its generation prompt; indices of messages.
    pub unsupervised: Vec<usize>,
}

/// Tokens of one supervised answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerSpan {
    /// Index of the message.
    pub message: usize,
    /// Indices of tokens, end-of-turn token included.
    pub tokens: Range<usize>,
}

/// Renders conversations for one target.
#[derive(Clone, Debug)]
pub struct Renderer {
    template: Arc<ChatTemplate>,
    tokenizer: Tokenizer,
    stop_ids: Vec<u32>,
    end_of_turn: u32,
    enable_thinking: Option<bool>,
}

/// Bounds on the work for one conversation.
#[derive(Clone, Copy)]
pub struct Limits<'a> {
    /// Tokens that are wanted: of a longer conversation only the beginning is encoded, at least one token more than this, and answers
    /// that start after it are left out.
    pub tokens: usize,
    /// Asked now and then whether to give up.
    pub is_stopped: &'a dyn Fn() -> bool,
}

impl Limits<'static> {
    /// No bounds.
    pub const NONE: Self = Self { tokens: usize::MAX, is_stopped: &|| false };
}

/// A rendered text without sentinels, split at the control tokens of the template.
struct Text {
    plain: String,
    segments: Vec<Segment>,
}

/// A serving prompt that is not encoded yet.
pub struct PromptText<'r> {
    renderer: &'r Renderer,
    text: Text,
}

impl PromptText<'_> {
    /// Tokens that it has at the least; see [`Tokenizer::fewest_tokens`].
    pub fn fewest_tokens(&self) -> usize {
        let pieces = self.text.segments.iter();
        let tokens = |piece: &Segment| {
            let plain = || self.renderer.tokenizer.fewest_tokens(&self.text.plain[piece.range.clone()]);
            if piece.special.is_some() { 1 } else { plain() }
        };
        pieces.map(tokens).sum()
    }

    /// Its tokens.
    ///
    /// # Errors
    /// Those of the tokenizer.
    pub fn encode(&self) -> Result<Vec<u32>, Error> {
        let tokens = self.renderer.encode(&self.text, &[], Limits::NONE)?;
        Ok(tokens.into_iter().map(|(id, _)| id).collect())
    }
}

/// Bytes of one answer in a rendered text.
struct AnswerText {
    message: usize,
    bytes: Range<usize>,
}

impl Renderer {
    /// Joins a template and a tokenizer. `stop_ids` are the ids that end generation; the control token with which the
    /// template ends an answer is added to them. Thinking is off; see [`Renderer::with_thinking`].
    ///
    /// # Errors
    /// [`Error::NoEndOfTurn`] if neither the stop ids nor the template give a token that ends a turn,
    /// [`Error::ContextDependentTokenizer`] for a tokenizer whose pieces can't be encoded apart, or the template's error
    /// on a conversation of two turns.
    pub fn new(template: ChatTemplate, tokenizer: Tokenizer, stop_ids: &[u32]) -> Result<Self, Error> {
        check_pieces(&tokenizer)?;
        let mut stop_ids = stop_ids.to_vec();
        let mut renderer = Renderer {
            template: Arc::new(template),
            tokenizer,
            stop_ids: Vec::new(),
            end_of_turn: 0,
            enable_thinking: Some(false),
        };
        const ANSWER: &str = "deepspec";
        let probe = [Message::new(Role::User, "a"), Message::new(Role::Assistant, ANSWER)];
        let text = renderer.text(&probe, None, false)?;
        let after = text.plain.rfind(ANSWER).ok_or(Error::AnswerNotFound)? + ANSWER.len();
        let ends = text.segments.iter().find(|segment| segment.range.start >= after && segment.special.is_some());
        let end_of_turn = ends.and_then(|segment| segment.special).or(stop_ids.first().copied());
        renderer.end_of_turn = end_of_turn.ok_or(Error::NoEndOfTurn)?;
        if !stop_ids.contains(&renderer.end_of_turn) {
            stop_ids.push(renderer.end_of_turn);
        }
        renderer.stop_ids = stop_ids;
        Ok(renderer)
    }

    /// Sets what templates read as `enable_thinking`; `None` leaves it undefined.
    #[must_use]
    pub fn with_thinking(mut self, enable_thinking: Option<bool>) -> Self {
        self.enable_thinking = enable_thinking;
        self
    }

    /// The ids that end generation.
    pub fn stop_ids(&self) -> &[u32] {
        &self.stop_ids
    }

    /// The token with which the template ends an answer.
    pub fn end_of_turn(&self) -> u32 {
        self.end_of_turn
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// The serving prompt: all messages, then the generation prompt.
    ///
    /// # Errors
    /// Those of the template and the tokenizer.
    pub fn render_prompt(&self, messages: &[Message], tools: Option<&Value>) -> Result<Vec<u32>, Error> {
        self.prompt_text(messages, tools)?.encode()
    }

    /// The text of the serving prompt, for callers who want to know how long it is before they have it encoded.
    ///
    /// # Errors
    /// Those of the template.
    pub fn prompt_text(&self, messages: &[Message], tools: Option<&Value>) -> Result<PromptText<'_>, Error> {
        Ok(PromptText { renderer: self, text: self.text(messages, tools, true)? })
    }

    /// A conversation that ends with an answer, as tokens with a loss mask. The ids before the first supervised token
    /// are those of [`Renderer::render_prompt`] for the messages before that answer: tokens are broken where a
    /// supervised answer starts, as they are in serving.
    ///
    /// An answer that the template prints otherwise in history than after its generation prompt can't be supervised and
    /// is listed in [`Rendered::unsupervised`]. If that is so for the last answer, the serving prompt, the answer's text
    /// and the end-of-turn token are put together.
    ///
    /// # Errors
    /// [`Error::WrongLastTurn`], [`Error::NothingSupervised`], and those of the template and the tokenizer.
    pub fn render_conversation(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        loss_on: LossOn,
    ) -> Result<Rendered, Error> {
        self.render_conversation_within(messages, tools, loss_on, Limits::NONE)
    }

    /// As [`Renderer::render_conversation`], for a caller that cuts it at [`Limits::tokens`]. Up to there, tokens and mask are the
    /// same; where more was left out than is kept, nothing may be supervised.
    ///
    /// # Errors
    /// As [`Renderer::render_conversation`], and [`Error::Stopped`] when [`Limits::is_stopped`] says so.
    pub fn render_conversation_within(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        loss_on: LossOn,
        limits: Limits<'_>,
    ) -> Result<Rendered, Error> {
        let last = last_turn(messages, &[Role::Assistant])?;
        let full = self.text(messages, tools, false)?;
        let prefixes = Prefixes::new(&self.template, messages, tools, self.enable_thinking);
        let Some(before) = prefixes.text(last, true).ok().filter(|before| full.plain.starts_with(before)) else {
            return self.render_last_alone(messages, tools, loss_on);
        };
        let (mut answers, unsupervised) = match loss_on {
            LossOn::All => self.answers_in(&full, &prefixes, last, limits)?,
            LossOn::Last => (Vec::new(), Vec::new()),
        };
        let bytes = self.until_stop(&full, before.len()..full.plain.len());
        answers.push(AnswerText { message: last, bytes });
        let cuts: Vec<usize> = answers.iter().map(|answer| answer.bytes.start).collect();
        let tokens = self.encode(&full, &cuts, limits)?;
        let is_cut = tokens.len() > limits.tokens;
        let rendered = mask(tokens, &answers, unsupervised);
        if rendered.spans.is_empty() && !is_cut { Err(Error::NothingSupervised) } else { Ok(rendered) }
    }

    /// A conversation that asks for an answer, and the answer that was generated for it: the serving prompt's ids,
    /// then the answer's own ids, supervised. If the answer is `finished`, its last id is the stop token, supervised
    /// too; if it was cut short, the end-of-turn token is added and not supervised. With [`LossOn::All`], earlier
    /// answers are supervised as far as whole tokens of the prompt lie in them.
    ///
    /// # Errors
    /// [`Error::WrongLastTurn`], [`Error::NothingSupervised`] for an empty answer, and those of template and tokenizer.
    pub fn render_sample(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        answer_ids: &[u32],
        finished: bool,
        loss_on: LossOn,
    ) -> Result<Rendered, Error> {
        last_turn(messages, &[Role::User, Role::System])?;
        if answer_ids.is_empty() {
            return Err(Error::NothingSupervised);
        }
        let prompt = self.text(messages, tools, true)?;
        let (answers, unsupervised) = match loss_on {
            LossOn::All => {
                let prefixes = Prefixes::new(&self.template, messages, tools, self.enable_thinking);
                self.answers_in(&prompt, &prefixes, messages.len(), Limits::NONE)?
            }
            LossOn::Last => (Vec::new(), Vec::new()),
        };
        let tokens = self.encode(&prompt, &[], Limits::NONE)?;
        let mut rendered = mask(tokens, &answers, unsupervised);
        let start = rendered.ids.len();
        rendered.ids.extend_from_slice(answer_ids);
        rendered.loss_mask.resize(rendered.ids.len(), 1);
        rendered.spans.push(AnswerSpan { message: messages.len(), tokens: start..rendered.ids.len() });
        if !finished {
            rendered.ids.push(self.end_of_turn);
            rendered.loss_mask.push(0);
        }
        Ok(rendered)
    }

    /// The last answer right after its serving prompt, for templates that print it in another way.
    fn render_last_alone(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        loss_on: LossOn,
    ) -> Result<Rendered, Error> {
        let (last, before) = messages.split_last().ok_or(Error::NothingSupervised)?;
        if last.content.trim().is_empty() || last.tool_calls.is_some() {
            return Err(Error::AnswerNotFound);
        }
        let mut ids = self.render_prompt(before, tools)?;
        let start = ids.len();
        ids.extend(self.tokenizer.encode_text(last.content.trim())?);
        ids.push(self.end_of_turn);
        let mut loss_mask = vec![0; start];
        loss_mask.resize(ids.len(), 1);
        let earlier = before.iter().enumerate().filter(|(_, message)| message.role == Role::Assistant);
        Ok(Rendered {
            spans: vec![AnswerSpan { message: before.len(), tokens: start..ids.len() }],
            ids,
            loss_mask,
            unsupervised: match loss_on {
                LossOn::All => earlier.map(|(index, _)| index).collect(),
                LossOn::Last => Vec::new(),
            },
        })
    }

    /// Finds the answers before message `end` in a text, and the indices of those that can't be found, as far as the limits reach.
    fn answers_in(
        &self,
        text: &Text,
        prefixes: &Prefixes<'_>,
        end: usize,
        limits: Limits<'_>,
    ) -> Result<(Vec<AnswerText>, Vec<usize>), Error> {
        let indices: Vec<usize> = prefixes.answers_before(end).collect();
        let reach = if indices.len() < FEW_ANSWERS { text.plain.len() } else { self.reach(text, limits.tokens)? };
        let mut found = Vec::new();
        let mut missing = Vec::new();
        for index in indices {
            if (limits.is_stopped)() {
                return Err(Error::Stopped);
            }
            let before = prefixes.text(index, true);
            if before.as_ref().is_ok_and(|before| before.len() > reach) {
                break;
            }
            match before.ok().and_then(|before| self.answer_after(text, prefixes, index, &before)) {
                Some(bytes) => found.push(AnswerText { message: index, bytes }),
                None => missing.push(index),
            }
        }
        Ok((found, missing))
    }

    /// The bytes of an answer in a text, given the answer's own prompt. `None` if the text does not continue that prompt.
    fn answer_after(&self, text: &Text, prefixes: &Prefixes<'_>, index: usize, before: &str) -> Option<Range<usize>> {
        if !text.plain.starts_with(before) {
            return None;
        }
        let with = prefixes.text(index + 1, false).ok()?;
        let continues = text.plain.starts_with(&with) && with.starts_with(before);
        continues.then(|| self.until_stop(text, before.len()..with.len()))
    }

    /// An answer's bytes up to and with the token that ends its turn.
    fn until_stop(&self, text: &Text, bytes: Range<usize>) -> Range<usize> {
        let first = text.segments.partition_point(|segment| segment.range.start < bytes.start);
        let mut inside = text.segments[first..].iter().take_while(|segment| segment.range.end <= bytes.end);
        let is_stop = |segment: &&Segment| segment.special.is_some_and(|id| self.stop_ids.contains(&id));
        bytes.start..inside.find(is_stop).map_or(bytes.end, |segment| segment.range.end)
    }

    /// Bytes of a text that hold its first `tokens` tokens and a little more.
    fn reach(&self, text: &Text, tokens: usize) -> Result<usize, Error> {
        // No token is shorter than a byte.
        if text.plain.len() <= tokens {
            return Ok(text.plain.len());
        }
        let mut count = 0;
        for segment in &text.segments {
            count += match segment.special {
                Some(_) => 1,
                None => self.tokenizer.encode_text(&text.plain[segment.range.clone()])?.len(),
            };
            if count > tokens {
                return Ok(segment.range.end + REACH_MARGIN);
            }
        }
        Ok(text.plain.len())
    }

    /// Renders messages with their control text broken, and takes the text apart.
    fn text(&self, messages: &[Message], tools: Option<&Value>, prompt: bool) -> Result<Text, Error> {
        let render = |messages: &[Message], tools: Option<&Value>| {
            self.template.render(messages, tools, prompt, self.enable_thinking)
        };
        let Some(marked) = sentinel::mark(&self.tokenizer, self.template.source(), messages, tools)? else {
            let plain = render(messages, tools)?;
            return Ok(Text { segments: self.tokenizer.segments(&plain), plain });
        };
        let text = render(&marked.messages, marked.tools.as_ref())?;
        let (plain, data) = marked.remove(&text);
        if plain != render(messages, tools)? {
            return Err(Error::ControlTextInContent);
        }
        let is_data = |range: &Range<usize>| sentinel::is_broken(&data, range);
        Ok(Text { segments: self.tokenizer.segments_unless(&plain, is_data), plain })
    }

    /// Encodes a text piece by piece, cutting pieces at the given bytes, which rise, and ends after the wanted tokens.
    fn encode(&self, text: &Text, cuts: &[usize], limits: Limits<'_>) -> Result<Vec<Spanned>, Error> {
        let mut tokens = Vec::new();
        for segment in &text.segments {
            if tokens.len() > limits.tokens {
                break;
            }
            if let Some(id) = segment.special {
                tokens.push((id, segment.range.clone()));
                continue;
            }
            let Range { mut start, end } = segment.range;
            let first = cuts.partition_point(|cut| *cut <= start);
            let inner = cuts[first..].iter().copied().take_while(|cut| *cut < end);
            for stop in inner.chain([end]) {
                for (id, range) in self.tokenizer.encode_spanned(&text.plain[start..stop])? {
                    tokens.push((id, start + range.start..start + range.end));
                }
                start = stop;
            }
        }
        Ok(tokens)
    }
}

/// Answers that are looked for in all of a text, without a count of its tokens first.
const FEW_ANSWERS: usize = 8;

/// Bytes by which an answer's own prompt may be longer than the text before it: that of an empty think block, for example.
const REACH_MARGIN: usize = 1024;

/// The index of the last message, if its role is right.
fn last_turn(messages: &[Message], expected: &[Role]) -> Result<usize, Error> {
    match messages.last() {
        Some(last) if expected.contains(&last.role) => Ok(messages.len() - 1),
        other => Err(Error::WrongLastTurn {
            expected: expected.first().map_or("", |role| role.as_str()),
            found: other.map_or("nothing", |message| message.role.as_str()),
        }),
    }
}

/// Marks the tokens that lie wholly in an answer.
fn mask(tokens: Vec<Spanned>, answers: &[AnswerText], unsupervised: Vec<usize>) -> Rendered {
    let mut loss_mask = vec![0; tokens.len()];
    let mut spans = Vec::new();
    for answer in answers {
        let first = tokens.partition_point(|(_, bytes)| bytes.start < answer.bytes.start);
        let end = tokens.partition_point(|(_, bytes)| bytes.end <= answer.bytes.end);
        if first < end {
            loss_mask[first..end].fill(1);
            spans.push(AnswerSpan { message: answer.message, tokens: first..end });
        }
    }
    Rendered { ids: tokens.into_iter().map(|(id, _)| id).collect(), loss_mask, spans, unsupervised }
}

/// Text after a control token must encode as it does alone; tokenizers that put a space before the first word do not.
fn check_pieces(tokenizer: &Tokenizer) -> Result<(), Error> {
    const PROBE: &str = "user one two";
    let Some(special) = tokenizer.special_tokens().first() else { return Ok(()) };
    let decoded = tokenizer.decode(&tokenizer.encode_text(PROBE)?, false);
    let whole = tokenizer.encode_whole(&format!("{}{PROBE}", special.text))?;
    let apart: Vec<u32> = [special.id].into_iter().chain(tokenizer.encode_text(PROBE)?).collect();
    if decoded != PROBE || whole != apart { Err(Error::ContextDependentTokenizer) } else { Ok(()) }
}
