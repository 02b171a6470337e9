//! The real vocabulary of SmolLM2-135M-Instruct against recorded ids. Skipped without its GGUF file.

use deepspec_datasets::chat_template::ChatTemplate;
use deepspec_datasets::renderer::{LossOn, Renderer};
use deepspec_datasets::tokenizer::Tokenizer;
use serde_json::Value;

use crate::templates::{assistant, user};
use crate::{environment, gguf};

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

#[test]
fn smollm2_ids_are_the_recorded_ones() {
    let Some(path) = environment::path("DEEPSPEC_SMOLLM2_GGUF") else { return };
    let tokenizer = Tokenizer::from_gguf_parts(gguf::read(&path).0).unwrap();
    assert_eq!(tokenizer.vocab_size(), 49152);
    let cases: Vec<Value> = serde_json::from_str(include_str!("../golden/tokens.json")).unwrap();
    assert!(cases.len() > 100);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let expected = ids(&case["ids"]);
        assert_eq!(tokenizer.encode_with_specials(text).unwrap(), expected, "{text:?}");
        assert_eq!(tokenizer.decode(&expected, false), text);
    }
}

#[test]
fn smollm2_prompts_are_the_recorded_ones() {
    let (Some(path), Some(shared)) = (environment::path("DEEPSPEC_SMOLLM2_GGUF"), environment::path("DEEPSPEC_SHARED"))
    else {
        return;
    };
    let (vocabulary, template) = gguf::read(&path);
    let template = ChatTemplate::new(&template, "<|im_start|>", "<|im_end|>").unwrap();
    let renderer = Renderer::new(template, Tokenizer::from_gguf_parts(vocabulary).unwrap(), &[0, 2]).unwrap();
    assert_eq!(renderer.end_of_turn(), 2);
    let golden = fs_err::read_to_string(shared.join("golden/smollm2/greedy.json")).unwrap();
    let golden: Value = serde_json::from_str(&golden).unwrap();
    for case in golden["cases"].as_array().unwrap() {
        let question = user(case["user"].as_str().unwrap());
        let prompt = renderer.render_prompt(std::slice::from_ref(&question), None).unwrap();
        assert_eq!(prompt, ids(&case["ids"]));
        let chat = [question, assistant("Forty two.")];
        let rendered = renderer.render_conversation(&chat, None, LossOn::All).unwrap();
        assert_eq!(rendered.ids[..prompt.len()], prompt);
        let span = rendered.spans[0].tokens.clone();
        assert_eq!(renderer.tokenizer().decode(&rendered.ids[span], false), "Forty two.<|im_end|>");
    }
}
