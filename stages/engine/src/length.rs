//! How many tokens of a proposal to verify: the prefix that promises most tokens per unit of time.

/// Length of the prefix to verify. Going on from length l is worth it while some longer prefix promises more tokens per unit
/// of time than stopping there.
///
/// Entry k of `known` is the probability that token k is accepted given that those before it are. It may depend on the
/// tokens before k, as a confidence does, but not on token k or later ones. `expected` stands in for the entries of `known`
/// that lie further ahead and must not depend on any proposed token. So whether token k is verified depends only on what was
/// known before it was drawn, and the output keeps the target's distribution whatever the costs are. Looking ahead
/// with `expected` matters where the second row is what costs, and further ones are nearly free.
///
/// `cost` is the time of a round that verifies so many tokens, what was spent on it before included.
pub(super) fn worthwhile_prefix(known: &[f64], expected: &[f64], cost: impl Fn(usize) -> f64) -> usize {
    let (mut survival, mut tokens) = (1.0, 1.0);
    for (length, &next) in known.iter().enumerate() {
        let stop = tokens / cost(length);
        let later = expected.get(length + 1..known.len()).unwrap_or_default();
        if best_rate(survival, tokens, [next].iter().chain(later), length, &cost).1 <= stop {
            return length;
        }
        survival *= next;
        tokens += survival;
    }
    known.len()
}

/// Length of at least 1 with the most expected tokens per unit of time, and that rate; length 0 with nothing to verify.
pub(super) fn best_length(expected: &[f64], cost: impl Fn(usize) -> f64) -> (usize, f64) {
    best_rate(1.0, 1.0, expected.iter(), 0, &cost)
}

/// Best of the lengths past `length`, which has `tokens` and survives with `survival`.
fn best_rate<'a>(
    mut survival: f64,
    mut tokens: f64,
    chances: impl Iterator<Item = &'a f64>,
    length: usize,
    cost: &impl Fn(usize) -> f64,
) -> (usize, f64) {
    let mut best = (0, f64::NEG_INFINITY);
    for (ahead, chance) in chances.enumerate() {
        survival *= chance;
        tokens += survival;
        let rate = tokens / cost(length + ahead + 1);
        if rate > best.1 {
            best = (length + ahead + 1, rate);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_lengths_by_hand() {
        let flat = |_| 1.0;
        assert_eq!(worthwhile_prefix(&[0.9, 0.1, 0.9], &[0.5; 3], flat), 3);
        // The second row costs half a step, more are free: only many tokens together pay.
        let jagged = |length: usize| if length == 0 { 1.0 } else { 1.5 };
        assert_eq!(worthwhile_prefix(&[0.4], &[0.8], jagged), 0);
        assert_eq!(worthwhile_prefix(&[0.4, 0.8, 0.8], &[0.8; 3], jagged), 3);
        // Every row costs half a step.
        let linear = |length: usize| 1.0 + 0.5 * length as f64;
        assert_eq!(worthwhile_prefix(&[0.9, 0.9, 0.2], &[0.1; 3], linear), 2);
        assert_eq!(worthwhile_prefix(&[0.3, 0.9, 0.9], &[0.1; 3], linear), 0);
        assert_eq!(worthwhile_prefix(&[], &[], linear), 0);
        assert_eq!(best_length(&[0.2, 0.1], linear), (1, 1.2 / 1.5));
        assert_eq!(best_length(&[], linear).0, 0);
    }

    #[test]
    fn estimates_alone_give_the_best_of_all_lengths() {
        for case in 0..500_u32 {
            let value = |i: u32| f64::from((case * 7 + i * 31 + case * i * 13) % 97) / 97.0;
            let chances: Vec<f64> = (0..6).map(value).collect();
            let mut costs = vec![1.0];
            for i in 0..6 {
                costs.push(costs[i as usize] + 0.6 * value(i + 50));
            }
            let rate = |length: usize| {
                let tokens: f64 = (0..=length).map(|l| chances[..l].iter().product::<f64>()).sum();
                tokens / costs[length]
            };
            let best = (0..=6).map(rate).fold(0.0, f64::max);
            let found = worthwhile_prefix(&chances, &chances, |length| costs[length]);
            assert!(rate(found) > best - 1e-12, "{chances:?} {costs:?}: {found}");
        }
    }

    /// The paper's counterexample: one request, two draft tokens from p_d = (.5, .5), target (.7, .3), steps per second
    /// 1, .5, .45. The first token survives with .8, and the second one surely if the first is A, never if it is B. A search
    /// over all lengths after the fact verifies A only and writes it with probability .85 instead of .7.
    #[test]
    fn the_choice_does_not_depend_on_the_token_it_admits() {
        let cost = |length: usize| [1.0, 1.0 / 0.5, 1.0 / 0.45][length];
        for expected in [[0.8, 0.0], [0.8, 0.5], [0.8, 1.0]] {
            let mut first_is_a = 0.0;
            for (draft_is_a, second) in [(true, 1.0), (false, 0.0)] {
                let verifies = worthwhile_prefix(&[0.8, second], &expected, cost) > 0;
                let a = match (verifies, draft_is_a) {
                    (false, _) => 0.7,
                    (true, true) => 1.0,
                    // B is accepted with .6 and otherwise replaced by the residual, which is A alone.
                    (true, false) => 0.4,
                };
                first_is_a += 0.5 * a;
            }
            assert!((first_is_a - 0.7_f64).abs() < 1e-12, "{expected:?}: {first_is_a}");
            let after_the_fact = |second: f64| {
                let rates = [1.0, 1.8 / cost(1), (1.8 + 0.8 * second) / cost(2)];
                (0..3).max_by(|&a, &b| rates[a].total_cmp(&rates[b])).unwrap()
            };
            assert_eq!((after_the_fact(1.0), after_the_fact(0.0)), (2, 0), "the example would be biased");
        }
    }
}
