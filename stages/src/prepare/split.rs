//! Reads the data of a recipe row by row and sorts it into what is used, what was repaired and what is refused.
//!
//! What makes a row usable is decided by the caller, who turns it into a prompt or into a finished sample. Rows are read up
//! to the one that fills `data.limit`; the limit counts usable rows.

use deepspec_datasets::benchmarks::built_in_train;
use deepspec_datasets::conversation::{Conversation, Invisible, RejectReason, Repair, Role, strip_invisible};
use deepspec_datasets::jsonl::{ConversationFile, Row};

use super::rejects::{Counts, Refusal, Rejects};
use crate::error::Result;
use crate::recipe::{DataRecipe, PromptSource};
use deepspec_engine::progress::Context;

/// What came of the rows.
#[derive(Debug)]
pub(super) struct Split<T> {
    /// Usable rows, in the order of the data.
    pub(super) usable: Vec<T>,
    /// Rows read, refused ones included.
    pub(super) rows_read: u64,
    /// Rows in which something was changed, by kind of change.
    pub(super) repaired: Counts,
    /// What was refused.
    pub(super) rejects: Rejects,
}

/// Reads rows and hands each to `accept`, which says what is used of it and what it changed.
///
/// # Errors
/// Those of [`ConversationFile::open`], a fatal refusal, more bad rows than `data.max_bad_ratio` allows, or no usable row.
pub(super) fn read<T>(
    data: &DataRecipe,
    ctx: Context<'_>,
    mut accept: impl FnMut(Conversation) -> Result<(T, Vec<Repair>), Refusal>,
) -> Result<Split<T>> {
    let (file, name) = match &data.prompts {
        PromptSource::BuiltIn => (built_in_train()?, "built-in".to_owned()),
        PromptSource::File(path) => (ConversationFile::open(path)?, path.display().to_string()),
    };
    let mut split = Split { usable: Vec::new(), rows_read: 0, repaired: Counts::new(), rejects: Rejects::new(name) };
    for row in file {
        ctx.check_interrupt("nothing had been started")?;
        split.rows_read += 1;
        let (mut conversation, repairs) = match row? {
            Row::Conversation(conversation, repairs) => (conversation, repairs),
            Row::Reject(reject) => {
                split.rejects.add(reject.line, None, reject.reason.into())?;
                continue;
            }
        };
        let mut kinds: Vec<&'static str> = repairs.iter().map(repair_kind).collect();
        let line = conversation.line;
        if data.strip_invisible {
            match strip(&mut conversation) {
                Ok(found) => {
                    let removed = [
                        (found.bidi_controls, "bidirectional controls removed"),
                        (found.zero_width_spaces, "zero-width spaces removed"),
                    ];
                    kinds.extend(removed.into_iter().filter(|(count, _)| *count > 0).map(|(_, kind)| kind));
                }
                Err(reason) => {
                    split.rejects.add(line, None, reason.into())?;
                    continue;
                }
            }
        }
        match accept(conversation) {
            Ok((usable, repairs)) => {
                kinds.extend(repairs.iter().map(repair_kind));
                split.usable.push(usable);
                for kind in kinds {
                    *split.repaired.entry(kind).or_default() += 1;
                }
            }
            Err(refusal) => split.rejects.add(line, None, refusal)?,
        }
        if data.limit == Some(split.usable.len()) {
            break;
        }
    }
    split.rejects.check_ratio(split.rows_read, data.max_bad_ratio)?;
    if split.usable.is_empty() {
        return Err(split.rejects.nothing_left());
    }
    Ok(split)
}

/// Takes invisible characters out of all texts and says how many there were; refuses a row in which nothing else was asked.
fn strip(conversation: &mut Conversation) -> Result<Invisible, RejectReason> {
    let mut removed = Invisible::default();
    for (index, message) in conversation.messages.iter_mut().enumerate() {
        let texts = [Some(&mut message.content), message.reasoning_content.as_mut()];
        for text in texts.into_iter().flatten() {
            let (stripped, found) = strip_invisible(text);
            if !found.is_none() {
                *text = stripped.into_owned();
                removed += found;
            }
        }
        if message.role == Role::User && message.content.trim().is_empty() {
            return Err(RejectReason::EmptyContent { field: format!("message {index} without invisible characters") });
        }
    }
    Ok(removed)
}

fn repair_kind(repair: &Repair) -> &'static str {
    match repair {
        Repair::UserTurnsJoined { .. } => "user turns joined",
        Repair::AnswersJoined { .. } => "answers joined",
        Repair::SystemMessagesJoined { .. } => "system messages joined",
        Repair::LeadingAnswersDropped { .. } => "leading answers dropped",
        Repair::OpenTurnsDropped { .. } => "open turns dropped",
        Repair::TurnsAfterToolCallDropped { .. } => "turns after a tool call dropped",
        Repair::DeveloperAsSystem => "developer read as system",
        Repair::RoleInCapitals => "role in capitals",
        Repair::LegacyFunctionCall => "function_call read as tool_calls",
        Repair::LegacyFunctions => "functions read as tools",
        Repair::ToolCallIdFilled => "tool_call_id filled in",
        Repair::EmptyInstruction => "input read as the prompt",
    }
}
