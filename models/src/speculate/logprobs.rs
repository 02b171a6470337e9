//! Log probabilities that the target gives to a token and to the likeliest ones, as the API reports them.
//!
//! They are those of the model itself: temperature 1, no filters, no biases and penalties.

use deepspec_kernels::logit_row;

use super::distribution::{argmax_first, sum};
use super::error::SpeculateError;

/// Log probabilities at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token that was written.
    pub token: u32,
    /// Its natural log probability.
    pub logprob: f32,
    /// The likeliest tokens with theirs, the likeliest first, equal ones in the order of their ids.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Of `token` and of the `top` likeliest ones under a row of logits.
    ///
    /// # Shapes
    /// `logits`: `[vocab]`.
    ///
    /// # Errors
    /// A row without a distribution, or a token outside it.
    pub fn new(logits: &[f32], token: u32, top: usize) -> Result<Self, SpeculateError> {
        let maximum = logits[argmax_first(logits)? as usize];
        let normaliser = f64::from(maximum) + sum(&logit_row::powers(logits, maximum, 1.0)).ln();
        let logprob = |token: u32| (f64::from(logits[token as usize]) - normaliser) as f32;
        if token as usize >= logits.len() {
            return Err(SpeculateError::UnknownToken { token, position: 0, vocab_size: logits.len() });
        }
        let likelier = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let top = top.min(logits.len());
        let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
        if (1..tokens.len()).contains(&top) {
            tokens.select_nth_unstable_by(top - 1, likelier);
        }
        tokens.truncate(top);
        tokens.sort_unstable_by(likelier);
        let top = tokens.into_iter().map(|token| (token, logprob(token))).collect();
        Ok(Self { token, logprob: logprob(token), top })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_of_known_probabilities() {
        let logits = [0.4_f32, 0.1, 0.1, 0.4].map(|p| p.ln() + 3.0);
        let found = TokenLogprobs::new(&logits, 1, 3).unwrap();
        assert!((found.logprob - 0.1_f32.ln()).abs() < 1e-6);
        let tokens: Vec<u32> = found.top.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [0, 3, 1]);
        assert!((found.top[1].1 - 0.4_f32.ln()).abs() < 1e-6);
        assert!(TokenLogprobs::new(&logits, 4, 0).is_err());
        assert!(TokenLogprobs::new(&[f32::NAN], 0, 0).is_err());
        assert_eq!(TokenLogprobs::new(&logits, 0, 9).unwrap().top.len(), 4);
        assert!(TokenLogprobs::new(&logits, 0, 0).unwrap().top.is_empty());
    }
}
