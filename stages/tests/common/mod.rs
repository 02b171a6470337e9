//! What the tests of several stages share: a tokenizer of bytes for the tiny target.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use deepspec_datasets::chat_template::ChatTemplate;
use deepspec_datasets::renderer::Renderer;
use deepspec_datasets::tokenizer::{GgufVocabulary, Tokenizer};

/// Bytes as tokens 0 to 255, then control tokens; `end` is the template's end-of-text token.
pub(crate) fn byte_renderer(template: &str, controls: &[&str], end: &str, stop_ids: &[u32]) -> Renderer {
    let printable: Vec<u32> = (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff).collect();
    let mut free = 0x100..;
    let character = |byte: u32| if printable.contains(&byte) { byte } else { free.next().unwrap() };
    let mut tokens: Vec<String> = (0..=255).map(character).map(|c| char::from_u32(c).unwrap().to_string()).collect();
    let mut token_types = vec![1; tokens.len()];
    tokens.extend(controls.iter().map(|control| (*control).to_owned()));
    token_types.resize(tokens.len(), 3);
    let vocabulary = GgufVocabulary {
        model: "gpt2".into(),
        pre: "gpt-2".into(),
        tokens,
        token_types,
        merges: Vec::new(),
        add_bos: false,
    };
    let template = ChatTemplate::new(template, "", end).unwrap();
    Renderer::new(template, Tokenizer::from_gguf_parts(vocabulary).unwrap(), stop_ids).unwrap()
}
