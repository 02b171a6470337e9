//! What turns conversations into a target's tokens and back, beside the target in every engine.

use deepspec_datasets::chat_template::ChatTemplate;
use deepspec_datasets::renderer::Renderer;
use deepspec_datasets::tokenizer::Tokenizer;

use crate::ReasoningMarks;

/// Texts of the tokens around a model's reasoning.
const REASONING_TEXTS: (&str, &str) = ("<think>", "</think>");

/// What turns conversations into a target's tokens and back.
#[derive(Clone, Debug)]
pub struct TextSide {
    /// Tokenizer, template and stop ids, joined.
    pub renderer: Renderer,
    /// Begin of sequence, where the model has such a token.
    pub bos: Option<u32>,
    /// Padding, where the model has such a token.
    pub pad: Option<u32>,
}

impl TextSide {
    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.renderer.tokenizer()
    }

    /// The chat template.
    pub fn template(&self) -> &ChatTemplate {
        self.renderer.template()
    }

    /// Ids that end generation: those of the model's files and the token with which the template ends an answer.
    pub fn stop_ids(&self) -> &[u32] {
        self.renderer.stop_ids()
    }

    /// The tokens around reasoning, where the model has them.
    pub fn reasoning_marks(&self) -> Option<ReasoningMarks> {
        let (open, close) = REASONING_TEXTS;
        Some(ReasoningMarks { open: self.tokenizer().id_of(open)?, close: self.tokenizer().id_of(close)? })
    }

    /// Whether a prompt leaves the reasoning open: the last mark after its last control token opens it. What comes before
    /// that token is a conversation, in which marks are anybody's.
    pub fn opens_reasoning(&self, prompt: &[u32], marks: ReasoningMarks) -> bool {
        let is_mark = |token: u32| [marks.open, marks.close].contains(&token);
        let last = prompt.iter().rev().copied().find(|&token| is_mark(token) || self.tokenizer().is_special(token));
        last == Some(marks.open)
    }
}
