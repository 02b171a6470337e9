//! The text of a sequence as it grows: whole characters only, stop texts never shown, not even in part, a model's reasoning
//! apart from its answer.

use std::sync::Arc;

use deepspec_datasets::tokenizer::{StreamDecoder, Tokenizer};

/// That a request wants text, and which texts end it.
#[derive(Debug, Clone)]
pub struct TextOptions {
    /// Decodes the tokens. Control tokens and the token that ends the sequence have no text.
    pub tokenizer: Tokenizer,
    /// Texts that end the sequence; they and what follows are not part of its text. None is empty.
    pub stop: Arc<[String]>,
    /// Set where the reasoning is to be kept apart.
    pub reasoning: Option<Reasoning>,
}

/// Tokens around a model's reasoning, such as `<think>` and `</think>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReasoningMarks {
    /// Begins it, as the first token of an answer or at the end of the prompt.
    pub open: u32,
    /// Ends it.
    pub close: u32,
}

/// How an answer with reasoning begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reasoning {
    /// What surrounds it.
    pub marks: ReasoningMarks,
    /// Whether the prompt has opened it.
    pub is_open: bool,
}

/// Text that has become certain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Piece {
    /// Of the reasoning, without the marks and the line breaks beside them.
    pub reasoning: String,
    /// Of the answer.
    pub text: String,
}

/// Where in the output the next token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Section {
    /// Before the first token, which alone may open the reasoning.
    Start,
    Reasoning,
    Answer,
}

/// Decodes committed tokens and watches for stop texts.
#[derive(Debug)]
pub(super) struct TextState {
    decoder: StreamDecoder,
    stop: Arc<[String]>,
    /// Text that may turn out to be the start of a stop text.
    held: String,
    marks: Option<ReasoningMarks>,
    section: Section,
    /// Whether a mark stands before what comes next: line breaks between the two belong to the template.
    follows_mark: bool,
    /// Line breaks at the end of the reasoning, which belong to the template if the mark comes next.
    breaks: String,
    /// Text that may be shown.
    ready: Piece,
}

impl TextState {
    pub(super) fn new(options: &TextOptions) -> Self {
        let is_open = options.reasoning.is_some_and(|reasoning| reasoning.is_open);
        Self {
            decoder: options.tokenizer.stream_decoder(true),
            stop: options.stop.clone(),
            held: String::new(),
            marks: options.reasoning.map(|reasoning| reasoning.marks),
            section: if is_open { Section::Reasoning } else { Section::Start },
            follows_mark: is_open,
            breaks: String::new(),
            ready: Piece::default(),
        }
    }

    /// Takes a committed token; the stop text that it completes, if it does. The one that starts first counts, the first
    /// of the list where several do. No stop text goes on over a mark of the reasoning.
    pub(super) fn push(&mut self, token: u32) -> Option<String> {
        if self.passes_mark(token) {
            return None;
        }
        self.held.push_str(&self.decoder.push(token));
        let found = self.stop.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        if let Some((at, stop)) = found.min_by_key(|(at, _)| *at) {
            let stop = stop.clone();
            self.held.truncate(at);
            self.release(at);
            return Some(stop);
        }
        let could_stop = |rest: &str| self.stop.iter().any(|stop| stop.starts_with(rest));
        let starts = self.held.char_indices().map(|(at, _)| at);
        let certain = starts.into_iter().find(|&at| could_stop(&self.held[at..])).unwrap_or(self.held.len());
        self.release(certain);
        None
    }

    /// Text that has become certain since the last call.
    pub(super) fn take(&mut self) -> Piece {
        std::mem::take(&mut self.ready)
    }

    /// Ends the text: what was held back was no stop text. The start of a character that never became whole is left out.
    pub(super) fn finish(&mut self) -> Piece {
        self.release(self.held.len());
        self.take()
    }

    /// Goes on to the next section where the token is the mark that begins it.
    fn passes_mark(&mut self, token: u32) -> bool {
        let Some(marks) = self.marks else { return false };
        let next = match self.section {
            Section::Start if token == marks.open => Section::Reasoning,
            Section::Reasoning if token == marks.close => Section::Answer,
            Section::Start => {
                self.section = Section::Answer;
                return false;
            }
            Section::Reasoning | Section::Answer => return false,
        };
        self.release(self.held.len());
        self.decoder.finish();
        self.breaks.clear();
        (self.section, self.follows_mark) = (next, true);
        true
    }

