//! One conversation, whatever shape its row had: the type that every later step works on.
//!
//! [`Conversation::from_json`] detects the shape of a row by itself, row by row, so that files of mixed origin work:
//!
//! | shape | recognised by | turns |
//! | --- | --- | --- |
//! | ours, ShareGPT | `conversations` | `role`/`content` or `from`/`value` |
//! | OpenAI | `messages`, or `body.messages` of a batch file | `role`/`content`, content text or a list of text parts |
//! | evaluation set | `turns` | each string is one user turn |
//! | Alpaca | `instruction` | `system`, `history`, `instruction` + blank line + `input`, then `output` |
//! | prompt | `prompt`, or `question` | one user turn; `completion` or `response` is its answer |
//!
//! Roles are read without regard to case. `human` is a user, `gpt`, `chatgpt`, `bing` and `model` are assistants,
//! `developer` is a system message, `function`, `observation` and `tool` are tool replies, `function_call` is an
//! assistant turn that calls a tool. Keys that are not named here are ignored.
//!
//! Every odd row has one outcome. *Repaired* rows are used and carry a [`Repair`]; *refused* rows carry a
//! [`RejectReason`] and are not used.
//!
//! | case | outcome |
//! | --- | --- |
//! | two user turns in a row (not in `turns`) | repaired: joined with a blank line |
//! | two answers in a row | repaired: joined with a blank line; refused if one of them calls a tool |
//! | answer before the first user turn | repaired: dropped |
//! | several system messages in a row | repaired: joined with a blank line |
//! | system message after the first turn | used where it stands; whether that is allowed, the chat template says |
//! | no user turn (only system, only answers, empty list) | refused |
//! | user turn empty, blank, null, missing or not text | refused |
//! | answer empty, blank or null, without tool calls | used as a prompt; refused as an answered conversation |
//! | answer null with tool calls | used, content is empty |
//! | ends with a user turn | used as a prompt; as an answered conversation repaired: the open turn is dropped |
//! | role in capitals, `developer` | repaired |
//! | role missing, unknown, or holding markup | refused |
//! | content part that is not text (an image) | refused, the kind of part is named |
//! | Alpaca `input` missing, null, empty or `<noinput>` | the same prompt |
//! | Alpaca `instruction` empty, `input` not | repaired: `input` is the prompt |
//! | old `function_call` beside the content | repaired: becomes `tool_calls` |
//! | tool arguments that are text but not JSON | refused; empty text and objects pass unchanged |
//! | tool reply without id, one call open | repaired: takes the id of that call |
//! | tool reply after an answer whose text holds a call, such as `<tool_call>` | used as it is |
//! | tool reply without a call that it answers | refused |
//! | `tools` as a string of JSON | parsed; refused if it does not parse |
//! | `functions` instead of `tools` | repaired: becomes `tools` |
//! | `documents` or `chat_template_kwargs` beside messages | refused, since no stage renders them |
//! | key twice in an object | the last one counts |
//! | `id` null or missing | empty text; any other id keeps its exact spelling, since it is never a key or a path |

mod invisible;
mod reject;
mod repair;
mod shapes;

pub use invisible::{Invisible, strip_invisible};
pub use reject::RejectReason;
pub use repair::Repair;

use serde_json::Value;

/// Who speaks in a [`Message`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The reply of a tool that the model called.
    Tool,
}

impl Role {
    /// The name that chat templates compare with.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// The text; empty where an assistant turn only calls tools.
    pub content: String,
    /// Thinking text that was stored apart from the answer.
    pub reasoning_content: Option<String>,
    /// Calls as the row had them (OpenAI's form), never an empty list.
    pub tool_calls: Option<Value>,
    /// Name of the speaker or tool.
    pub name: Option<String>,
    /// The call that a tool reply answers.
    pub tool_call_id: Option<String>,
}

impl Message {
    /// A plain message.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Message {
            role,
            content: content.into(),
            reasoning_content: None,
            tool_calls: None,
            name: None,
            tool_call_id: None,
        }
    }
}

