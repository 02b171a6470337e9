//! Every file of the shared set of messy inputs has its documented outcome. Skipped without the shared data.

use std::collections::BTreeMap;
use std::path::PathBuf;

use deepspec_datasets::Error;
use deepspec_datasets::benchmarks::load_eval_set;
use deepspec_datasets::chat_template::ChatTemplate;
use deepspec_datasets::jsonl::{ConversationFile, Row};
use deepspec_datasets::renderer::{LossOn, Renderer};

use crate::templates::CHATML;
use crate::{environment, vocabulary};

fn messy() -> Option<PathBuf> {
    environment::path("DEEPSPEC_SHARED").map(|shared| shared.join("data/messy"))
}

/// Lines of the used rows, and the refused lines with reasons.
fn outcome(path: PathBuf) -> Result<(Vec<u64>, BTreeMap<u64, String>), Error> {
    let mut used = Vec::new();
    let mut refused = BTreeMap::new();
    for row in ConversationFile::open(path)? {
        match row? {
            Row::Conversation(conversation, _) => used.push(conversation.line),
            Row::Reject(reject) => {
                refused.insert(reject.line, reject.reason.to_string());
            }
        }
    }
    Ok((used, refused))
}

#[test]
fn messy_json_lines() {
    let Some(folder) = messy() else { return };
    let cases: [(&str, usize, &[u64]); 15] = [
        ("alpaca.jsonl", 30, &[]),
        ("alpaca_array.json", 12, &[]),
        ("blank_lines.jsonl", 4, &[]),
        ("code_whitespace.jsonl", 18, &[]),
        ("crlf_bom.jsonl", 12, &[]),
        ("duplicate_ids.jsonl", 16, &[]),
        ("invalid_middle.jsonl", 6, &[3, 5, 6, 8, 9, 10, 11, 12, 14]),
        ("latin1_bytes.jsonl", 3, &[2, 4]),
        ("long.jsonl", 10, &[]),
        ("no_final_newline.jsonl", 5, &[]),
        ("openai_messages.jsonl", 26, &[24]),
        ("sharegpt.jsonl", 33, &[30]),
        ("special_tokens.jsonl", 25, &[26]),
        ("tool_calls.jsonl", 14, &[4, 10]),
        ("unicode.jsonl", 37, &[38, 39]),
    ];
    for (name, used, refused) in cases {
        let (used_lines, refused_lines) = outcome(folder.join(name)).unwrap();
        let lines: Vec<u64> = refused_lines.keys().copied().collect();
        assert_eq!((used_lines.len(), &lines[..]), (used, refused), "{name}: {refused_lines:#?}");
    }
    let (used, _) = outcome(folder.join("blank_lines.jsonl")).unwrap();
    assert!(*used.last().unwrap() > 4, "blank lines count");
    let (used, _) = outcome(folder.join("sharegpt_tools.jsonl")).unwrap();
    assert_eq!(used.len(), 20);
}

#[test]
fn messy_turns_have_one_outcome_each() {
    let Some(folder) = messy() else { return };
    let (used, refused) = outcome(folder.join("odd_turns.jsonl")).unwrap();
    // Lines are ids plus one; the cases are listed in the table of the conversation module.
    let used: Vec<u64> = used.into_iter().map(|line| line - 1).collect();
    assert_eq!(used, [0, 1, 2, 3, 6, 7, 10, 12, 16, 20, 24]);
    assert_eq!(refused.len(), 18);
}

#[test]
fn messy_formats_are_named() {
    let Some(folder) = messy() else { return };
    let formats = [
        ("gzip_without_suffix.jsonl", "gzip"),
        ("prompts.jsonl.gz", "gzip"),
        ("truncated.jsonl.gz", "gzip"),
        ("two_members.jsonl.gz", "gzip"),
        ("messages.parquet", "Parquet"),
        ("prompt.parquet", "Parquet"),
        ("prompt_large_string_uncompressed.parquet", "Parquet"),
        ("sharegpt_large_list_gzip.parquet", "Parquet"),
        ("messages.arrow", "Arrow IPC file"),
        ("messages_stream.arrow", "Arrow IPC stream"),
        ("utf16le_bom.jsonl", "UTF-16"),
    ];
    for (name, format) in formats {
        match outcome(folder.join(name)).unwrap_err() {
            Error::UnsupportedFormat { format: found, .. } => assert!(found.contains(format), "{name}: {found}"),
            other => panic!("{name}: {other}"),
        }
    }
    for name in ["empty.jsonl", "only_blank.jsonl"] {
        assert!(matches!(outcome(folder.join(name)), Err(Error::NoRows { .. })), "{name}");
    }
}

#[test]
fn messy_evaluation_rows() {
    let Some(folder) = messy() else { return };
    let set = load_eval_set(folder.join("eval_turns_bad.jsonl"), None, 0).unwrap();
    let used: Vec<u64> = set.prompts.iter().map(|prompt| prompt.line).collect();
    assert_eq!(used, [1, 2, 8, 9, 12, 13]);
    assert_eq!(set.prompts[4].turns, 30);
    assert_eq!(set.rejects.len(), 7);
}

#[test]
fn messy_rows_render_whole_and_with_the_same_prompt() {
    let Some(folder) = messy() else { return };
    let template = ChatTemplate::new(CHATML, "", "").unwrap();
    let renderer = Renderer::new(template, vocabulary::tokenizer(), &[]).unwrap();
    let mut supervised = 0;
    for name in ["code_whitespace", "long", "odd_turns", "openai_messages", "sharegpt", "special_tokens", "unicode"] {
        for row in ConversationFile::open(folder.join(format!("{name}.jsonl"))).unwrap() {
            let Row::Conversation(conversation, _) = row.unwrap() else { continue };
            let asked = conversation.prompts().messages;
            let text = renderer.template().render(&asked, None, true, Some(false)).unwrap();
            let ids = renderer.render_prompt(&asked, None).unwrap();
            assert_eq!(renderer.tokenizer().decode(&ids, false), text, "{name} line {}", conversation.line);
            let Ok(answered) = conversation.answered() else { continue };
            let rendered = renderer.render_conversation(&answered.messages, None, LossOn::All).unwrap();
            assert!(rendered.unsupervised.is_empty());
            let start = rendered.spans[0].tokens.start;
            let before = &answered.messages[..rendered.spans[0].message];
            assert_eq!(rendered.ids[..start], renderer.render_prompt(before, None).unwrap());
            for span in &rendered.spans {
                let text = renderer.tokenizer().decode(&rendered.ids[span.tokens.clone()], false);
                assert_eq!(text, format!("{}<|im_end|>", answered.messages[span.message].content));
            }
            supervised += 1;
        }
    }
    assert!(supervised > 130, "{supervised}");
}
