//! Samples of the target cache as tokens and loss mask, from the target's own answers or from those in the data.
//!
//! A sample longer than `prepare.max_length` is cut at that length, with no end token after the cut; one of which no
//! supervised token would be left is refused. Answers that were generated always fit, see [`regenerate`](super::regenerate).

use deepspec_datasets::conversation::{Conversation, Message, Repair, Role};
use deepspec_datasets::renderer::{Limits, Rendered};

use super::answers::{Answer, Finish};
use super::regenerate::Prompt;
use super::rejects::Refusal;
use super::{Settings, mask_token_in_data};
use deepspec_engine::progress::Context;

/// One sample, ready for the target.
#[derive(Debug)]
pub(super) struct Sample {
    /// The row's own id, or its key where it has none.
    pub(super) source_id: String,
    pub(super) domain: String,
    pub(super) ids: Vec<u32>,
    pub(super) loss_mask: Vec<u8>,
    /// Whether its last answer is not whole.
    pub(super) is_cut: bool,
    /// Answers that should be supervised and can't be.
    pub(super) unsupervised_answers: usize,
}

impl Sample {
    /// A prompt with the target's answers. The answers before the last one are part of its prompt.
    pub(super) fn from_answer(prompt: &Prompt, answer: &Answer, settings: &Settings<'_>) -> Result<Self, Refusal> {
        let Some((last, before)) = answer.turns.split_last() else {
            let hint = "look at the answer in `answers.jsonl`";
            return Err(Refusal::left_out(answer.end.kind(), "the target gave no answer that can be used", hint));
        };
        let mut messages = Vec::new();
        let mut start = 0;
        for (turn, &end) in prompt.answers.iter().take(answer.turns.len()).enumerate() {
            messages.extend_from_slice(&prompt.conversation.messages[start..end]);
            messages.extend(before.get(turn).map(|answer| Message::new(Role::Assistant, answer.text.clone())));
            start = end;
        }
        let finished = last.finish_reason == Finish::Stop;
        let tools = prompt.conversation.tools.as_ref();
        let loss_on = settings.recipe.data.loss_on.into();
        let rendered = settings.renderer.render_sample(&messages, tools, &last.ids, finished, loss_on)?;
        Self::new(&prompt.conversation, rendered, !finished, settings)
    }

    /// A row with its own answers.
    pub(super) fn from_row(
        conversation: Conversation,
        settings: &Settings<'_>,
        ctx: Context<'_>,
    ) -> Result<(Self, Vec<Repair>), Refusal> {
        let selected = conversation.answered()?;
        let loss_on = settings.recipe.data.loss_on.into();
        let limits = Limits { tokens: settings.recipe.prepare.max_length, is_stopped: &|| ctx.interrupt.is_set() };
        let tools = conversation.tools.as_ref();
        let rendered = settings.renderer.render_conversation_within(&selected.messages, tools, loss_on, limits)?;
        Ok((Self::new(&conversation, rendered, false, settings)?, selected.repairs))
    }

    fn new(
        conversation: &Conversation,
        rendered: Rendered,
        is_cut: bool,
        settings: &Settings<'_>,
    ) -> Result<Self, Refusal> {
        let Rendered { mut ids, mut loss_mask, unsupervised, .. } = rendered;
        let mask_token_id = settings.recipe.draft.mask_token_id;
        if let Some(at) = ids.iter().position(|id| *id == mask_token_id) {
            return Err(Refusal::Fatal(mask_token_in_data(mask_token_id, conversation.line, at).into()));
        }
        let (tokens, most) = (ids.len(), settings.recipe.prepare.max_length);
        ids.truncate(most);
        loss_mask.truncate(most);
        if !loss_mask.contains(&1) {
            let reason = format!("the answer starts after the {most} tokens of `prepare.max_length`");
            let hint = "raise `prepare.max_length`, or leave such rows out";
            return Err(Refusal::left_out("answer cut away", reason, hint));
        }
        let Conversation { id, key, domain, .. } = conversation;
        Ok(Self {
            source_id: if id.is_empty() { key.clone() } else { id.clone() },
            domain: domain.clone().unwrap_or_default(),
            ids,
            loss_mask,
            is_cut: is_cut || tokens > most,
            unsupervised_answers: unsupervised.len(),
        })
    }

    /// Tokens whose loss mask is 1.
    pub(super) fn supervised_tokens(&self) -> u64 {
        self.loss_mask.iter().map(|&mask| u64::from(mask)).sum()
    }
}
