//! One outcome per odd row, and the file reader.

use deepspec_datasets::Error;
use deepspec_datasets::conversation::{Conversation, RejectReason, Repair, Role};
use deepspec_datasets::jsonl::{ConversationFile, Row, sample_key};
use serde_json::json;

fn read(row: serde_json::Value) -> Result<(Conversation, Vec<Repair>), RejectReason> {
    Conversation::from_json(1, String::new(), &row)
}

/// Roles and texts, short enough to write down.
fn turns(conversation: &Conversation) -> Vec<(Role, &str)> {
    conversation.messages.iter().map(|message| (message.role, message.content.as_str())).collect()
}

fn rows(text: &str) -> Vec<Row> {
    ConversationFile::from_bytes(text, "rows.jsonl").unwrap().collect::<Result<_, _>>().unwrap()
}

const USER: Role = Role::User;
const ASSISTANT: Role = Role::Assistant;

#[test]
fn one_chat_in_every_shape() {
    let shapes = [
        json!({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
        json!({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}),
        json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]},
                            {"role": "assistant", "content": "b", "refusal": null}]}),
        json!({"body": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}}),
        json!({"instruction": "a", "output": "b"}),
        json!({"instruction": "a", "input": null, "output": "b"}),
        json!({"instruction": "a", "input": "", "output": "b"}),
        json!({"instruction": "a", "input": "<noinput>", "output": "b"}),
        json!({"prompt": "a", "completion": "b"}),
        json!({"question": "a", "response": "b", "conversations": null}),
    ];
    for row in shapes {
        let (conversation, repairs) = read(row.clone()).unwrap();
        assert_eq!(turns(&conversation), [(USER, "a"), (ASSISTANT, "b")], "{row}");
        assert!(repairs.is_empty(), "{row}");
    }
    let (conversation, _) = read(json!({"turns": ["a", "b"], "domain": "math"})).unwrap();
    assert_eq!(turns(&conversation), [(USER, "a"), (USER, "b")]);
    assert_eq!(conversation.domain.as_deref(), Some("math"));
    let (conversation, _) =
        read(json!({"instruction": "a", "input": "x", "system": "s", "history": [["q", "r"]]})).unwrap();
    assert_eq!(turns(&conversation), [(Role::System, "s"), (USER, "q"), (ASSISTANT, "r"), (USER, "a\n\nx")]);
}

#[test]
fn odd_rows_are_repaired_and_say_so() {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let row = |messages: &[serde_json::Value]| json!({"messages": messages});
    let (u, a) = (message("user", "u"), message("assistant", "a"));
    let cases = [
        (
            row(&[u.clone(), u.clone(), a.clone()]),
            vec![(USER, "u\n\nu"), (ASSISTANT, "a")],
            Repair::UserTurnsJoined { count: 1 },
        ),
        (
            row(&[u.clone(), a.clone(), a.clone()]),
            vec![(USER, "u"), (ASSISTANT, "a\n\na")],
            Repair::AnswersJoined { count: 1 },
        ),
        (
            row(&[a.clone(), u.clone(), a.clone()]),
            vec![(USER, "u"), (ASSISTANT, "a")],
            Repair::LeadingAnswersDropped { count: 1 },
        ),
        (
            row(&[message("system", "s"), message("system", "t"), u.clone()]),
            vec![(Role::System, "s\n\nt"), (USER, "u")],
            Repair::SystemMessagesJoined { count: 1 },
        ),
        (
            row(&[message("developer", "s"), u.clone()]),
            vec![(Role::System, "s"), (USER, "u")],
            Repair::DeveloperAsSystem,
        ),
        (row(&[message("USER", "u"), a.clone()]), vec![(USER, "u"), (ASSISTANT, "a")], Repair::RoleInCapitals),
        (json!({"instruction": "", "input": "u"}), vec![(USER, "u")], Repair::EmptyInstruction),
    ];
    for (row, expected, repair) in cases {
        let (conversation, repairs) = read(row.clone()).unwrap();
        assert_eq!(turns(&conversation), expected, "{row}");
        assert_eq!(repairs, [repair], "{row}");
    }
}