    /// Lets the first bytes of what is held be shown.
    fn release(&mut self, bytes: usize) {
        let released: String = self.held.drain(..bytes).collect();
        let text = if self.follows_mark { released.trim_start_matches('\n') } else { &released };
        if text.is_empty() {
            return;
        }
        self.follows_mark = false;
        if self.section != Section::Reasoning {
            self.ready.text.push_str(text);
            return;
        }
        let certain = text.trim_end_matches('\n');
        if !certain.is_empty() {
            self.ready.reasoning.push_str(&std::mem::take(&mut self.breaks));
            self.ready.reasoning.push_str(certain);
        }
        self.breaks.push_str(&text[certain.len()..]);
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
        let mut state = TextState::new(&TextOptions { tokenizer: tokenizer(), stop: stop.into(), reasoning: None });
        let mut pieces = Vec::new();
        for (i, byte) in text.bytes().enumerate() {
            let met = state.push(u32::from(byte));
            pieces.push(state.take().text);
            if met.is_some() {
                assert_eq!(state.finish(), Piece::default());
                return (pieces, met, i + 1);
            }
        }
        pieces.push(state.finish().text);
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

    /// An emoji of several tokens at the end, and a budget that ends inside one.
    #[test]
    fn characters_stay_whole() {
        let text = "né 日本 👍🏽e\u{301}";
        let (pieces, ..) = run(text, &["👍!"]);
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')));
        // Cut inside an emoji: what was whole stays.
        let options = TextOptions { tokenizer: tokenizer(), stop: Arc::new([]), reasoning: None };
        let mut state = TextState::new(&options);
        for byte in &"a👍".as_bytes()[..4] {
            assert!(state.push(u32::from(*byte)).is_none());
        }
        assert_eq!(state.finish().text, "a");
    }

    const MARKS: ReasoningMarks = ReasoningMarks { open: 1, close: 2 };

    /// Reasoning and answer of an output of bytes in which 1 and 2 are the marks, taken after every `size` tokens.
    fn split(output: &str, is_open: bool, size: usize, stop: &[&str]) -> (Piece, Vec<Piece>) {
        let stop: Vec<String> = stop.iter().map(|&s| s.into()).collect();
        let reasoning = Some(Reasoning { marks: MARKS, is_open });
        let mut state = TextState::new(&TextOptions { tokenizer: tokenizer(), stop: stop.into(), reasoning });
        let mut pieces = Vec::new();
        'steps: for step in output.as_bytes().chunks(size) {
            for &byte in step {
                if state.push(u32::from(byte)).is_some() {
                    break 'steps;
                }
            }
            pieces.push(state.take());
        }
        pieces.push(state.finish());
        let joined = |part: fn(&Piece) -> &str| pieces.iter().map(part).collect::<String>();
        (Piece { reasoning: joined(|piece| &piece.reasoning), text: joined(|piece| &piece.text) }, pieces)
    }

    fn piece(reasoning: &str, text: &str) -> Piece {
        Piece { reasoning: reasoning.into(), text: text.into() }
    }

    /// One step holds the end of the reasoning, the mark and the start of the answer.
    #[test]
    fn reasoning_and_answer_are_both_whole() {
        let outputs = [
            ("reason\u{2}answer", true),
            ("\u{1}reason\u{2}answer", false),
            ("\u{1}\n\nreason\n\n\u{2}\n\nanswer", false),
        ];
        for (output, is_open) in outputs {
            for size in [1, 3, 4, 5, 6, 100] {
                assert_eq!(split(output, is_open, size, &[]).0, piece("reason", "answer"), "{output:?} by {size}");
            }
        }
        // In one step, both parts come at once.
        assert_eq!(split("reason\u{2}answer", true, 100, &[]).1[0], piece("reason", "answer"));
        assert_eq!(split("a\n\nb\n\u{2}c\n\n", true, 2, &[]).0, piece("a\n\nb", "c\n\n"), "breaks inside stay");
    }

    #[test]
    fn marks_elsewhere_are_text() {
        assert_eq!(split("\nx\u{1}y\u{2}", false, 3, &[]).0, piece("", "\nx\u{1}y\u{2}"), "no reasoning");
        assert_eq!(
            split("\u{1}a\u{1}b\u{2}c\u{2}d", false, 3, &[]).0,
            piece("a\u{1}b", "c\u{2}d"),
            "one of each counts"
        );
        assert_eq!(split("cut off\n", true, 3, &[]).0, piece("cut off", ""), "the budget ended first");
        assert_eq!(split("\u{1}\u{2}a", false, 1, &[]).0, piece("", "a"));
        // Half a character before a mark is left out.
        let options = TextOptions {
            tokenizer: tokenizer(),
            stop: Arc::new([]),
            reasoning: Some(Reasoning { marks: MARKS, is_open: true }),
        };
        let mut state = TextState::new(&options);
        for token in [0x61, 0xf0, 0x9f, MARKS.close, 0x62] {
            assert!(state.push(token).is_none());
        }
        assert_eq!(state.finish(), piece("a", "b"));
    }

    #[test]
    fn stop_texts_end_the_reasoning_too() {
        assert_eq!(split("ab\u{2}cdef", true, 3, &["de"]).0, piece("ab", "c"));
        assert_eq!(split("ab.cd\u{2}e", true, 3, &[".c"]).0, piece("ab", ""));
        assert_eq!(split("a.\u{2}.b", true, 3, &[".."]).0, piece("a.", ".b"), "none goes on over a mark");
    }
}
