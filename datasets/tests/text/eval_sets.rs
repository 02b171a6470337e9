//! Evaluation sets and the shuffle they are drawn by.

use std::collections::HashSet;

use deepspec_datasets::Error;
use deepspec_datasets::benchmarks::{PythonRandom, built_in_eval, built_in_train, load_eval_set};
use deepspec_datasets::jsonl::Row;

#[test]
fn shuffles_as_python_does() {
    let shuffled = |seed, count: usize| {
        let mut items: Vec<usize> = (0..count).collect();
        PythonRandom::new(seed).shuffle(&mut items);
        items
    };
    // Printed by random.Random(seed).shuffle in Python 3.
    assert_eq!(shuffled(0, 10), [7, 8, 1, 5, 3, 4, 2, 0, 9, 6]);
    assert_eq!(shuffled(980_406, 12), [2, 1, 0, 7, 10, 5, 4, 8, 6, 9, 11, 3]);
    assert_eq!(shuffled((1 << 40) + 7, 9), [0, 5, 2, 3, 6, 1, 8, 4, 7]);
    assert_eq!(shuffled(980_406, 1319)[..6], [435, 902, 303, 1168, 403, 611]);
    let weighted: usize = shuffled(42, 1000).iter().enumerate().map(|(i, x)| i * x).sum();
    assert_eq!(weighted, 250_181_598, "more draws than one refill of the generator");
    assert_eq!(shuffled(1, 1), [0]);
    assert!(shuffled(1, 0).is_empty());
}

#[test]
fn a_set_is_shuffled_only_when_it_is_cut() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("toy.jsonl");
    let mut rows: Vec<String> =
        (0..10).map(|n| format!("{{\"turns\": [\"q{n}\", \"r\"], \"domain\": \"d\"}}")).collect();
    rows.push("{\"turns\": []}".to_owned());
    fs_err::write(&path, rows.join("\n")).unwrap();
    let firsts = |limit| {
        let set = load_eval_set(&path, limit, 0).unwrap();
        assert_eq!(set.name, "toy");
        assert_eq!(set.rejects.len(), 1);
        assert_eq!(set.rejects[0].line, 11);
        assert!(set.prompts.iter().enumerate().all(|(index, prompt)| prompt.index == index));
        set.prompts.into_iter().map(|prompt| prompt.messages[0].content.clone()).collect::<Vec<_>>()
    };
    assert_eq!(firsts(None)[..2], ["q0", "q1"]);
    assert_eq!(firsts(Some(10))[..2], ["q0", "q1"]);
    assert_eq!(firsts(Some(3)), ["q7", "q8", "q1"]);

    fs_err::write(&path, "{\"turns\": []}\n7\n").unwrap();
    match load_eval_set(&path, None, 0).unwrap_err() {
        Error::NoPrompts { rejected: 2, line: 1, reason, .. } => assert!(reason.contains("no user turn")),
        other => panic!("{other}"),
    }
}

#[test]
fn messages_keep_their_system_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.jsonl");
    fs_err::write(&path, r#"{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}"#)
        .unwrap();
    let set = load_eval_set(&path, Some(5), 1).unwrap();
    let texts: Vec<&str> = set.prompts[0].messages.iter().map(|message| message.content.as_str()).collect();
    assert_eq!((texts, set.prompts[0].turns), (vec!["s", "u"], 1));
}

#[test]
fn prompts_keep_tools_names_and_all_system_messages_before_the_answer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat.jsonl");
    let row = serde_json::json!({
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "Ann"},
            {"role": "system", "content": "t"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}],
        "tools": [{"type": "function", "function": {"name": "f"}}]
    });
    fs_err::write(&path, row.to_string()).unwrap();
    let set = load_eval_set(&path, None, 1).unwrap();
    let prompt = &set.prompts[0];
    let texts: Vec<&str> = prompt.messages.iter().map(|message| message.content.as_str()).collect();
    assert_eq!((texts, prompt.turns), (vec!["s", "u", "t"], 2));
    assert_eq!(prompt.messages[1].name.as_deref(), Some("Ann"));
    assert_eq!(prompt.tools, Some(row["tools"].clone()));
}

#[test]
fn a_set_of_which_nothing_is_usable_says_what_to_do_about_its_rows() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("set.jsonl");
    let cases = [
        (r#"{"chosen": [{"role": "user", "content": "u"}], "rejected": []}"#, ".chosen"),
        (r#"{"prompt": [{"role": "user", "content": "u"}], "chosen": []}"#, "{messages: .prompt}"),
        (r#"{"messages": [{"role": "user", "content": "u"}, {"role": "tool", "content": "r"}]}"#, "tool reply"),
        ("plain words", "jq -R"),
        (r#"{"data": [{"prompt": "u"}]}"#, ".data[]"),
        (r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#, "images"),
    ];
    for (row, part) in cases {
        fs_err::write(&path, row).unwrap();
        let error = load_eval_set(&path, None, 1).unwrap_err();
        assert!(error.hint().unwrap().contains(part), "{row}: {:?}", error.hint());
    }
}

#[test]
fn built_in_prompts_are_whole_distinct_and_kept_apart() {
    let mut ids = HashSet::new();
    let mut asked = HashSet::new();
    for row in built_in_train().unwrap() {
        let Row::Conversation(conversation, repairs) = row.unwrap() else { panic!("a built-in row is refused") };
        assert!(repairs.is_empty());
        assert!(!conversation.id.is_empty() && conversation.domain.is_some(), "line {}", conversation.line);
        assert!(ids.insert(conversation.id), "line {} repeats an id", conversation.line);
        asked.extend(conversation.messages.into_iter().map(|message| normal(&message.content)));
    }
    assert!(ids.len() >= 100, "{}", ids.len());
    let set = built_in_eval().unwrap();
    assert!(set.rejects.is_empty());
    assert!(set.prompts.len() >= 10);
    let mut measured = HashSet::new();
    for prompt in set.prompts {
        assert!(prompt.domain.is_some());
        for turn in prompt.messages.into_iter().map(|message| message.content) {
            assert!(!asked.contains(&normal(&turn)), "an evaluation prompt is trained on: {turn}");
            assert!(measured.insert(normal(&turn)), "twice: {turn}");
        }
    }
}

/// Letters and digits in lower case, so that prompts differ by more than their punctuation.
fn normal(text: &str) -> String {
    text.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}
