//! What changes the target's logits before they become a distribution: biases, and penalties for tokens written before.
//!
//! Verification applies them row by row: row k sees the committed tokens and the k draft tokens accepted before it, which
//! is what plain decoding would see there. A drafter's logits are adjusted in the same way, which raises acceptance and changes
//! nothing else: acceptance divides by the distribution that a token was really drawn from.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::error::SpeculateError;

/// Biases and penalties of one request.
///
/// A logit z of a token that was generated c times becomes, in this order: z + bias; divided (if positive, else multiplied)
/// by `repetition_penalty` if the token is in the prompt or c > 0; minus c · `frequency_penalty`; minus `presence_penalty`
/// if c > 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Adjustments {
    /// Taken off once a token has been generated; negative values favour repeats.
    pub presence_penalty: f32,
    /// Taken off for each time that a token has been generated.
    pub frequency_penalty: f32,
    /// Weakens tokens of prompt and output; above 0, 1 changes nothing.
    pub repetition_penalty: f32,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for Adjustments {
    fn default() -> Self {
        Self { presence_penalty: 0.0, frequency_penalty: 0.0, repetition_penalty: 1.0, logit_bias: Vec::new() }
    }
}

impl Adjustments {
    /// Whether nothing is adjusted.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Checks every number.
    ///
    /// # Errors
    /// [`SpeculateError::Parameter`] names the first field outside its range, [`SpeculateError::UnknownToken`] a bias for a
    /// token outside the vocabulary.
    pub fn validate(&self, vocab_size: usize) -> Result<(), SpeculateError> {
        let refuse =
            |field, value: f32, expected| Err(SpeculateError::Parameter { field, value: f64::from(value), expected });
        if !self.presence_penalty.is_finite() {
            return refuse("presence_penalty", self.presence_penalty, "a finite number");
        }
        if !self.frequency_penalty.is_finite() {
            return refuse("frequency_penalty", self.frequency_penalty, "a finite number");
        }
        if !self.repetition_penalty.is_finite() || self.repetition_penalty <= 0.0 {
            return refuse("repetition_penalty", self.repetition_penalty, "a finite number above 0");
        }
        for (position, &(token, bias)) in self.logit_bias.iter().enumerate() {
            if !bias.is_finite() {
                return refuse("logit_bias", bias, "a finite number");
            }
            if token as usize >= vocab_size {
                return Err(SpeculateError::UnknownToken { token, position, vocab_size });
            }
        }
        Ok(())
    }

    /// Adjusts the logits of one row for the text so far.
    ///
    /// # Shapes
    /// `logits`: `[vocab]`; tokens outside it are ignored.
    pub fn apply(&self, logits: &mut [f32], history: &History) {
        self.apply_over(logits, history, |token| Some(token as usize));
    }

    /// [`apply`](Self::apply) to the logits of a part of the vocabulary, in which `position` says where a token stands.
    ///
    /// # Shapes
    /// `logits`: `[draft_vocab]`; tokens without a position, or outside it, are ignored.
    pub fn apply_over(&self, logits: &mut [f32], history: &History, position: impl Fn(u32) -> Option<usize>) {
        let len = logits.len();
        let place = |token: u32| position(token).filter(|&place| place < len);
        for &(token, bias) in &self.logit_bias {
            if let Some(place) = place(token) {
                logits[place] += bias;
            }
        }
        if self.repetition_penalty != 1.0 {
            let generated = history.generated.keys().filter(|token| !history.prompt.contains(token));
            for &token in history.prompt.iter().chain(generated) {
                if let Some(place) = place(token) {
                    let logit = &mut logits[place];
                    *logit =
                        if *logit > 0.0 { *logit / self.repetition_penalty } else { *logit * self.repetition_penalty };
                }
            }
        }
        for (&token, &count) in &history.generated {
            if let Some(place) = place(token) {
                logits[place] -= self.frequency_penalty * count as f32 + self.presence_penalty;
            }
        }
    }
}

/// The tokens of a text so far, as penalties see them.
#[derive(Debug, Clone, Default)]
pub struct History {
    prompt: Arc<HashSet<u32>>,
    generated: HashMap<u32, u32>,
}

impl History {
    /// Before the first generated token.
    pub fn new(prompt: &[u32]) -> Self {
        Self { prompt: Arc::new(prompt.iter().copied().collect()), generated: HashMap::new() }
    }

    /// Takes in a generated token.
    pub fn push(&mut self, token: u32) {
        *self.generated.entry(token).or_insert(0) += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_by_hand() {
        let adjustments = Adjustments {
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            repetition_penalty: 2.0,
            logit_bias: vec![(0, 1.0), (3, -100.0), (9, 5.0)],
        };
        let mut history = History::new(&[1, 9]);
        history.push(2);
        history.push(2);
        history.push(0);
        let mut logits = [1.0, -1.0, 4.0, 1.0, 0.5];
        adjustments.apply(&mut logits, &history);
        // 0: (1 + 1) / 2 − .25 − .5; 1: in the prompt only; 2: 4 / 2 − .5 − .5; 3: the bias; 4: untouched.
        assert_eq!(logits, [0.25, -2.0, 1.0, -99.0, 0.5]);
    }

    /// Three of the tokens, in the order of their ids: each is adjusted as in a row of all.
    #[test]
    fn a_part_of_the_vocabulary_is_adjusted_like_the_whole() {
        let adjustments = Adjustments {
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            repetition_penalty: 2.0,
            logit_bias: vec![(0, 1.0), (3, -100.0), (9, 5.0)],
        };
        let mut history = History::new(&[1, 4]);
        history.push(2);
        let mut whole = [1.0, -1.0, 4.0, 1.0, 0.5];
        adjustments.apply(&mut whole, &history);
        let tokens = [1, 2, 4];
        let mut part = [-1.0, 4.0, 0.5];
        adjustments.apply_over(&mut part, &history, |token| tokens.iter().position(|&other| other == token));
        assert_eq!(part, tokens.map(|token| whole[token as usize]));
    }

    #[test]
    fn nothing_is_changed_by_default() {
        let mut history = History::new(&[1]);
        history.push(1);
        let mut logits = [1.0, 2.0];
        Adjustments::default().apply(&mut logits, &history);
        assert_eq!(logits, [1.0, 2.0]);
        assert!(Adjustments::default().is_none());
    }

    #[test]
    fn values_outside_their_range_are_named() {
        let default = Adjustments::default;
        for (adjustments, field) in [
            (Adjustments { presence_penalty: f32::NAN, ..default() }, "presence_penalty"),
            (Adjustments { frequency_penalty: f32::INFINITY, ..default() }, "frequency_penalty"),
            (Adjustments { repetition_penalty: 0.0, ..default() }, "repetition_penalty"),
            (Adjustments { logit_bias: vec![(1, f32::NAN)], ..default() }, "logit_bias"),
        ] {
            assert!(adjustments.validate(10).unwrap_err().to_string().contains(field));
        }
        assert!(Adjustments { logit_bias: vec![(10, 1.0)], ..default() }.validate(10).is_err());
        assert!(Adjustments { logit_bias: vec![(9, 1.0)], ..default() }.validate(10).is_ok());
    }
}
