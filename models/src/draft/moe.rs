//! A mixture of experts in the place of a draft layer's MLP: a router sends each row to the k experts that it
//! scores highest, whose outputs are added up with the router's weights; a shared expert, if there is one, serves all rows.
//!
//! Rows are grouped by expert, so each expert is one product over its rows. A row's output is the shared expert's plus those of
//! its experts in ascending order of their numbers: the sum does not depend on what else is in the batch.

use std::collections::BTreeSet;

use candle_core::Tensor;
use deepspec_kernels::linear::Linear;

use super::mlp::GatedMlp;
use super::parameters::ParameterSource;
use crate::config::MoeConfig;
use crate::error::Result;

/// The routed experts of a layer, its router and its shared expert.
#[derive(Debug)]
pub struct MixtureOfExperts {
    gate: Linear,
    experts: Vec<GatedMlp>,
    shared_expert: Option<GatedMlp>,
    config: MoeConfig,
    layer: usize,
}

/// Where a layer's router sent the rows of a forward pass.
#[derive(Debug)]
pub struct Routing {
    /// Draft layer.
    pub layer: usize,
    /// The router's logits of the routed rows, `[rows, experts]`, with gradients in training.
    pub logits: Tensor,
    /// Rows that each expert got.
    pub counts: Vec<usize>,
}

impl MixtureOfExperts {
    /// Reads `layers.{layer}.mlp.gate.weight`, `….mlp.experts.{e}.…` and `….mlp.shared_expert.…`. The router is never packed in
    /// less than f32: a small error there sends a row to another expert.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen.
    pub fn new(config: &MoeConfig, hidden: usize, layer: usize, source: ParameterSource<'_>) -> Result<Self> {
        let at = |name: &str| format!("layers.{layer}.mlp.{name}");
        let expert = |name: &str, inner: usize| GatedMlp::new(&at(name), hidden, inner, false, source);
        let shared = config.shared_expert_intermediate_size;
        Ok(Self {
            gate: source.in_f32().linear(&at("gate"), config.num_experts, hidden, false)?,
            experts: (0..config.num_experts)
                .map(|e| expert(&format!("experts.{e}"), config.moe_intermediate_size))
                .collect::<Result<_>>()?,
            shared_expert: (shared > 0).then(|| expert("shared_expert", shared)).transpose()?,
            config: config.clone(),
            layer,
        })
    }

    /// The output of each row. Only the rows `routed` (all without it) go to routed experts, the others to the shared one alone.
    ///
    /// # Shapes
    /// `[rows, hidden]` → `[rows, hidden]`
    ///
    /// # Errors
    /// When shapes do not fit or a row of `routed` does not exist.
    pub fn forward(&self, x: &Tensor, routed: Option<&[u32]>) -> Result<(Tensor, Routing)> {
        let rows = x.dims2()?.0;
        let routed = routed.filter(|routed| routed.len() < rows);
        let routed = routed.map(|routed| Tensor::from_slice(routed, routed.len(), x.device())).transpose()?;
        let input = routed.as_ref().map_or_else(|| Ok(x.clone()), |routed| x.index_select(routed, 0))?;
        let logits = self.gate.forward(&input)?;
        let choice = Choice::highest(&logits.to_vec2()?, self.config.num_experts_per_tok);
        let counts = choice.counts(self.config.num_experts);
        let mut y = match &self.shared_expert {
            Some(expert) => expert.forward(x)?,
            None => x.zeros_like()?,
        };
        if input.dims()[0] > 0 {
            let experts = self.weighted_experts(&input, &logits, &choice)?;
            match &routed {
                None => {
                    for output in &experts {
                        y = (y + output)?;
                    }
                }
                Some(routed) => {
                    for output in &experts {
                        y = y.index_add(routed, output, 0)?;
                    }
                }
            }
        }
        Ok((y, Routing { layer: self.layer, logits, counts }))
    }

