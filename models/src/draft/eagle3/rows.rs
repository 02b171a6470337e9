//! Which rows training-time test supervises, and which it has to compute.

/// Rows of a micro-batch that count at a step, in order: row i of a sequence predicts token i + 2 + step, and counts where the
/// loss mask of position i + step is 1 and the position after it, whose distribution the target gives, lies in the sequence.
pub(crate) fn supervised_rows<'a>(loss_masks: &'a [&[u8]], step: usize) -> impl Iterator<Item = usize> + use<'a> {
    let mut first = 0;
    loss_masks.iter().flat_map(move |mask| {
        let start = first;
        first += mask.len();
        let rows = 0..mask.len().saturating_sub(1 + step);
        rows.filter(move |row| mask[row + step] == 1).map(move |row| start + row)
    })
}

/// Rows that each step computes, ascending: those that count there or at a later step. Each step's are among those of the step
/// before; prompts have hardly any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepRows(Vec<Vec<usize>>);

impl StepRows {
    /// Those that loss masks ask for; steps at whose end nothing counts are left out.
    pub fn supervised(loss_masks: &[&[u8]], ttt_length: usize) -> Self {
        let mut steps: Vec<Vec<usize>> = (0..ttt_length).map(|s| supervised_rows(loss_masks, s).collect()).collect();
        for s in (1..ttt_length).rev() {
            let (earlier, later) = steps.split_at_mut(s);
            earlier[s - 1].extend(&later[0]);
            earlier[s - 1].sort_unstable();
            earlier[s - 1].dedup();
        }
        steps.retain(|rows| !rows.is_empty());
        Self(steps)
    }

    /// All rows at every step.
    pub fn all(rows: usize, ttt_length: usize) -> Self {
        Self(vec![(0..rows).collect(); ttt_length])
    }

    /// Rows of each step.
    pub fn steps(&self) -> &[Vec<usize>] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_count_by_the_mask_in_front_of_what_they_draft_from() {
        let masks: [&[u8]; 2] = [&[0, 0, 1, 0, 1, 1], &[0, 1, 1]];
        let at = |step| supervised_rows(&masks, step).collect::<Vec<_>>();
        // The last position of a sequence never counts: the target's distribution behind it belongs to no row.
        assert_eq!([at(0), at(1), at(2), at(3), at(5)], [vec![2, 4, 7], vec![1, 3, 6], vec![0, 2], vec![1], vec![]]);
        let steps = StepRows::supervised(&masks, 3);
        assert_eq!(steps.steps(), [vec![0, 1, 2, 3, 4, 6, 7], vec![0, 1, 2, 3, 6], vec![0, 2]]);
        assert_eq!(StepRows::supervised(&[&[1, 1]], 3).steps(), [vec![0]]);
        assert!(StepRows::supervised(&[&[0, 0, 1]], 1).steps().is_empty());
    }
}
