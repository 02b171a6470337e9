//! Files in other forms than JSON lines: JSON over several lines is read, other formats are named with the way out.

use deepspec_datasets::Error;
use deepspec_datasets::jsonl::{ConversationFile, Row};

/// Line and first text, or the reason, of each row.
fn rows(text: &str) -> Vec<(u64, String)> {
    let file = ConversationFile::from_bytes(text, "rows.json").unwrap();
    file.map(|row| match row.unwrap() {
        Row::Conversation(conversation, _) => (conversation.line, conversation.messages[0].content.clone()),
        Row::Reject(reject) => (reject.line, reject.reason.to_string()),
    })
    .collect()
}

fn refused(text: &str) -> Error {
    ConversationFile::from_bytes(text, "rows.jsonl").unwrap_err()
}

#[test]
fn objects_over_several_lines_are_read() {
    let one = "{\n  \"messages\": [\n    {\"role\": \"user\", \"content\": \"a } {\"}\n  ]\n}\n";
    assert_eq!(rows(one), [(1, "a } {".to_owned())]);
    let two = format!("\n{one}\n{{\n\"prompt\":\n\"b\"}}{{\"prompt\": 7}}");
    let found = rows(&two);
    assert_eq!(found[..2], [(2, "a } {".to_owned()), (8, "b".to_owned())]);
    assert!(found[2].0 == 10 && found[2].1.contains("expected text"), "{found:?}");
    let array = "[\n  {\n    \"prompt\": \"a\"\n  },\n  {\n    \"prompt\": \"b\"\n  }\n]\n";
    assert_eq!(rows(array), [(2, "a".to_owned()), (5, "b".to_owned())]);
    assert_eq!(rows("\u{feff}{\r\n \"prompt\": \"a\"\r\n}\r\n"), [(1, "a".to_owned())]);
}

#[test]
fn a_torn_first_line_is_one_reject_and_the_other_lines_are_read() {
    for torn in ["{\"prompt\": \"a", "{\"prompt\": ", "{\"prompt\": \"a\","] {
        let found = rows(&format!("{torn}\n{{\"prompt\": \"b\"}}\n{{\"prompt\": \"c\"}}\n"));
        assert!(found[0].1.contains("not JSON"), "{torn}: {found:?}");
        assert_eq!(found[1..], [(2, "b".to_owned()), (3, "c".to_owned())], "{torn}");
    }
}

#[test]
fn tables_are_named_with_the_way_to_json_lines() {
    for (text, format, part) in [
        ("prompt,response\nHi,Hello\n", "comma-separated", "csv.DictReader(sys.stdin)"),
        (
            "\u{feff}\"id\",\"instruction\",\"output\"\r\n1,\"a, b\",c\r\n",
            "comma-separated",
            "csv.DictReader(sys.stdin)",
        ),
        ("prompt\nHi\n", "comma-separated", "csv.DictReader(sys.stdin)"),
        ("question\tanswer\nHi\tHello\n", "tab-separated", "delimiter=\"\\t\""),
        ("Question;Answer\nHi;Hello\n", "semicolon-separated", "delimiter=\";\""),
    ] {
        let error = refused(text);
        assert!(error.to_string().contains(format), "{error}");
        assert!(error.hint().unwrap().contains(part), "{:?}", error.hint());
    }
    // Plain text, one prompt a line, is no table: rows are refused, with the way out.
    assert!(rows("Write a prompt, please\nAnd another\n").iter().all(|(_, reason)| reason.contains("not JSON")));
}

#[test]
fn literals_of_python_are_named_with_the_way_to_json_lines() {
    for text in [
        "{'prompt': 'Hi', 'system': None}\n{'prompt': 'b'}\n",
        "[{'prompt': 'Hi'}, {'prompt': 'b'}]\n",
        "{\"prompt\": \"Hi\", \"system\": None}\n",
        "[\n {\"prompt\": \"Hi\", \"flag\": True}\n]\n",
    ] {
        let error = refused(text);
        assert!(error.to_string().contains("Python literals"), "{text}: {error}");
        assert!(error.hint().unwrap().contains("ast.literal_eval"), "{text}");
    }
    // Among rows of JSON one is a reject that says so.
    let file = ConversationFile::from_bytes("{\"prompt\": \"a\"}\n{'prompt': 'b'}\n", "x").unwrap();
    let Some(Ok(Row::Reject(reject))) = file.last() else { panic!("the second row is refused") };
    assert!(reject.reason.to_string().contains("a literal of Python"), "{}", reject.reason);
    assert!(reject.reason.hint().contains("ast.literal_eval"));
}

#[test]
fn text_that_looks_like_another_format_inside_json_is_text() {
    let text = "{\"prompt\": \"{'a': None}, prompt,response\"}\n";
    assert_eq!(rows(text), [(1, "{'a': None}, prompt,response".to_owned())]);
}
