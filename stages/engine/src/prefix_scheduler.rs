//! The hardware-aware prefix scheduler (the DSpark paper's Algorithm 1): how many tokens of each sequence's proposal one pass
//! verifies, so that all sequences together commit most tokens per unit of time.
//!
//! A token's *survival* is the probability that it and all before it in its proposal are accepted. Survivals never rise along
//! a proposal, so taking the highest ones of all proposals takes a prefix of each.
//!
//! What keeps the output's distribution is that nothing here looks past the token that it decides on: [`early_stop`] stops at
//! the first token that does not pay, [`best_budget`] searches all budgets and must therefore only be given what was known
//! before any of the tokens at hand was drawn; [`allocate`] then spends that budget in the order of survival.

/// Prefix lengths by Algorithm 1: tokens are admitted in the order of survival until one does not raise the throughput.
///
/// `survival[r][j]` is that of token j of sequence r, `rows` the rows that the pass has anyway, and `sampled` the sequences
/// that commit a token without any proposal. `seconds` is the time of a pass by its rows.
pub fn early_stop(survival: &[Vec<f64>], sampled: usize, rows: usize, seconds: impl Fn(usize) -> f64) -> Vec<usize> {
    let mut tokens = sampled as f64;
    let mut throughput = tokens / seconds(rows);
    let mut lengths = vec![0; survival.len()];
    for (admitted, (sequence, chance)) in by_survival(survival).into_iter().enumerate() {
        tokens += chance;
        let next = tokens / seconds(rows + admitted + 1);
        if next <= throughput {
            break;
        }
        throughput = next;
        lengths[sequence] += 1;
    }
    lengths
}

/// The number of tokens to verify in all that promises most tokens per unit of time, 0 included; the smallest of equals.
///
/// Arguments as of [`early_stop`]; the survivals must not depend on the tokens that the budget is for.
pub fn best_budget(survival: &[Vec<f64>], sampled: usize, rows: usize, seconds: impl Fn(usize) -> f64) -> usize {
    let mut tokens = sampled as f64;
    let mut best = (0, tokens / seconds(rows));
    for (admitted, (_, chance)) in by_survival(survival).into_iter().enumerate() {
        tokens += chance;
        let throughput = tokens / seconds(rows + admitted + 1);
        if throughput > best.1 {
            best = (admitted + 1, throughput);
        }
    }
    best.0
}

/// Prefix lengths that spend a budget on the tokens of highest survival.
pub fn allocate(survival: &[Vec<f64>], budget: usize) -> Vec<usize> {
    let mut lengths = vec![0; survival.len()];
    for (sequence, _) in by_survival(survival).into_iter().take(budget) {
        lengths[sequence] += 1;
    }
    lengths
}

/// Survivals of a proposal from the chances of its tokens, each given that those before it were accepted.
pub fn survivals(chances: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let multiply = |survival: &mut f64, chance: f64| {
        *survival *= chance.clamp(0.0, 1.0);
        Some(*survival)
    };
    chances.into_iter().scan(1.0, multiply).collect()
}

/// All (sequence, survival), the highest first; of equals the one that stands earlier in its proposal, then the earlier
/// sequence, so that no token comes before one that it follows.
fn by_survival(survival: &[Vec<f64>]) -> Vec<(usize, f64)> {
    let tokens = survival.iter().enumerate().flat_map(|(sequence, chain)| {
        let lowest_so_far = chain.iter().scan(1.0_f64, |lowest, &chance| {
            *lowest = lowest.min(chance);
            Some(*lowest)
        });
        lowest_so_far.enumerate().map(move |(place, chance)| (place, sequence, chance))
    });
    let mut tokens: Vec<(usize, usize, f64)> = tokens.collect();
    tokens.sort_by(|a, b| b.2.total_cmp(&a.2).then((a.0, a.1).cmp(&(b.0, b.1))));
    tokens.into_iter().map(|(_, sequence, chance)| (sequence, chance)).collect()
}

#[cfg(test)]
mod tests {
    use deepspec_models::speculate::{CounterRng, Stream};

    use super::*;

    type Curve = Box<dyn Fn(usize) -> f64>;

    /// Flat, linear, staircase and jagged times of passes.
    fn curves() -> Vec<(&'static str, Curve)> {
        vec![
            ("flat", Box::new(|_| 1.0)),
            ("linear", Box::new(|rows| rows as f64)),
            ("affine", Box::new(|rows| 4.0 + rows as f64)),
            ("staircase", Box::new(|rows| 1.0 + 0.7 * rows.div_ceil(4) as f64)),
            ("jagged", Box::new(|rows| 2.0 + 0.1 * rows as f64 + 0.9 * f64::from(u8::from(rows % 3 == 2)))),
        ]
    }

    fn random(case: u64) -> Vec<Vec<f64>> {
        let draws = CounterRng::new(case, Stream::Init, 0);
        let sequences = 1 + draws.below(0, 4);
        (0..sequences)
            .map(|r| survivals((0..draws.below(10 + r, 5)).map(|j| draws.uniform_f64(100 + 10 * r + j))))
            .collect()
    }

