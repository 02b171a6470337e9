//! Files of conversations: how many rows can be used and how, what was repaired, and why rows are refused.

use std::collections::BTreeMap;

use anyhow::{Context as _, anyhow};
use deepspec_datasets::conversation::{Conversation, Invisible, Message, Repair, Role};
use deepspec_datasets::jsonl::{ConversationFile, Reject, Row};
use deepspec_datasets::renderer::{LossOn, Rendered};
use deepspec_engine::TextSide;
use deepspec_engine::progress::Context;
use serde_json::{Value, json};

use super::report::{Report, percent};
use super::text_side;
use crate::args::InspectArguments;
use crate::failure::Refusal;

/// Refused rows that are listed unless all are asked for.
const REJECTS_SHOWN: usize = 10;

/// Counts over a file.
#[derive(Debug, Default)]
struct Counts {
    rows: u64,
    usable: u64,
    answered: u64,
    prompts_only: u64,
    several_turns: u64,
    with_system: u64,
    with_tools: u64,
    with_reasoning: u64,
    messages: u64,
    characters: u64,
    invisible: Invisible,
    with_invisible: u64,
    repaired: u64,
    repairs: BTreeMap<String, u64>,
    reasons: BTreeMap<String, u64>,
}

/// Reports on the file at the path given; `verbose` lists every refused row.
pub(super) fn inspect(arguments: &InspectArguments, verbose: bool, context: Context<'_>) -> anyhow::Result<Report> {
    let path = &arguments.path;
    let mut report = Report::new("conversations");
    let mut counts = Counts::default();
    let mut rejects = Vec::new();
    let mut sample = None;
    let mut remedy = None;
    for row in ConversationFile::open(path)? {
        context.check_interrupt("nothing was changed")?;
        let row = row.with_context(|| format!("after {} rows of `{}`", counts.rows, path.display()))?;
        if arguments.sample == Some(counts.rows) {
            sample = Some(row.clone());
        }
        counts.rows += 1;
        match row {
            Row::Conversation(conversation, repairs) => counts.add(&conversation, &repairs),
            Row::Reject(reject) => {
                remedy.get_or_insert(reject.reason.hint());
                *counts.reasons.entry(reason(&reject)).or_default() += 1;
                if verbose || rejects.len() < REJECTS_SHOWN {
                    rejects.push(vec![json!(reject.line), json!(reject.reason.to_string())]);
                }
            }
        }
    }
    counts.add_to(&mut report);
    report.table("first_rejects", &["line", "reason"], rejects);
    match (arguments.sample, sample) {
        (Some(_), Some(Row::Conversation(conversation, repairs))) => {
            add_sample(&mut report, &conversation, &repairs);
            if let Some(model) = &arguments.model {
                let text_side = text_side::load(model)?;
                let rendered = render(&conversation, &text_side);
                add_tokens(&mut report, rendered, &text_side);
            }
        }
        (Some(index), Some(Row::Reject(reject))) => {
            report.facts("sample", json!({ "row": index, "line": reject.line, "refused": reject.reason.to_string() }));
        }
        (Some(index), None) => {
            let problem = format!("row {index} is outside `{}`, which has {} rows", path.display(), counts.rows);
            return Err(Refusal { problem, hint: Some("rows are counted from 0".into()) }.into());
        }
        (None, _) => {}
    }
    if counts.usable == 0 {
        let problem = format!("no row of `{}` can be used", path.display());
        report.problem(Refusal { problem, hint: remedy.map(Into::into) });
    }
    Ok(report)
}

impl Counts {
    fn add(&mut self, conversation: &Conversation, repairs: &[Repair]) {
        let messages = &conversation.messages;
        let count = |role: Role| messages.iter().filter(|message| message.role == role).count();
        let uses_tools = |message: &Message| message.tool_calls.is_some() || message.role == Role::Tool;
        self.usable += 1;
        let is_answered = conversation.answered().is_ok();
        self.answered += u64::from(is_answered);
        self.prompts_only += u64::from(!is_answered);
        self.several_turns += u64::from(count(Role::User) > 1);
        self.with_system += u64::from(count(Role::System) > 0);
        self.with_tools += u64::from(conversation.tools.is_some() || messages.iter().any(uses_tools));
        self.with_reasoning += u64::from(messages.iter().any(|message| message.reasoning_content.is_some()));
        self.messages += messages.len() as u64;
        self.characters += messages.iter().map(|message| message.content.chars().count() as u64).sum::<u64>();
        let mut invisible = Invisible::default();
        for message in messages {
            invisible += Invisible::of(&message.content);
            invisible += message.reasoning_content.as_deref().map(Invisible::of).unwrap_or_default();
        }
        self.with_invisible += u64::from(!invisible.is_none());
        self.invisible += invisible;
        self.repaired += u64::from(!repairs.is_empty());
        for repair in repairs {
            *self.repairs.entry(without_numbers(&repair.to_string())).or_default() += 1;
        }
    }

