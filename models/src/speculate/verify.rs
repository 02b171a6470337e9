//! The accept-or-resample rule of speculative decoding, which keeps the target's distribution whatever the drafter proposes.
//!
//! Token k of a draft is accepted with probability min(1, p_t / p_d). At the first rejection one token is drawn from the
//! residual norm(max(0, p_t − p_d)); if all are accepted, a bonus token is drawn from the target's last row. Greedy decoding
//! is the same rule on one-hot distributions. The decoding engine calls it once per sequence and round.
//!
//! A draw depends on the seed, the purpose and the position of the token in its sequence. A position that is drafted again
//! in a later round meets the same draft draw, which is harmless: what was drafted after a rejection never reached the
//! output, so the draws at positions not yet committed are still independent of the committed text.

use super::distribution::{Distribution, sum};
use super::error::SpeculateError;
use super::rng::{CounterRng, Stream};

/// Smallest draft probability in the acceptance ratio.
pub const DRAFT_PROB_FLOOR: f64 = 1e-8;
/// Residuals of this mass or less are rounding noise: the target's distribution is used instead.
pub const RESIDUAL_MASS_FLOOR: f64 = 1e-8;

/// What one verification commits: the first `accepted` draft tokens, then `next_token`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Number of draft tokens accepted, a prefix of the block.
    pub accepted: usize,
    /// The token after the accepted ones, taken from the target.
    pub next_token: u32,
    /// Whether the whole block was accepted, so `next_token` is the bonus and not a correction.
    pub bonus: bool,
}

/// Probability to accept `token`: min(1, p_t / max(p_d, 1e-8)).
pub fn accept_probability(target: &Distribution, draft: &Distribution, token: u32) -> f64 {
    let ratio = f64::from(target.prob(token)) / f64::from(draft.prob(token)).max(DRAFT_PROB_FLOOR);
    ratio.min(1.0)
}

/// Distribution of the token that replaces a rejected one: norm(max(0, p_t − p_d)), or p_t (normalised) if that has a mass of
/// 1e-8 or less.
///
/// # Errors
/// [`SpeculateError::BlockShape`] when the two rows differ in vocabulary size, or the draft has a token that the target lacks.
pub fn residual(target: &Distribution, draft: &Distribution) -> Result<Distribution, SpeculateError> {
    let probs = match target {
        // Mass can only remain on the one token, and without any the target itself is the answer.
        Distribution::OneHot(token) => return Ok(Distribution::OneHot(*token)),
        Distribution::Subset { tokens, probs } => {
            let rest = probs.iter().zip(tokens.iter()).map(|(prob, &token)| (prob - draft.prob(token)).max(0.0));
            return Ok(Distribution::Subset { tokens: tokens.clone(), probs: normalised(rest.collect(), probs) });
        }
        Distribution::Dense(probs) => probs,
    };
    let vocabulary_differs = |found| SpeculateError::BlockShape {
        tokens: 1,
        what: "vocabulary of the draft row",
        found,
        expected: probs.len(),
    };
    let mut remaining = probs.clone();
    match draft {
        Distribution::OneHot(token) => {
            if let Some(prob) = remaining.get_mut(*token as usize) {
                *prob = (*prob - 1.0).max(0.0);
            }
        }
        Distribution::Dense(draft) if draft.len() == remaining.len() => {
            for (prob, draft) in remaining.iter_mut().zip(draft) {
                *prob = (*prob - draft).max(0.0);
            }
        }
        Distribution::Dense(draft) => return Err(vocabulary_differs(draft.len())),
        Distribution::Subset { tokens, probs: draft } => {
            for (&token, draft) in tokens.iter().zip(draft) {
                let prob = remaining.get_mut(token as usize).ok_or_else(|| vocabulary_differs(token as usize + 1))?;
                *prob = (*prob - draft).max(0.0);
            }
        }
    }
    Ok(Distribution::Dense(normalised(remaining, probs)))
}

/// `remaining` with sum 1, or `probs` if nothing to speak of remains.
fn normalised(mut remaining: Vec<f32>, probs: &[f32]) -> Vec<f32> {
    let mut mass = sum(&remaining);
    if mass <= RESIDUAL_MASS_FLOOR {
        remaining.copy_from_slice(probs);
        mass = sum(&remaining);
    }
    for prob in &mut remaining {
        *prob = (f64::from(*prob) / mass) as f32;
    }
    remaining
}

/// Verifies the block `tokens`, whose first token stands at `position` of its sequence. Every token has to be a draw from its
/// draft row; `draft` rows and `target` rows have to come from the same sampling parameters.
///
/// An empty block is a plain target step: its bonus token is drawn from the only target row.
///
/// # Shapes
/// `tokens`, `draft`: ℓ; `target`: ℓ + 1, row k being the target's distribution at `position + k`.
///
/// # Errors
/// Row counts or vocabulary sizes that do not fit together, or a token outside the vocabulary.
pub fn verify_block(
    target: &[Distribution],
    draft: &[Distribution],
    tokens: &[u32],
    seed: u64,
    position: u64,
) -> Result<Verdict, SpeculateError> {
    check_block(target, draft, tokens)?;
    let uniform =
        |stream, offset: usize| CounterRng::new(seed, stream, position.wrapping_add(offset as u64)).uniform_f64(0);
    for (k, &token) in tokens.iter().enumerate() {
        if uniform(Stream::Accept, k) >= accept_probability(&target[k], &draft[k], token) {
            let next_token = residual(&target[k], &draft[k])?.sample(uniform(Stream::Target, k));
            return Ok(Verdict { accepted: k, next_token, bonus: false });
        }
    }
    let next_token = target[tokens.len()].sample(uniform(Stream::Target, tokens.len()));
    Ok(Verdict { accepted: tokens.len(), next_token, bonus: true })
}