    /// Throughput of chosen lengths.
    fn throughput(survival: &[Vec<f64>], lengths: &[usize], rows: usize, seconds: &dyn Fn(usize) -> f64) -> f64 {
        let tokens: f64 =
            survival.iter().zip(lengths).map(|(chain, &length)| chain[..length].iter().sum::<f64>()).sum();
        (survival.len() as f64 + tokens) / seconds(rows + lengths.iter().sum::<usize>())
    }

    /// The best of all combinations of lengths.
    fn brute_force(survival: &[Vec<f64>], rows: usize, seconds: &dyn Fn(usize) -> f64) -> f64 {
        let mut best = f64::NEG_INFINITY;
        let mut lengths = vec![0; survival.len()];
        loop {
            best = best.max(throughput(survival, &lengths, rows, seconds));
            let Some(at) = (0..lengths.len()).find(|&at| lengths[at] < survival[at].len()) else { return best };
            lengths[at] += 1;
            lengths[..at].fill(0);
        }
    }

    #[test]
    fn the_budget_is_that_of_a_brute_force_search() {
        for (name, seconds) in curves() {
            for case in 0..400 {
                let survival = random(case);
                let rows = survival.len() + (case % 3) as usize;
                let budget = best_budget(&survival, survival.len(), rows, &seconds);
                let lengths = allocate(&survival, budget);
                assert_eq!(lengths.iter().sum::<usize>(), budget);
                let found = throughput(&survival, &lengths, rows, &*seconds);
                let best = brute_force(&survival, rows, &*seconds);
                assert!((found - best).abs() < 1e-9, "{name} {case}: {found} of {best}");
            }
        }
    }

    #[test]
    fn stopping_early_is_the_best_where_throughput_has_one_peak_and_never_above_it() {
        for (name, seconds) in curves() {
            for case in 0..400 {
                let survival = random(case);
                let rows = survival.len();
                let lengths = early_stop(&survival, rows, rows, &seconds);
                let found = throughput(&survival, &lengths, rows, &*seconds);
                let best = brute_force(&survival, rows, &*seconds);
                assert!(found < best + 1e-9, "{name} {case}");
                assert!(found > throughput(&survival, &vec![0; rows], rows, &*seconds) - 1e-9, "{name} {case}");
                if ["flat", "linear", "affine"].contains(&name) {
                    assert!((found - best).abs() < 1e-9, "{name} {case}: {found} of {best}");
                }
            }
        }
    }

    /// Steps per second 1, .5, .45; p_t = (.7, .3), p_d = (.5, .5), so the first token survives with .8; the second surely
    /// after A, never after B.
    #[test]
    fn the_counterexample_of_the_paper() {
        let seconds = |rows: usize| 1.0 / [1.0, 0.5, 0.45][rows - 1];
        let target = [0.7, 0.3];
        let writes_a = |verifies_first: &dyn Fn(f64) -> bool| -> f64 {
            let given = |second: f64, accepted_a: f64| if verifies_first(second) { accepted_a } else { target[0] };
            // A drafted: accepted for sure. B drafted: accepted with .6, else replaced by A.
            0.5 * given(1.0, 1.0) + 0.5 * given(0.0, 0.4)
        };
        let ours = writes_a(&|second| early_stop(&[survivals([0.8, second])], 1, 1, seconds)[0] > 0);
        assert!((ours - 0.7).abs() < 1e-12, "{ours}");
        // A search over all lengths that looks at the second token's confidence is biased.
        let retrospective = writes_a(&|second| best_budget(&[survivals([0.8, second])], 1, 1, seconds) > 0);
        assert!((retrospective - 0.85).abs() < 1e-12, "{retrospective}");
        // The same search over what was promised before the draw is not, whatever it was.
        for promised in [[0.8, 0.0], [0.8, 0.5], [0.8, 1.0]] {
            let budget = best_budget(&[survivals(promised)], 1, 1, seconds);
            let stale = writes_a(&|second| allocate(&[survivals([0.8, second])], budget)[0] > 0);
            assert!((stale - 0.7).abs() < 1e-12, "{promised:?}: {stale}");
        }
    }

    #[test]
    fn equal_survivals_are_taken_from_the_front() {
        assert_eq!(allocate(&[vec![1.0; 3], vec![1.0; 3]], 3), [2, 1]);
        assert_eq!(allocate(&[vec![0.5, 0.5], vec![0.9, 0.5]], 2), [1, 1]);
        assert_eq!(allocate(&[Vec::new(), vec![0.1]], 9), [0, 1]);
        assert_eq!(early_stop(&[], 0, 1, |_| 1.0), Vec::<usize>::new());
        assert_eq!(survivals([0.5, 1.5, 0.5]), [0.5, 0.5, 0.25]);
    }
}
