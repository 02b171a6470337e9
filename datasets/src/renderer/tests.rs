//! How much work a long conversation costs, counted in renderings and in messages rendered.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::{Limits, LossOn, Renderer};
use crate::Error;
use crate::chat_template::{ChatTemplate, WORK};
use crate::conversation::{Message, Role};
use crate::tokenizer::{GgufVocabulary, Tokenizer};

const CHATML: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n\
                      {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// Prints answers without the think block that their prompts give, as Qwen3's does.
const THINKING: &str = "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if loop.last and message.role == \
                        'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}";

/// Bytes as tokens, and the two control tokens of the templates.
fn renderer(template: &str) -> Renderer {
    let printable: Vec<u32> = (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff).collect();
    let mut free = 0x100..;
    let character = |byte: u32| if printable.contains(&byte) { byte } else { free.next().unwrap() };
    let mut tokens: Vec<String> = (0..=255).map(character).map(|c| char::from_u32(c).unwrap().to_string()).collect();
    let mut token_types = vec![1; tokens.len()];
    tokens.extend(["<|im_start|>".to_owned(), "<|im_end|>".to_owned()]);
    token_types.resize(tokens.len(), 3);
    let (model, pre) = ("gpt2".to_owned(), "gpt-2".to_owned());
    let vocabulary = GgufVocabulary { model, pre, tokens, token_types, ..GgufVocabulary::default() };
    let template = ChatTemplate::new(template, "", "").unwrap();
    Renderer::new(template, Tokenizer::from_gguf_parts(vocabulary).unwrap(), &[]).unwrap()
}

/// A conversation of so many user turns, each with an answer, about 100 bytes a message.
fn chat(turns: usize) -> Vec<Message> {
    let text = |turn: usize| format!("{turn:06} {}", "words of no weight ".repeat(5));
    let pair = |turn| [Message::new(Role::User, text(turn)), Message::new(Role::Assistant, text(turn))];
    (0..turns).flat_map(pair).collect()
}

/// Renderings and rendered messages of a call.
fn work<T>(call: impl FnOnce() -> T) -> ((usize, usize), T) {
    WORK.with(|work| work.set((0, 0)));
    let done = call();
    (WORK.with(Cell::get), done)
}

fn within(tokens: usize) -> Limits<'static> {
    Limits { tokens, ..Limits::NONE }
}

#[test]
fn a_conversation_far_longer_than_the_limit_is_rendered_about_once() {
    for template in [CHATML, THINKING] {
        let renderer = renderer(template);
        let mut extra = Vec::new();
        for turns in [100, 200, 400, 800] {
            let messages = chat(turns);
            let ((renderings, rendered), result) =
                work(|| renderer.render_conversation_within(&messages, None, LossOn::All, within(2048)).unwrap());
            assert!(result.ids.len() > 2048 && result.ids.len() < 2500);
            // The whole, the last answer's prompt, and beginnings for the few answers up to the limit.
            assert!(renderings < 40, "{turns} turns: {renderings} renderings");
            extra.push(rendered - 4 * turns);
        }
        assert!(
            extra.iter().all(|work| *work == extra[0]),
            "beginnings cost the same however long the row is: {extra:?}"
        );
    }
}

#[test]
fn up_to_the_limit_tokens_and_mask_are_those_of_the_whole() {
    for template in [CHATML, THINKING] {
        let renderer = renderer(template);
        let messages = chat(30);
        for loss_on in [LossOn::All, LossOn::Last] {
            let whole = renderer.render_conversation(&messages, None, loss_on).unwrap();
            for tokens in [1, 100, 1000, 3333, whole.ids.len() - 1, whole.ids.len(), whole.ids.len() + 1, 1 << 20] {
                let cut = renderer.render_conversation_within(&messages, None, loss_on, within(tokens)).unwrap();
                let kept = tokens.min(whole.ids.len());
                assert!(cut.ids.len() > tokens || cut.ids.len() == whole.ids.len());
                assert_eq!(cut.ids[..kept], whole.ids[..kept], "{tokens}");
                assert_eq!(cut.loss_mask[..kept], whole.loss_mask[..kept], "{tokens}");
            }
        }
    }
}

#[test]
fn a_stop_is_heard_inside_a_row() {
    let renderer = renderer(CHATML);
    let asked = Cell::new(0);
    let is_stopped = || {
        asked.set(asked.get() + 1);
        asked.get() > 3
    };
    let limits = Limits { tokens: usize::MAX, is_stopped: &is_stopped };
    let error = renderer.render_conversation_within(&chat(50), None, LossOn::All, limits).unwrap_err();
    assert!(matches!(error, Error::Stopped), "{error}");
    assert_eq!(asked.get(), 4);
}

/// Generous, for machines that do other things too: it takes a fraction of a second.
#[test]
fn a_quarter_of_a_megabyte_in_one_row_takes_no_time_to_speak_of() {
    let renderer = renderer(CHATML);
    let messages = chat(1200);
    assert!(messages.iter().map(|message| message.content.len()).sum::<usize>() > 240_000);
    let begun = Instant::now();
    renderer.render_conversation_within(&messages, None, LossOn::All, within(4096)).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}
