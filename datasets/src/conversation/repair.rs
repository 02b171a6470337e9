//! Puts the turns of a row in the order that chat templates expect, and says what it changed.

use serde_json::Value;
use thiserror::Error;

use super::reject::RejectReason;
use super::shapes::{Shaped, Turn};
use super::{Message, Role};

/// Something that was changed so that a row could be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Repair {
    /// User turns in a row were joined.
    #[error("{count} user turns joined to the one before")]
    UserTurnsJoined {
        /// How many were joined to the one before.
        count: usize,
    },
    /// Answers in a row were joined.
    #[error("{count} answers joined to the one before")]
    AnswersJoined {
        /// How many were joined to the one before.
        count: usize,
    },
    /// System messages in a row were joined.
    #[error("{count} system messages joined to the one before")]
    SystemMessagesJoined {
        /// How many were joined to the one before.
        count: usize,
    },
    /// Answers before the first user turn were dropped.
    #[error("{count} answers before the first user turn dropped")]
    LeadingAnswersDropped {
        /// How many.
        count: usize,
    },
    /// Turns after the last answer were dropped.
    #[error("{count} turns after the last answer dropped")]
    OpenTurnsDropped {
        /// How many.
        count: usize,
    },
    /// User turns after the first tool call were dropped.
    #[error("{count} user turns after a tool call dropped")]
    TurnsAfterToolCallDropped {
        /// How many.
        count: usize,
    },
    /// A developer message was read as a system message.
    #[error("role `developer` read as `system`")]
    DeveloperAsSystem,
    /// A role was not in lower case.
    #[error("role in capitals")]
    RoleInCapitals,
    /// The old `function_call` field was read as `tool_calls`.
    #[error("`function_call` read as `tool_calls`")]
    LegacyFunctionCall,
    /// The old `functions` list was read as `tools`.
    #[error("`functions` read as `tools`")]
    LegacyFunctions,
    /// A tool reply without id took the id of the only open call.
    #[error("`tool_call_id` filled in")]
    ToolCallIdFilled,
    /// The input of an Alpaca row without instruction was read as the prompt.
    #[error("`input` read as the prompt, `instruction` is empty")]
    EmptyInstruction,
}

/// Orders the turns by the table of the parent module.
pub(super) fn put_in_order(shaped: Shaped, repairs: &mut Vec<Repair>) -> Result<Vec<Message>, RejectReason> {
    let mut order = Order::default();
    for turn in shaped.turns {
        match turn.message.role {
            Role::System => order.system(turn),
            Role::User => order.user(turn, shaped.separate_turns)?,
            Role::Assistant => order.assistant(turn)?,
            Role::Tool => order.tool(turn, repairs)?,
        }
    }
    if !order.has_user {
        return Err(RejectReason::NoUserTurn);
    }
    let counted = [
        (order.joined_system, Repair::SystemMessagesJoined { count: order.joined_system }),
        (order.joined_users, Repair::UserTurnsJoined { count: order.joined_users }),
        (order.joined_answers, Repair::AnswersJoined { count: order.joined_answers }),
        (order.dropped_answers, Repair::LeadingAnswersDropped { count: order.dropped_answers }),
    ];
    repairs.extend(counted.into_iter().filter(|(count, _)| *count > 0).map(|(_, repair)| repair));
    Ok(order.messages)
}

/// Texts by which models of several families start a tool call in an answer: Hermes and Qwen, Mistral, Phi, Llama, Glaive.
const CALL_MARKS: [&str; 6] =
    ["<tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>", "<function_call>", "<functioncall>"];

#[derive(Default)]
struct Order {
    messages: Vec<Message>,
    has_user: bool,
    /// Ids of calls that no reply has answered yet; `None` for a call without id.
    open_calls: Vec<Option<String>>,
    /// Whether the last answer calls tools in its text, as models print calls; any number of replies may follow.
    calls_in_text: bool,
    joined_system: usize,
    joined_users: usize,
    joined_answers: usize,
    dropped_answers: usize,
}

