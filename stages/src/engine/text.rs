//! The text of a sequence as it grows: whole characters only, stop texts never shown, not even in part.

use std::sync::Arc;

use deepspec_datasets::tokenizer::{StreamDecoder, Tokenizer};

/// That a request wants text, and which texts end it.
#[derive(Debug, Clone)]
pub struct TextOptions {
    /// Decodes the tokens. Control tokens and the token that ends the sequence have no text.
    pub tokenizer: Tokenizer,
    /// Texts that end the sequence; they and what follows are not part of its text. None is empty.
    pub stop: Arc<[String]>,
}

/// Decodes committed tokens and watches for stop texts.
#[derive(Debug)]
pub(super) struct TextState {
    decoder: StreamDecoder,
    stop: Arc<[String]>,
    /// Text that may turn out to be the start of a stop text.
    held: String,
    /// Text that may be shown.
    ready: String,
}

impl TextState {
    pub(super) fn new(options: &TextOptions) -> Self {
        let decoder = options.tokenizer.stream_decoder(true);
        Self { decoder, stop: options.stop.clone(), held: String::new(), ready: String::new() }
    }

    /// Takes a committed token; the stop text that it completes, if it does. The one that starts first counts, the first
    /// of the list where several do.
    pub(super) fn push(&mut self, token: u32) -> Option<String> {
        self.held.push_str(&self.decoder.push(token));
        let found = self.stop.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        if let Some((at, stop)) = found.min_by_key(|(at, _)| *at) {
            self.ready.push_str(&self.held[..at]);
            self.held.clear();
            return Some(stop.clone());
        }
        let could_stop = |rest: &str| self.stop.iter().any(|stop| stop.starts_with(rest));
        let starts = self.held.char_indices().map(|(at, _)| at);
        let certain = starts.into_iter().find(|&at| could_stop(&self.held[at..])).unwrap_or(self.held.len());
        self.ready.extend(self.held.drain(..certain));
        None
    }

    /// Text that has become certain since the last call.
    pub(super) fn take(&mut self) -> String {
        std::mem::take(&mut self.ready)
    }

    /// Ends the text: what was held back was no stop text. The start of a character that never became whole is left out.
    pub(super) fn finish(&mut self) -> String {
        self.ready.push_str(&self.held);
        self.held.clear();
        self.take()
    }
}

#[cfg(test)]
mod tests {
    use deepspec_datasets::tokenizer::GgufVocabulary;

    use super::*;

    /// Bytes as tokens.
    fn tokenizer() -> Tokenizer {
        let printable: Vec<u32> = (0x21..=0x7e).chain(0xa1..=0xac).chain(0xae..=0xff).collect();
        let mut free = 0x100..;
        let character = |byte: u32| if printable.contains(&byte) { byte } else { free.next().unwrap() };
        let tokens: Vec<String> = (0..=255).map(character).map(|c| char::from_u32(c).unwrap().to_string()).collect();
        Tokenizer::from_gguf_parts(GgufVocabulary {
            model: "gpt2".into(),
            pre: "gpt-2".into(),
            token_types: vec![1; tokens.len()],
            tokens,
            merges: Vec::new(),
            add_bos: false,
        })
        .unwrap()
    }

    /// Pieces shown, whether a stop text ended it, and the bytes read.
    fn run(text: &str, stop: &[&str]) -> (Vec<String>, Option<String>, usize) {
        let stop: Vec<String> = stop.iter().map(|&s| s.into()).collect();
        let mut state = TextState::new(&TextOptions { tokenizer: tokenizer(), stop: stop.into() });
        let mut pieces = Vec::new();
        for (i, byte) in text.bytes().enumerate() {
            let met = state.push(u32::from(byte));
            pieces.push(state.take());
            if met.is_some() {
                assert_eq!(state.finish(), "");
                return (pieces, met, i + 1);
            }
        }
        pieces.push(state.finish());
        (pieces, None, text.len())
    }

    #[test]
    fn stop_texts_are_held_back_and_cut() {
        let (pieces, met, read) = run("ab\n\nQ: x", &["\n\nQ", "zz"]);
        assert_eq!((pieces.concat().as_str(), met.as_deref(), read), ("ab", Some("\n\nQ"), 5));
        assert_eq!(pieces, ["a", "b", "", "", ""]);
        let (pieces, met, _) = run("aab\n\n!", &["\n\nQ", "aaab"]);
        assert_eq!((pieces.concat().as_str(), met), ("aab\n\n!", None));
        // A false start that overlaps the true one.
        let (pieces, met, _) = run("xaab", &["ab"]);
        assert_eq!((pieces.concat().as_str(), met.as_deref()), ("xa", Some("ab")));
        let (pieces, met, _) = run("abc", &["bc", "abc"]);
        assert_eq!((pieces.concat().as_str(), met.as_deref()), ("", Some("abc")));
        // What is held back at the end is shown.
        assert_eq!(run("end\n", &["\n\n"]).0.concat(), "end\n");
    }

    #[test]
    fn characters_stay_whole() {
        let text = "né 日本 👍🏽e\u{301}";
        let (pieces, ..) = run(text, &["👍!"]);
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')));
        // Cut inside an emoji: what was whole stays.
        let mut state = TextState::new(&TextOptions { tokenizer: tokenizer(), stop: Arc::new([]) });
        for byte in &"a👍".as_bytes()[..4] {
            assert!(state.push(u32::from(*byte)).is_none());
        }
        assert_eq!(state.finish(), "a");
    }
}