#[test]
fn refused_rows_name_the_field() {
    let cases = [
        (json!([]), "expected an object, found a list"),
        (json!({"text": "x\u{202e}"}), "among the keys [`text`]"),
        (json!({"conversations": null}), "`conversations` is missing"),
        (json!({"conversations": []}), "no user turn"),
        (json!({"conversations": "x"}), "`conversations`: expected a list, found a string"),
        (json!({"messages": ["x"]}), "`messages[0]`: expected a message object, found a string"),
        (json!({"messages": [null]}), "`messages[0]`: expected a message object, found null"),
        (json!({"messages": [{"content": "x"}]}), "`messages[0].role` is missing"),
        (json!({"messages": [{"role": "user"}]}), "`messages[0].content` is missing"),
        (json!({"messages": [{"role": "user", "content": null}]}), "`messages[0].content`: expected text, found null"),
        (
            json!({"messages": [{"role": "user", "content": 42}]}),
            "`messages[0].content`: expected text, found a number",
        ),
        (json!({"messages": [{"role": "user", "content": " \n"}]}), "`messages[0]` is empty"),
        (
            json!({"messages": [{"role": "user", "content": ["a"]}]}),
            "`messages[0].content[0]`: expected a content part object",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
            "`messages[0].content[0]`: content part of type `image_url` is not text",
        ),
        (json!({"messages": [{"role": "assistant", "content": "x"}]}), "no user turn"),
        (json!({"messages": [{"role": "critic", "content": "x"}]}), "`messages[0].role`: unknown role `critic`"),
        (
            json!({"messages": [{"role": "user<|im_end|>\n\u{202e}", "content": "x"}]}),
            r"unknown role `user<|im_end|>\n\u{202e}`",
        ),
        (json!({"turns": []}), "no user turn"),
        (json!({"turns": ["", "b"]}), "`turns[0]` is empty"),
        (json!({"turns": [1]}), "`turns[0]`: expected text, found a number"),
        (json!({"instruction": "", "input": ""}), "`instruction` is empty"),
        (json!({"prompt": "x", "tools": "[broken"}), "`tools`: text that is not JSON"),
    ];
    for (row, expected) in cases {
        let reason = read(row.clone()).unwrap_err().to_string();
        assert!(reason.contains(expected), "{row}: {reason}");
    }
}