impl Order {
    /// In the middle of a conversation too: whether a system message may stand there, the chat template says.
    fn system(&mut self, turn: Turn) {
        match self.messages.last_mut() {
            Some(last) if last.role == Role::System => {
                join(&mut last.content, &turn.message.content);
                self.joined_system += 1;
            }
            _ => self.messages.push(turn.message),
        }
    }

    fn user(&mut self, turn: Turn, separate: bool) -> Result<(), RejectReason> {
        if turn.message.content.trim().is_empty() {
            return Err(RejectReason::EmptyContent { field: turn.field });
        }
        self.has_user = true;
        self.calls_in_text = false;
        match self.messages.last_mut() {
            Some(last) if last.role == Role::User && !separate => {
                join(&mut last.content, &turn.message.content);
                self.joined_users += 1;
            }
            _ => self.messages.push(turn.message),
        }
        Ok(())
    }

    fn assistant(&mut self, turn: Turn) -> Result<(), RejectReason> {
        if !self.has_user {
            self.dropped_answers += 1;
            return Ok(());
        }
        let calls = open_calls(&turn)?;
        self.calls_in_text = CALL_MARKS.iter().any(|mark| turn.message.content.contains(mark));
        if let Some(last) = self.messages.last_mut().filter(|last| last.role == Role::Assistant) {
            if last.tool_calls.is_some() || turn.message.tool_calls.is_some() {
                return Err(RejectReason::InvalidToolUse {
                    field: turn.field,
                    problem: "two answers in a row, one of which calls a tool",
                });
            }
            join(&mut last.content, &turn.message.content);
            if let Some(reasoning) = turn.message.reasoning_content {
                join(last.reasoning_content.get_or_insert_default(), &reasoning);
            }
            self.joined_answers += 1;
        } else {
            self.messages.push(turn.message);
        }
        self.open_calls = calls;
        Ok(())
    }

    fn tool(&mut self, mut turn: Turn, repairs: &mut Vec<Repair>) -> Result<(), RejectReason> {
        let open = &mut self.open_calls;
        let answered = match &turn.message.tool_call_id {
            Some(id) => {
                let same = open.iter().position(|call| call.as_ref() == Some(id));
                same.or_else(|| open.iter().position(Option::is_none))
            }
            None => open.iter().position(Option::is_none).or_else(|| (open.len() == 1).then_some(0)),
        };
        let Some(index) = answered else {
            if self.calls_in_text {
                self.messages.push(turn.message);
                return Ok(());
            }
            return Err(RejectReason::InvalidToolUse {
                field: turn.field,
                problem: "a tool reply that answers no open call",
            });
        };
        let call = open.remove(index);
        if turn.message.tool_call_id.is_none() && call.is_some() {
            turn.message.tool_call_id = call;
            repairs.push(Repair::ToolCallIdFilled);
        }
        self.messages.push(turn.message);
        Ok(())
    }
}

/// Checks the calls of an assistant turn and returns their ids.
fn open_calls(turn: &Turn) -> Result<Vec<Option<String>>, RejectReason> {
    let calls = turn.message.tool_calls.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let check = |(index, call): (usize, &Value)| {
        let invalid =
            |problem| RejectReason::InvalidToolUse { field: format!("{}.tool_calls[{index}]", turn.field), problem };
        let function = call.get("function").ok_or_else(|| invalid("a call without `function`"))?;
        if function.get("name").and_then(Value::as_str).is_none_or(str::is_empty) {
            return Err(invalid("a call without a function name"));
        }
        match function.get("arguments") {
            Some(Value::String(text)) if !text.trim().is_empty() => {
                serde_json::from_str::<Value>(text).map_err(|_| invalid("arguments that are not JSON"))?;
            }
            None | Some(Value::Null | Value::String(_) | Value::Object(_)) => {}
            Some(_) => return Err(invalid("arguments that are neither text nor an object")),
        }
        Ok(call.get("id").and_then(Value::as_str).map(str::to_owned))
    };
    calls.iter().enumerate().map(check).collect()
}

fn join(first: &mut String, second: &str) {
    if !first.is_empty() && !second.is_empty() {
        first.push_str("\n\n");
    }
    first.push_str(second);
}
