//! Decodes tokens as they come, without ever showing half a character.

use super::{REPLACEMENT, Tokenizer};

/// Turns a stream of token ids into pieces of text. The pieces joined equal [`Tokenizer::decode`] of all ids.
#[derive(Clone, Debug)]
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The start of a character whose other bytes have not come yet.
    pending: Vec<u8>,
}

impl StreamDecoder {
    pub(super) fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        StreamDecoder { tokenizer, skip_special, pending: Vec::new() }
    }

    /// Takes one id and returns the text that is now certain; often empty within a character of several tokens.
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special && self.tokenizer.is_special(id) {
            return String::new();
        }
        self.pending.extend_from_slice(self.tokenizer.token_bytes(id).unwrap_or(REPLACEMENT));
        let mut text = String::new();
        let mut certain = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            certain += chunk.valid().len();
            let rest = &self.pending[certain..];
            if chunk.invalid().len() == rest.len() && is_start_of_character(rest) {
                break;
            }
            if !chunk.invalid().is_empty() {
                text.push('\u{fffd}');
                certain += chunk.invalid().len();
            }
        }
        self.pending.drain(..certain);
        text
    }

    /// Ends the stream: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

/// Whether more bytes could make the bytes a character.
fn is_start_of_character(bytes: &[u8]) -> bool {
    !bytes.is_empty() && str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