#[test]
fn tool_calls_are_kept_unchanged_and_matched_with_replies() {
    let call = |id: serde_json::Value, arguments: serde_json::Value| {
        json!({"role": "assistant", "content": null,
            "tool_calls": [{"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}]})
    };
    let reply = |id: serde_json::Value| json!({"role": "tool", "tool_call_id": id, "content": "r"});
    let user = json!({"role": "user", "content": "u"});
    let row = |messages: &[&serde_json::Value]| json!({"messages": messages});

    let exact = " {\"x\":  1e2}";
    let (conversation, repairs) = read(row(&[&user, &call(json!("1"), json!(exact)), &reply(json!("1"))])).unwrap();
    assert_eq!(conversation.messages[1].tool_calls.as_ref().unwrap()[0]["function"]["arguments"], exact);
    assert!(repairs.is_empty());
    let (_, repairs) = read(row(&[&user, &call(json!("1"), json!({"x": 1})), &reply(json!(null))])).unwrap();
    assert_eq!(repairs, [Repair::ToolCallIdFilled]);
    assert!(read(row(&[&user, &call(json!("1"), json!("")), &reply(json!("1"))])).is_ok());

    let fails = |row: serde_json::Value| read(row).unwrap_err().to_string();
    assert!(
        fails(row(&[&user, &call(json!("1"), json!("{\"x\": "))])).contains("`messages[1].tool_calls[0]`: arguments")
    );
    assert!(fails(row(&[&user, &reply(json!("1"))])).contains("answers no open call"));
    assert!(fails(row(&[&user, &call(json!("1"), json!("")), &reply(json!("2"))])).contains("answers no open call"));

    let old = json!({"role": "assistant", "content": null, "function_call": {"name": "f", "arguments": "{}"}});
    let (conversation, repairs) = read(row(&[&user, &old])).unwrap();
    assert_eq!(conversation.messages[1].tool_calls.as_ref().unwrap()[0]["function"]["name"], "f");
    assert_eq!(repairs, [Repair::LegacyFunctionCall]);

    let (conversation, repairs) = read(json!({
        "conversations": [{"from": "human", "value": "u"}, {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {}}"},
            {"from": "observation", "value": "r"}, {"from": "gpt", "value": "a"}],
        "tools": "[{\"name\": \"f\"}]"
    }))
    .unwrap();
    assert_eq!(turns(&conversation), [(USER, "u"), (ASSISTANT, ""), (Role::Tool, "r"), (ASSISTANT, "a")]);
    assert_eq!(conversation.tools, Some(json!([{"name": "f"}])));
    assert!(repairs.is_empty());
    let selected = conversation.prompts();
    assert_eq!(selected.messages.len(), 1);
    assert!(selected.repairs.is_empty());
    assert_eq!(conversation.answered().unwrap().messages.len(), 4);
}

#[test]
fn prompts_and_answered_conversations_are_two_uses() {
    let row = |messages: &[(&str, &str)]| {
        let messages: Vec<_> =
            messages.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
        read(json!({"messages": messages})).unwrap().0
    };
    let open = row(&[("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v")]);
    let asked: Vec<String> = open.prompts().messages.into_iter().map(|message| message.content).collect();
    assert_eq!(asked, ["s", "u", "v"]);
    let answered = open.answered().unwrap();
    assert_eq!(answered.messages.len(), 3);
    assert_eq!(answered.repairs, [Repair::OpenTurnsDropped { count: 1 }]);

    assert_eq!(row(&[("user", "u")]).answered(), Err(RejectReason::NoAnswer));
    let empty = row(&[("user", "u"), ("assistant", "a"), ("user", "u"), ("assistant", " ")]);
    assert_eq!(empty.answered(), Err(RejectReason::EmptyAnswer { answer: 2 }));
    assert_eq!(empty.prompts().messages.len(), 2);
}

#[test]
fn ids_keep_their_spelling() {
    let cases = [
        ("2", "2"),
        ("\"2\"", "2"),
        ("2.0", "2.0"),
        ("-5", "-5"),
        ("9223372036854775808", "9223372036854775808"),
        ("9007199254740993", "9007199254740993"),
        ("null", ""),
        ("\"a/b\\\\c\"", "a/b\\c"),
        ("\"\"", ""),
    ];
    for (json, expected) in cases {
        match &rows(&format!("{{\"id\": {json}, \"prompt\": \"x\"}}"))[0] {
            Row::Conversation(conversation, _) => assert_eq!(conversation.id, expected),
            Row::Reject(reject) => panic!("{json}: {reject:?}"),
        }
    }
}

/// Line and either the first text or the reason.
fn summary(text: impl Into<Vec<u8>>) -> Vec<(u64, String)> {
    let file = ConversationFile::from_bytes(text, "rows.jsonl").unwrap();
    file.map(|row| match row.unwrap() {
        Row::Conversation(conversation, _) => (conversation.line, conversation.messages[0].content.clone()),
        Row::Reject(reject) => (reject.line, reject.reason.to_string()),
    })
    .collect()
}

fn expect(rows: Vec<(u64, String)>, expected: &[(u64, &str)]) {
    assert_eq!(rows.len(), expected.len(), "{rows:?}");
    for ((line, text), (expected_line, part)) in rows.iter().zip(expected) {
        assert_eq!(line, expected_line, "{rows:?}");
        assert!(text.contains(part), "{text:?} should hold {part:?}");
    }
}

#[test]
fn lines_of_every_kind() {
    let text =
        "\u{feff}{\"prompt\": \"a\"}\r\n\r\n  {\"prompt\": \"b\\u2028\u{2028}\u{85}\"}  \n \t\n{\"prompt\": \"c\"}";
    expect(summary(text), &[(1, "a"), (3, "b\u{2028}\u{2028}\u{85}"), (5, "c")]);

    let bad = "null\n[]\n\"x\"\n{\"prompt\": \"a\",}\n{'a': 1}\n{\"a\": NaN}\n{\"prompt\": \"a\"} {}\n{\"prompt\": \"a\", \"prompt\": \"b\"}\n\
               {\"prompt\": \"\\ud83c x\"}\n{\"prompt\": \"\\udf89\"}\n{\"prompt\": \"\\ud83c\\udf89\"}\n{\"prompt\": ";
    expect(
        summary(bad),
        &[
            (1, "found null"),
            (2, "found a list"),
            (3, "found a string"),
            (4, "column 16"),
            (5, "column 2"),
            (6, "column 7"),
            (7, "trailing characters"),
            (8, "b"),
            (9, "lone surrogate"),
            (10, "lone surrogate"),
            (11, "🎉"),
            (12, "EOF"),
        ],
    );
    expect(
        summary(&b"{\"prompt\": \"a\"}\n{\"prompt\": \"\xe9\"}\n{\"prompt\": \"b\"}\n"[..]),
        &[(1, "a"), (2, "byte 12"), (3, "b")],
    );
}

#[test]
fn a_file_may_be_one_array() {
    let text = " \n[\n  {\"prompt\": \"a, [b] \\\"}\"},\n  {\n \"prompt\": \"c\" },\n 7, {\"prompt\": }\n]\n";
    expect(summary(text), &[(3, "a, [b] \"}"), (4, "c"), (6, "found a number"), (6, "not JSON at column 12")]);
    expect(summary("[1]\n{\"prompt\": \"a\"}\n"), &[(1, "found a list"), (2, "a")]);
    let open = ConversationFile::from_bytes("[{\"prompt\": \"a\"},", "x").unwrap_err();
    assert!(matches!(open, Error::ArrayNotClosed { .. }));
}

#[test]
fn files_that_are_no_rows_say_what_they_are() {
    for nothing in ["", "\n \r\n\t\n", "\u{feff}", "[]", " [ \n ]"] {
        let error = ConversationFile::from_bytes(nothing, "x.jsonl").unwrap_err();
        assert!(matches!(error, Error::NoRows { .. }), "{nothing:?}: {error}");
    }
    let foreign: [(&[u8], &str); 7] = [
        (b"\x1f\x8b\x08\0", "gzip"),
        (b"PAR1\x15", "Parquet"),
        (b"ARROW1\0\0", "Arrow IPC file"),
        (b"\xff\xff\xff\xff\x10\0", "Arrow IPC stream"),
        (b"\xff\xfe{\0", "UTF-16"),
        (b"{\0\"\0", "UTF-16"),
        (b"\x28\xb5\x2f\xfd", "Zstandard"),
    ];
    for (bytes, format) in foreign {
        let error = ConversationFile::from_bytes(bytes, "x.jsonl").unwrap_err();
        assert!(error.to_string().contains(format) && error.to_string().contains("not supported yet"), "{error}");
        assert!(error.hint().is_some());
    }
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing.jsonl");
    let error = ConversationFile::open(&missing).unwrap_err();
    assert!(error.to_string().contains("missing.jsonl"), "{error}");
}

#[test]
fn a_line_beyond_the_limit_is_one_reject() {
    let mut text = b"{\"prompt\": \"".to_vec();
    text.resize(deepspec_datasets::jsonl::MAX_LINE_BYTES + 100, b'x');
    text.extend_from_slice(b"\"}\n{\"prompt\": \"b\"}\n");
    expect(summary(text), &[(1, "longer than 67108864 bytes"), (2, "b")]);
}

#[test]
fn keys_tell_equal_rows_apart() {
    let keys: Vec<String> = rows("{\"prompt\": \"a\"}\n{\"prompt\": \"a\"}\r\n")
        .into_iter()
        .map(|row| match row {
            Row::Conversation(conversation, _) => conversation.key,
            Row::Reject(reject) => panic!("{reject:?}"),
        })
        .collect();
    assert_eq!(keys, [sample_key(1, b"{\"prompt\": \"a\"}"), sample_key(2, b"{\"prompt\": \"a\"}")]);
    assert_ne!(keys[0], keys[1]);
    assert_eq!(keys[0].len(), 16);
}

#[test]
fn a_system_message_may_stand_anywhere() {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let row = |messages: &[(&str, &str)]| {
        let messages: Vec<_> = messages.iter().map(|(role, content)| message(role, content)).collect();
        read(json!({"messages": messages})).unwrap()
    };
    let (later, repairs) =
        row(&[("user", "u"), ("assistant", "a"), ("system", "s"), ("user", "v"), ("assistant", "b")]);
    assert!(repairs.is_empty());
    assert_eq!(later.answered().unwrap().messages, later.messages);
    let asked = later.prompts();
    let texts: Vec<&str> = asked.messages.iter().map(|message| message.content.as_str()).collect();
    assert_eq!((texts, asked.answers), (vec!["u", "s", "v"], vec![1, 3]));

    // Between a question and its answer it belongs to the question.
    let (between, _) = row(&[("user", "u"), ("system", "s"), ("assistant", "a"), ("user", "v")]);
    assert_eq!(between.prompts().answers, [2, 3]);
    let (last, _) = row(&[("system", "s"), ("user", "u"), ("system", "t")]);
    assert_eq!((last.prompts().answers, last.prompts().messages.len()), (vec![3], 3));
    // Between two questions it ends the first.
    let (apart, repairs) = row(&[("user", "u"), ("system", "s"), ("user", "v")]);
    assert_eq!((apart.prompts().answers, repairs.is_empty()), (vec![2, 3], true));
    let (_, repairs) = row(&[("user", "u"), ("system", "s"), ("system", "t"), ("user", "v")]);
    assert_eq!(repairs, [Repair::SystemMessagesJoined { count: 1 }]);
    let (turns, _) = read(json!({"turns": ["a", "b", "c"]})).unwrap();
    assert_eq!(turns.prompts().answers, [1, 2, 3]);
}

#[test]
fn tool_replies_to_calls_in_the_text_of_an_answer_are_kept_as_they_are() {
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    let row = |answer: &str| {
        json!({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "u"}, {"from": "gpt", "value": answer},
            {"from": "tool", "value": "<tool_response>1</tool_response>"}, {"from": "tool", "value": "2"}, {"from": "gpt", "value": "a"}]})
    };
    let (hermes, repairs) = read(row(call)).unwrap();
    assert!(repairs.is_empty());
    assert_eq!(
        turns(&hermes)[2..],
        [(ASSISTANT, call), (Role::Tool, "<tool_response>1</tool_response>"), (Role::Tool, "2"), (ASSISTANT, "a")]
    );
    assert_eq!(hermes.answered().unwrap().messages.len(), 6);
    assert_eq!(hermes.prompts().messages.len(), 2);
    // Thinking before the call, several calls, another family's mark.
    for answer in [&format!("<think>hm</think>{call}{call}"), "[TOOL_CALLS] [{\"name\": \"f\"}]"] {
        assert_eq!(read(row(answer)).unwrap().0.messages.len(), 6, "{answer}");
    }
    // Without a call there is nothing to reply to, nor after the next question.
    assert!(read(row("no call")).unwrap_err().to_string().contains("answers no open call"));
    let late = json!({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": call},
        {"role": "user", "content": "v"}, {"role": "tool", "content": "r"}]});
    assert!(read(late).unwrap_err().to_string().contains("answers no open call"));
}

#[test]
fn what_no_stage_renders_is_refused_and_old_tool_lists_are_read() {
    let row =
        |key: &str, value: serde_json::Value| read(json!({"messages": [{"role": "user", "content": "u"}], key: value}));
    for (key, value) in [
        ("documents", json!([{"title": "t", "text": "x"}])),
        ("chat_template_kwargs", json!({"enable_thinking": true})),
        ("body", json!({"messages": [], "documents": [1]})),
    ] {
        let reason = row(key, value).unwrap_err();
        assert_eq!(reason.kind(), "field not rendered", "{reason}");
    }
    for nothing in [json!(null), json!([]), json!({})] {
        assert!(row("documents", nothing).is_ok());
    }
    // A column of that name beside a plain prompt is no part of a request.
    assert!(read(json!({"prompt": "u", "documents": ["x"]})).is_ok());
    let (conversation, repairs) = row("functions", json!([{"name": "f"}])).unwrap();
    assert_eq!(conversation.tools, Some(json!([{"type": "function", "function": {"name": "f"}}])));
    assert_eq!(repairs, [Repair::LegacyFunctions]);
}
