//! Renderings of the first messages of one conversation, whose messages are made ready for the template once.

use minijinja::value::Value as TemplateValue;
use serde_json::Value;

use crate::chat_template::{ChatTemplate, message_values, tools_value};
use crate::conversation::{Message, Role};
use crate::error::Error;

/// The messages of a conversation, ready to be rendered up to any of them.
pub(super) struct Prefixes<'a> {
    template: &'a ChatTemplate,
    messages: &'a [Message],
    values: Vec<TemplateValue>,
    tools: TemplateValue,
    enable_thinking: Option<bool>,
}

impl<'a> Prefixes<'a> {
    pub(super) fn new(
        template: &'a ChatTemplate,
        messages: &'a [Message],
        tools: Option<&Value>,
        enable_thinking: Option<bool>,
    ) -> Self {
        Self { template, messages, values: message_values(messages), tools: tools_value(tools), enable_thinking }
    }

    /// The first `count` messages as text.
    pub(super) fn text(&self, count: usize, prompt: bool) -> Result<String, Error> {
        self.template.render_values(&self.values[..count], &self.tools, prompt, self.enable_thinking)
    }

    /// Indices of the answers before message `end`.
    pub(super) fn answers_before(&self, end: usize) -> impl Iterator<Item = usize> {
        let messages = self.messages[..end].iter().enumerate();
        messages.filter(|(_, message)| message.role == Role::Assistant).map(|(index, _)| index)
    }
}
