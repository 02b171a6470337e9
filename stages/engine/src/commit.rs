//! The one function that commits tokens and ends sequences.

use super::sequence::{FinishReason, Sequence};

/// Commits tokens in order until the sequence ends: after a stop token, when a stop text is complete, or when the budget is
/// used up, in this order. Returns how many were committed and why the sequence ended, if it did; nothing after the end is
/// kept or counted.
pub(super) fn commit(sequence: &mut Sequence, tokens: &[u32]) -> (usize, Option<FinishReason>) {
    for (i, &token) in tokens.iter().enumerate() {
        sequence.tokens.push(token);
        if sequence.request.stop_ids.contains(&token) {
            return (i + 1, Some(FinishReason::Stop));
        }
        if let Some(history) = &mut sequence.history {
            history.push(token);
        }
        sequence.stop_text = sequence.text.as_mut().and_then(|text| text.push(token));
        if sequence.stop_text.is_some() {
            return (i + 1, Some(FinishReason::Stop));
        }
        if sequence.remaining() == 0 {
            return (i + 1, Some(FinishReason::Length));
        }
    }
    (tokens.len(), None)
}

#[cfg(test)]
mod tests {
    use deepspec_models::speculate::SamplingParams;

    use super::super::sequence::{Request, RequestOptions};
    use super::*;

    fn run(budget: usize, tokens: &[u32]) -> (Vec<u32>, Option<FinishReason>) {
        let request = Request {
            id: 0,
            prompt: vec![1, 2],
            sampling: SamplingParams::greedy(),
            seed: 0,
            max_new_tokens: budget,
            stop_ids: vec![99].into(),
            confidence_threshold: 0.0,
            options: RequestOptions::default(),
        };
        let mut sequence = Sequence::new(request, 0);
        let (count, reason) = commit(&mut sequence, tokens);
        assert_eq!(sequence.generated(), count);
        (sequence.tokens[2..].to_vec(), reason)
    }

    #[test]
    fn ends_inside_an_accepted_block() {
        let block = [10, 11, 99, 20, 21, 22];
        // The stop token wins over a budget that would end later in the same block.
        assert_eq!(run(5, &block), (vec![10, 11, 99], Some(FinishReason::Stop)));
        assert_eq!(run(2, &block), (vec![10, 11], Some(FinishReason::Length)));
        assert_eq!(run(3, &block), (vec![10, 11, 99], Some(FinishReason::Stop)));
        assert_eq!(run(9, &block[..2]), (vec![10, 11], None));
        assert_eq!(run(9, &[]), (vec![], None));
    }
}