fn check_block(target: &[Distribution], draft: &[Distribution], tokens: &[u32]) -> Result<(), SpeculateError> {
    let shape = |what, found, expected| {
        if found == expected {
            Ok(())
        } else {
            Err(SpeculateError::BlockShape { tokens: tokens.len(), what, found, expected })
        }
    };
    shape("number of target rows", target.len(), tokens.len() + 1)?;
    shape("number of draft rows", draft.len(), tokens.len())?;
    let mut sizes = target.iter().chain(draft).filter_map(|row| match row {
        Distribution::OneHot(_) | Distribution::Subset { .. } => None,
        Distribution::Dense(probs) => Some(probs.len()),
    });
    let Some(vocab_size) = sizes.next() else { return Ok(()) };
    sizes.try_for_each(|size| shape("vocabulary of a row", size, vocab_size))?;
    for row in draft {
        if let Distribution::Subset { tokens, .. } = row
            && let Some(&last) = tokens.last()
            && last as usize >= vocab_size
        {
            return shape("vocabulary of a row", last as usize + 1, vocab_size);
        }
    }
    match tokens.iter().position(|&token| token as usize >= vocab_size) {
        Some(position) => Err(SpeculateError::UnknownToken { token: tokens[position], position, vocab_size }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dense(probs: &[f32]) -> Distribution {
        Distribution::from_probs(probs.to_vec()).unwrap()
    }

    #[test]
    fn greedy_accepts_the_common_prefix() {
        let one_hot = |tokens: &[u32]| tokens.iter().map(|&token| Distribution::OneHot(token)).collect::<Vec<_>>();
        let target = one_hot(&[5, 6, 7, 8]);
        let verdict = |tokens: &[u32]| verify_block(&target, &one_hot(tokens), tokens, 0, 10).unwrap();
        assert_eq!(verdict(&[5, 6, 7]), Verdict { accepted: 3, next_token: 8, bonus: true });
        assert_eq!(verdict(&[5, 0, 7]), Verdict { accepted: 1, next_token: 6, bonus: false });
        assert_eq!(verdict(&[0, 6, 7]), Verdict { accepted: 0, next_token: 5, bonus: false });
        let plain = verify_block(&target[..1], &[], &[], 0, 10).unwrap();
        assert_eq!(plain, Verdict { accepted: 0, next_token: 5, bonus: true });
    }

    #[test]
    fn a_one_hot_draft_leaves_the_rest_of_the_target() {
        let target = dense(&[0.5, 0.25, 0.25]);
        assert_eq!(residual(&target, &Distribution::OneHot(0)).unwrap(), dense(&[0.0, 0.5, 0.5]));
        assert_eq!(residual(&Distribution::OneHot(2), &target).unwrap(), Distribution::OneHot(2));
        let certain = dense(&[1.0, 0.0]);
        assert_eq!(residual(&certain, &Distribution::OneHot(0)).unwrap(), certain);
    }

    #[test]
    fn a_draft_over_some_tokens_is_one_without_mass_elsewhere() {
        let tokens: std::sync::Arc<[u32]> = [1, 3].into();
        let part = dense(&[0.75, 0.25]).over(&tokens).unwrap();
        let spread = dense(&[0.0, 0.75, 0.0, 0.25]);
        let target = dense(&[0.25, 0.25, 0.0, 0.5]);
        for token in 0..5 {
            assert_eq!(part.prob(token), spread.prob(token), "{token}");
            assert_eq!(accept_probability(&target, &part, token), accept_probability(&target, &spread, token));
        }
        for u in [0.0, 0.3, 0.74, 0.76, 1.0_f64.next_down()] {
            assert_eq!(part.sample(u), spread.sample(u), "{u}");
        }
        assert_eq!(residual(&target, &part).unwrap(), residual(&target, &spread).unwrap());
        // The other way round the residual stays on the part.
        let rest = residual(&part, &target).unwrap();
        assert_eq!((rest.prob(1), rest.prob(3), rest.prob(0)), (1.0, 0.0, 0.0));
        assert_eq!(Distribution::OneHot(1).over(&tokens).unwrap(), Distribution::OneHot(3));
        for wrong in [Distribution::OneHot(2), target.clone(), part.clone()] {
            assert!(wrong.over(&tokens).is_err());
        }
        let three = dense(&[0.5, 0.25, 0.25]);
        assert!(residual(&three, &part).unwrap_err().to_string().contains("is 4, expected 3"));
        let error = verify_block(&[three.clone(), three], &[part], &[1], 0, 0).unwrap_err().to_string();
        assert!(error.contains("vocabulary of a row is 4, expected 3"), "{error}");
    }

    #[test]
    fn blocks_that_do_not_fit_are_errors() {
        let (two, three) = (dense(&[0.5, 0.5]), dense(&[0.5, 0.25, 0.25]));
        let verify = |target: &[&Distribution], draft: &[&Distribution], tokens: &[u32]| {
            let own = |rows: &[&Distribution]| rows.iter().map(|&row| row.clone()).collect::<Vec<_>>();
            verify_block(&own(target), &own(draft), tokens, 0, 0).unwrap_err().to_string()
        };
        assert_eq!(
            verify(&[&two], &[&two], &[0]),
            "cannot verify a block of 1 tokens: number of target rows is 1, expected 2"
        );
        assert!(verify(&[&two, &two], &[], &[0]).contains("number of draft rows is 0, expected 1"));
        assert!(verify(&[&two, &two], &[&three], &[0]).contains("vocabulary of a row is 3, expected 2"));
        assert!(verify(&[&two, &two], &[&two], &[2]).contains("token 2 at block position 0"));
        assert!(residual(&two, &three).is_err());
    }
}
