//! Renders a conversation with the chat template of a model (a Jinja template), as Python's transformers do.
//!
//! Blocks are trimmed as there (`trim_blocks`, `lstrip_blocks`), string methods of Python work, `tojson` writes what
//! `json.dumps` writes, and `true`, `false` and `none` print as in Python. `{% generation %}` marks are taken as blocks
//! without effect. `strftime_now` uses one time, set when the template is made, so that every text of a run has the same
//! date. Work is bounded by an instruction count, so a template that loops without end fails with an error; memory is
//! not, so a template should come from a source that its weights would be trusted from.

mod clock;
mod json;

use std::borrow::Cow;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{AutoEscape, Environment, Error as JinjaError, ErrorKind, Output, State, context, escape_formatter};

use crate::conversation::Message;
use crate::error::Error;

/// Template instructions per rendering; a message costs about fifty.
const FUEL: u64 = 20_000_000;
const NAME: &str = "chat_template";
/// Marks errors that the template raised on purpose.
const REFUSED: &str = "chat template refused: ";

/// A compiled chat template with the two token texts that it may print.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    source: String,
}

impl ChatTemplate {
    /// Compiles a template. `bos` and `eos` are the texts of those tokens, empty where the model has none.
    ///
    /// # Errors
    /// [`Error::TemplateSyntax`].
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|cause| Error::TemplateSyntax { cause })?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_formatter(print_as_python);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<Value, JinjaError> {
            Err(JinjaError::new(ErrorKind::InvalidOperation, format!("{REFUSED}{message}")))
        });
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(NAME, without_generation_marks(source).into_owned())
            .map_err(|cause| Error::TemplateSyntax { cause })?;
        let template =
            ChatTemplate { environment, bos: bos.to_owned(), eos: eos.to_owned(), source: source.to_owned() };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_secs());
        Ok(template.with_time(now))
    }

    /// Sets the time that `strftime_now` prints, in seconds since 1970, UTC. Without it, the time of making.
    #[must_use]
    pub fn with_time(mut self, unix_seconds: u64) -> Self {
        self.environment.add_function("strftime_now", move |format: String| {
            clock::format_time(unix_seconds, &format)
                .map_err(|problem| JinjaError::new(ErrorKind::InvalidOperation, problem))
        });
        self
    }

    /// The text of the template as given.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders messages. `add_generation_prompt` ends the text where the model's answer starts. `enable_thinking` is
    /// left undefined when `None`, so that the template's own default counts.
    ///
    /// # Errors
    /// [`Error::TemplateRefused`] where the template raises an exception, [`Error::TemplateWithoutTools`] where the
    /// conversation uses tools and the template never mentions them, else [`Error::TemplateRender`].
    pub fn render(
        &self,
        messages: &[Message],
        tools: Option<&serde_json::Value>,
        add_generation_prompt: bool,
        enable_thinking: Option<bool>,
    ) -> Result<String, Error> {
        self.check_tools(messages, tools)?;
        self.render_values(&message_values(messages), &tools_value(tools), add_generation_prompt, enable_thinking)
    }

    /// As [`ChatTemplate::render`], of messages and tools that were made ready before and checked as a whole.
    pub(crate) fn render_values(
        &self,
        messages: &[Value],
        tools: &Value,
        add_generation_prompt: bool,
        enable_thinking: Option<bool>,
    ) -> Result<String, Error> {
        #[cfg(test)]
        WORK.with(|work| work.set((work.get().0 + 1, work.get().1 + messages.len())));
        let context = context! {
            messages => messages.to_vec(),
            tools => tools.clone(),
            documents => (),
            add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            ..match enable_thinking {
                Some(enable_thinking) => context! { enable_thinking },
                None => context! {},
            }
        };
        let template = self.environment.get_template(NAME).map_err(|cause| Error::TemplateRender { cause })?;
        template.render(context).map_err(|cause| match cause.detail().and_then(|detail| detail.strip_prefix(REFUSED)) {
            Some(message) => Error::TemplateRefused { message: message.to_owned() },
            None => Error::TemplateRender { cause },
        })
    }

    fn check_tools(&self, messages: &[Message], tools: Option<&serde_json::Value>) -> Result<(), Error> {
        let calls = messages.iter().any(|message| message.tool_calls.is_some());
        if tools.is_some() && !self.source.contains("tools") {
            return Err(Error::TemplateWithoutTools { what: "tools" });
        }
        if calls && !self.source.contains("tool_calls") {
            return Err(Error::TemplateWithoutTools { what: "tool_calls" });
        }
        Ok(())
    }
}

#[cfg(test)]
thread_local! {
    /// Renderings of this thread, and the messages in them, so that tests can count work.
    pub(crate) static WORK: std::cell::Cell<(usize, usize)> = const { std::cell::Cell::new((0, 0)) };
}

/// Messages as templates see them; cheap to clone.
pub(crate) fn message_values(messages: &[Message]) -> Vec<Value> {
    messages.iter().map(message_value).collect()
}

/// Tools as templates see them.
pub(crate) fn tools_value(tools: Option<&serde_json::Value>) -> Value {
    tools.map_or(Value::from(()), json::to_template)
}

fn message_value(message: &Message) -> Value {
    let mut fields =
        vec![("role", Value::from(message.role.as_str())), ("content", Value::from(message.content.as_str()))];
    let texts = [
        ("reasoning_content", &message.reasoning_content),
        ("name", &message.name),
        ("tool_call_id", &message.tool_call_id),
    ];
    for (key, text) in texts {
        if let Some(text) = text {
            fields.push((key, Value::from(text.as_str())));
        }
    }
    if let Some(calls) = &message.tool_calls {
        fields.push(("tool_calls", json::to_template(calls)));
    }
    Value::from_pairs(fields)
}

/// `{% generation %}` blocks, which only mark answers, become blocks that change nothing, white space rules included.
fn without_generation_marks(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        let Some(length) = rest.find("%}").map(|end| end + 2) else { break };
        let tag = &rest[..length];
        let word = tag[2..length - 2].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => {
                // Only the mark itself is passed, since a `%}` inside a string does not end the tag.
                out.push_str("{%");
                rest = &rest[2..];
                continue;
            }
        }
        rest = &rest[length..];
    }
    out.push_str(rest);
    Cow::Owned(out)
}

fn print_as_python(out: &mut Output, state: &mut State, value: &Value) -> Result<(), JinjaError> {
    if value.is_none() {
        out.write_str("None").map_err(JinjaError::from)
    } else if value.kind() == minijinja::value::ValueKind::Bool {
        out.write_str(if value.is_true() { "True" } else { "False" }).map_err(JinjaError::from)
    } else {
        escape_formatter(out, state, value)
    }
}

fn to_json(value: &Value, options: Kwargs) -> Result<String, JinjaError> {
    let separators = match options.get::<Option<Vec<String>>>("separators")?.as_deref() {
        None => None,
        Some([item, key]) => Some((item.clone(), key.clone())),
        Some(_) => return Err(JinjaError::new(ErrorKind::InvalidOperation, "separators must be two strings")),
    };
    let style = json::Style {
        indent: options.get("indent")?,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators,
    };
    options.assert_all_used()?;
    json::write(value, &style)
}