    /// Weighted outputs of each row's first, second, … expert, `[rows, hidden]` each.
    fn weighted_experts(&self, input: &Tensor, logits: &Tensor, choice: &Choice) -> Result<Vec<Tensor>> {
        let (rows, k, device) = (input.dims()[0], choice.per_row, input.device());
        let experts = Tensor::from_slice(&choice.experts, (rows, k), device)?;
        let chosen = logits.gather(&experts, 1)?;
        // Softmax over all experts, of which the chosen ones' part stays as it is or is scaled to sum to 1.
        let total = log_sum_exp(if self.config.norm_topk_prob { &chosen } else { logits })?;
        let weights = chosen.broadcast_sub(&total)?.exp()?;
        let mut outputs = Vec::new();
        // Place of each row's j-th expert in the outputs, which stand expert by expert.
        let (mut places, mut next) = (vec![0; rows * k], 0);
        for (e, expert) in self.experts.iter().enumerate() {
            let mut of_expert = Vec::new();
            for (at, _) in choice.experts.iter().enumerate().filter(|(_, chosen)| **chosen as usize == e) {
                of_expert.push((at / k) as u32);
                places[at] = next;
                next += 1;
            }
            if !of_expert.is_empty() {
                let ids = Tensor::from_slice(&of_expert, of_expert.len(), device)?;
                outputs.push(expert.forward(&input.index_select(&ids, 0)?)?);
            }
        }
        let outputs = Tensor::cat(&outputs, 0)?;
        let of_rank = |j: usize| {
            let places: Vec<u32> = places.iter().skip(j).step_by(k).copied().collect();
            let output = outputs.index_select(&Tensor::from_vec(places, rows, device)?, 0)?;
            Ok(output.broadcast_mul(&weights.narrow(1, j, 1)?)?)
        };
        (0..k).map(of_rank).collect()
    }
}

/// The experts of each row.
struct Choice {
    /// Row by row, ascending within a row.
    experts: Vec<u32>,
    per_row: usize,
}

impl Choice {
    /// The `per_row` experts with the highest logits, of equals the first.
    fn highest(logits: &[Vec<f32>], per_row: usize) -> Self {
        let mut experts = Vec::with_capacity(logits.len() * per_row);
        for row in logits {
            let mut order: Vec<u32> = (0..row.len() as u32).collect();
            // Adding 0 makes the two zeros equal.
            order.sort_by(|&a, &b| (row[b as usize] + 0.0).total_cmp(&(row[a as usize] + 0.0)));
            order.truncate(per_row);
            order.sort_unstable();
            experts.append(&mut order);
        }
        Self { experts, per_row }
    }

    fn counts(&self, num_experts: usize) -> Vec<usize> {
        let mut counts = vec![0; num_experts];
        for &expert in &self.experts {
            counts[expert as usize] += 1;
        }
        counts
    }
}

/// log Σ e^x of each row, without overflow.
///
/// # Shapes
/// `[rows, n]` → `[rows, 1]`
///
/// # Errors
/// When the tensor is no matrix.
pub(crate) fn log_sum_exp(x: &Tensor) -> Result<Tensor> {
    let largest = x.detach().max_keepdim(1)?;
    Ok((x.broadcast_sub(&largest)?.exp()?.sum_keepdim(1)?.log()? + largest)?)
}

impl Routing {
    /// Names of the layer's parameters that this pass did not use: those of experts without rows, and the router's without any.
    pub fn idle_parameters(&self) -> BTreeSet<String> {
        let at = |name: &str| format!("layers.{}.mlp.{name}.weight", self.layer);
        let idle = self.counts.iter().enumerate().filter(|(_, count)| **count == 0);
        let part_of = |(e, _)| ["gate_proj", "up_proj", "down_proj"].map(|part| at(&format!("experts.{e}.{part}")));
        let mut names: BTreeSet<String> = idle.flat_map(part_of).collect();
        if self.logits.dims()[0] == 0 {
            names.insert(at("gate"));
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_are_chosen_of_equals_the_first() {
        let chosen = |row: &[f32], k| Choice::highest(&[row.to_vec()], k).experts;
        assert_eq!(chosen(&[0.0, 3.0, -1.0, 2.0], 2), [1, 3]);
        assert_eq!(chosen(&[3.0, 0.0, 2.0, 9.0], 2), [0, 3]);
        assert_eq!(chosen(&[1.0, 1.0, 1.0], 2), [0, 1]);
        assert_eq!(chosen(&[-0.0, 0.0], 1), [0]);
        assert_eq!(chosen(&[5.0, 4.0], 2), [0, 1]);
        let choice = Choice::highest(&[vec![0.0, 1.0, 2.0], vec![2.0, 1.0, 3.0]], 2);
        assert_eq!((choice.experts.as_slice(), choice.counts(4)), (&[1, 2, 0, 2][..], vec![1, 1, 2, 0]));
    }
}