    fn add_to(&self, report: &mut Report) {
        report.facts(
            "rows",
            json!({
                "rows": self.rows,
                "usable": self.usable,
                "rejected": self.rows - self.usable,
                "repaired": self.repaired,
            }),
        );
        report.facts(
            "usable_rows",
            json!({
                "with_answers": self.answered,
                "prompts_only": self.prompts_only,
                "several_user_turns": self.several_turns,
                "with_system_message": self.with_system,
                "with_tools": self.with_tools,
                "with_reasoning": self.with_reasoning,
                "messages": self.messages,
                "characters": self.characters,
            }),
        );
        // What `data.strip_invisible` would take out.
        report.facts(
            "invisible_characters",
            json!({
                "rows": self.with_invisible,
                "bidi_controls": self.invisible.bidi_controls,
                "zero_width_spaces": self.invisible.zero_width_spaces,
            }),
        );
        let rows = |counts: &BTreeMap<String, u64>| -> Vec<Vec<Value>> {
            let mut rows: Vec<_> = counts.iter().collect();
            rows.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
            rows.into_iter().map(|(what, count)| vec![json!(count), json!(what)]).collect()
        };
        report.table("repairs", &["rows", "repair"], rows(&self.repairs));
        report.table("rejects", &["rows", "reason"], rows(&self.reasons));
    }
}

fn add_sample(report: &mut Report, conversation: &Conversation, repairs: &[Repair]) {
    let Conversation { line, key, id, domain, messages, tools } = conversation;
    report.facts(
        "sample",
        json!({
            "line": line,
            "key": key,
            "id": id,
            "domain": domain,
            "tools": tools,
            "repairs": repairs.iter().map(ToString::to_string).collect::<Vec<_>>(),
        }),
    );
    let mut shown = Vec::new();
    for message in messages {
        let role = message.role.as_str();
        if let Some(reasoning) = &message.reasoning_content {
            shown.push((format!("{role}, reasoning"), reasoning.clone()));
        }
        if !message.content.is_empty() || message.tool_calls.is_none() {
            shown.push((role.to_owned(), message.content.clone()));
        }
        if let Some(calls) = &message.tool_calls {
            shown.push((format!("{role}, tool calls"), calls.to_string()));
        }
    }
    report.messages("messages", shown);
}

/// The conversation as it would be trained on: every answer supervised.
fn render(conversation: &Conversation, text_side: &TextSide) -> anyhow::Result<Rendered> {
    let selected = conversation.answered().map_err(|reason| anyhow!("the sample cannot be trained on: {reason}"))?;
    Ok(text_side.renderer.render_conversation(&selected.messages, conversation.tools.as_ref(), LossOn::All)?)
}

fn add_tokens(report: &mut Report, rendered: anyhow::Result<Rendered>, text_side: &TextSide) {
    let Some(Rendered { ids, loss_mask, unsupervised, .. }) = report.ok(rendered) else { return };
    let supervised = loss_mask.iter().map(|&mask| u64::from(mask)).sum();
    report.facts(
        "rendered",
        json!({
            "tokens": ids.len(),
            "supervised_tokens": supervised,
            "supervised_percent": percent(supervised, ids.len() as u64),
            "messages_not_supervised": unsupervised,
        }),
    );
    report.spans("text", text_side::spans(&ids, &loss_mask, Some(text_side.tokenizer())));
}

/// The kind of a refusal, without what differs from row to row.
fn reason(reject: &Reject) -> String {
    let reason = reject.reason.to_string();
    let general = reason.split_once(" at byte ").or_else(|| reason.split_once(" at column "));
    without_numbers(general.map_or(reason.as_str(), |(kind, _)| kind))
}

/// The text with each number replaced, so that texts that differ in numbers alone are counted as one. Digits of a name, such as
/// `UTF-8`, stay.
fn without_numbers(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let end = rest[start..].find(|c: char| !c.is_ascii_digit()).map_or(rest.len(), |length| start + length);
        result.push_str(&rest[..start]);
        let is_name = result.ends_with(|c: char| c.is_alphabetic() || matches!(c, '-' | '_'));
        result.push_str(if is_name { &rest[start..end] } else { "N" });
        rest = &rest[end..];
    }
    result.push_str(rest);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_do_not_split_reasons() {
        assert_eq!(without_numbers("`messages[12].content` is empty"), "`messages[N].content` is empty");
        assert_eq!(without_numbers("3 user turns joined"), "N user turns joined");
        assert_eq!(without_numbers("not UTF-8, line 12 of 34"), "not UTF-8, line N of N");
        assert_eq!(without_numbers("`cl100k_base` has 7"), "`cl100k_base` has N");
        assert_eq!(without_numbers("answer 12 is empty, 3"), "answer N is empty, N");
        assert_eq!(without_numbers("type \"mp3\" of UTF-16 at 7"), "type \"mp3\" of UTF-16 at N");
    }
}
