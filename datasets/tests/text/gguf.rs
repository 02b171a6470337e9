//! Just enough of GGUF to read the tokenizer lists of a trusted file in a test.

use std::collections::HashMap;
use std::io::{BufReader, Read};
use std::path::Path;

use deepspec_datasets::tokenizer::GgufVocabulary;

#[derive(Clone, Debug)]
enum Field {
    Number(i64),
    Text(String),
    List(Vec<Field>),
}

struct Reader(BufReader<fs_err::File>);

impl Reader {
    fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn text(&mut self) -> String {
        let length = u64::from_le_bytes(self.bytes()) as usize;
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    fn field(&mut self, kind: u32) -> Field {
        match kind {
            0 | 7 => Field::Number(self.bytes::<1>()[0].into()),
            1 => Field::Number(i8::from_le_bytes(self.bytes()).into()),
            2 => Field::Number(u16::from_le_bytes(self.bytes()).into()),
            3 => Field::Number(i16::from_le_bytes(self.bytes()).into()),
            4 => Field::Number(u32::from_le_bytes(self.bytes()).into()),
            5 => Field::Number(i32::from_le_bytes(self.bytes()).into()),
            6 => Field::Number(f32::from_le_bytes(self.bytes()) as i64),
            8 => Field::Text(self.text()),
            9 => {
                let kind = u32::from_le_bytes(self.bytes());
                let length = u64::from_le_bytes(self.bytes());
                Field::List((0..length).map(|_| self.field(kind)).collect())
            }
            10 | 11 => Field::Number(i64::from_le_bytes(self.bytes())),
            12 => Field::Number(f64::from_le_bytes(self.bytes()) as i64),
            other => panic!("unknown GGUF field type {other}"),
        }
    }
}

/// The vocabulary and the chat template.
pub(crate) fn read(path: &Path) -> (GgufVocabulary, String) {
    let mut reader = Reader(BufReader::new(fs_err::File::open(path).unwrap()));
    assert_eq!(&reader.bytes::<4>(), b"GGUF");
    reader.bytes::<12>();
    let count = u64::from_le_bytes(reader.bytes());
    let mut fields = HashMap::new();
    for _ in 0..count {
        let key = reader.text();
        let kind = u32::from_le_bytes(reader.bytes());
        let field = reader.field(kind);
        fields.insert(key, field);
    }
    let text = |key: &str| match &fields[key] {
        Field::Text(text) => text.clone(),
        other => panic!("{key} is {other:?}"),
    };
    let list = |key: &str| match &fields[key] {
        Field::List(list) => list.clone(),
        other => panic!("{key} is {other:?}"),
    };
    let texts = |key: &str| {
        let text = |field| if let Field::Text(text) = field { text } else { panic!("{key} holds {field:?}") };
        list(key).into_iter().map(text).collect()
    };
    let number = |field| if let Field::Number(number) = field { number as i32 } else { panic!("found {field:?}") };
    let vocabulary = GgufVocabulary {
        model: text("tokenizer.ggml.model"),
        pre: text("tokenizer.ggml.pre"),
        tokens: texts("tokenizer.ggml.tokens"),
        token_types: list("tokenizer.ggml.token_type").into_iter().map(number).collect(),
        merges: texts("tokenizer.ggml.merges"),
        add_bos: false,
    };
    (vocabulary, text("tokenizer.chat_template"))
}