/// One row of a data set, put in order: no two system messages, no two user turns and no two answers in a row (several user turns
/// in a row only where the row had no answers, as in `turns`), and no answer before the first user turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// Line of the file on which the row starts, from 1, blank lines counted.
    pub line: u64,
    /// Stable key of the sample: 16 hex digits of a hash of the line number and the row's bytes.
    pub key: String,
    /// The row's own `id`, spelled exactly as in the file; empty if there is none. Not unique.
    pub id: String,
    /// The row's `domain`.
    pub domain: Option<String>,
    /// The turns.
    pub messages: Vec<Message>,
    /// Tool definitions, a list that is not empty.
    pub tools: Option<Value>,
}

/// What is asked in a conversation, see [`Conversation::prompts`].
#[derive(Clone, Debug, PartialEq)]
pub struct Prompts {
    /// System messages and user turns.
    pub messages: Vec<Message>,
    /// The numbers of messages after which an answer is due, rising: one for each user turn.
    pub answers: Vec<usize>,
    /// What was left out.
    pub repairs: Vec<Repair>,
}

/// Messages for one use of a conversation, and what was done to them for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Selected {
    /// The chosen messages.
    pub messages: Vec<Message>,
    /// What was left out.
    pub repairs: Vec<Repair>,
}

impl Conversation {
    /// Reads a row of any known shape.
    ///
    /// # Errors
    /// The reason why the row can't be used; see the table of this module.
    pub fn from_json(line: u64, key: String, row: &Value) -> Result<(Self, Vec<Repair>), RejectReason> {
        let Value::Object(row) = row else {
            return Err(RejectReason::NotAnObject { found: reject::kind(row) });
        };
        let mut repairs = Vec::new();
        let shaped = shapes::read(row, &mut repairs)?;
        let messages = repair::put_in_order(shaped, &mut repairs)?;
        let conversation = Conversation {
            line,
            key,
            id: shapes::exact_id(row.get("id")),
            domain: row.get("domain").and_then(Value::as_str).map(str::to_owned),
            messages,
            tools: shapes::tools(row, &mut repairs)?,
        };
        shapes::check_rendered(row)?;
        Ok((conversation, repairs))
    }

    /// What regeneration starts from: the system messages and all user turns. Answers are left out, to be generated
    /// turn by turn. Turns from the first tool call on are dropped and reported, since they depend on the tool's reply.
    pub fn prompts(&self) -> Prompts {
        let uses_tool = |message: &Message| message.role == Role::Tool || message.tool_calls.is_some();
        let end = self.messages.iter().position(uses_tool).unwrap_or(self.messages.len());
        let is_user = |message: &&Message| message.role == Role::User;
        let dropped = self.messages[end..].iter().filter(is_user).count();
        let (mut messages, mut answers) = (Vec::new(), Vec::new());
        let mut is_asked = false;
        for message in &self.messages[..end] {
            if is_asked && message.role != Role::System {
                answers.push(messages.len());
                is_asked = false;
            }
            if message.role != Role::Assistant {
                is_asked |= message.role == Role::User;
                messages.push(message.clone());
            }
        }
        if is_asked {
            answers.push(messages.len());
        }
        Prompts {
            messages,
            answers,
            repairs: if dropped > 0 { vec![Repair::TurnsAfterToolCallDropped { count: dropped }] } else { Vec::new() },
        }
    }

    /// The conversation with its own answers, ending with one. An open last turn is dropped and reported.
    ///
    /// # Errors
    /// [`RejectReason::NoAnswer`] without any answer, [`RejectReason::EmptyAnswer`] if one of them has no text and no
    /// tool call.
    pub fn answered(&self) -> Result<Selected, RejectReason> {
        let is_answer = |message: &Message| message.role == Role::Assistant;
        let end = self.messages.iter().rposition(is_answer).ok_or(RejectReason::NoAnswer)? + 1;
        let answers = self.messages.iter().filter(|message| is_answer(message));
        for (index, message) in answers.enumerate() {
            if message.content.trim().is_empty() && message.tool_calls.is_none() {
                return Err(RejectReason::EmptyAnswer { answer: index + 1 });
            }
        }
        let dropped = self.messages.len() - end;
        Ok(Selected {
            messages: self.messages[..end].to_vec(),
            repairs: if dropped > 0 { vec![Repair::OpenTurnsDropped { count: dropped }] } else { Vec::new() },
        })
    }
}
