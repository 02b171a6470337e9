//! Losses of the routers of a mixture of experts: the load-balance loss of the Switch Transformer and the z-loss of ST-MoE.
//!
//! For a router over E experts, with f_e the share of the choices that went to expert e and P_e its mean probability,
//! balance = E · Σ_e f_e · P_e (1 when all get the same) and z = mean of (log Σ_e e^logit)². Both are means over the rows that were
//! routed, which are *all rows of the blocks that have an anchor*, supervised or not, since drafting sends all of them through
//! the experts, and over the layers. f is that of a micro-batch: its share of the global batch weighs it, but a batch in several pieces is
//! balanced piece by piece.

use candle_core::Tensor;
use serde::{Deserialize, Serialize};

use super::dspark::DSparkLoss;
use crate::draft::moe::{Routing, log_sum_exp};
use crate::error::Result;

/// Coefficients of the routers' losses.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RouterWeights {
    /// Of the load-balance loss.
    pub load_balance: f64,
    /// Of the z-loss.
    pub z: f64,
}

/// Sums over rows; those of the micro-batches of a global batch add up.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RouterSums {
    rows: f64,
    load_balance: f64,
    z: f64,
    /// Rows per layer and expert.
    counts: Vec<Vec<f64>>,
}

impl RouterSums {
    /// Adds the sums of another micro-batch.
    pub fn add(&mut self, other: &Self) {
        self.rows += other.rows;
        self.load_balance += other.load_balance;
        self.z += other.z;
        self.counts.resize(self.counts.len().max(other.counts.len()), Vec::new());
        for (mine, other) in self.counts.iter_mut().zip(&other.counts) {
            mine.resize(mine.len().max(other.len()), 0.0);
            mine.iter_mut().zip(other).for_each(|(mine, other)| *mine += other);
        }
    }

    /// The largest part of a layer's choices that went to one expert.
    pub fn busiest_expert_share(&self) -> f64 {
        let share =
            |counts: &Vec<f64>| counts.iter().copied().fold(0.0, f64::max) / counts.iter().sum::<f64>().max(1.0);
        self.counts.iter().map(share).fold(0.0, f64::max)
    }

    /// Named metrics for logs; none without experts.
    pub fn metrics(&self) -> Vec<(String, f64)> {
        if self.counts.is_empty() {
            return Vec::new();
        }
        let rows = self.rows.max(1.0);
        vec![
            ("load_balance_loss".into(), self.load_balance / rows),
            ("router_z_loss".into(), self.z / rows),
            ("busiest_expert_share".into(), self.busiest_expert_share()),
        ]
    }
}

impl DSparkLoss {
    /// Adds the routers' losses of a micro-batch, which has the `share` of the global batch's blocks.
    ///
    /// # Errors
    /// When the logits are no matrices.
    pub fn with_routers(mut self, routing: &[Routing], weights: RouterWeights, share: f64) -> Result<Self> {
        let mut sums = RouterSums::default();
        for Routing { logits, counts, .. } in routing {
            sums.counts.push(counts.iter().map(|&count| count as f64).collect());
            sums.rows = logits.dims()[0] as f64;
        }
        if sums.rows > 0.0 {
            let per_layer = 1.0 / routing.len() as f64;
            for routing in routing {
                let [balance, z] = losses(routing)?;
                let value = |term: &Tensor| Ok::<_, candle_core::Error>(f64::from(term.detach().to_scalar::<f32>()?));
                sums.load_balance += value(&balance)? * per_layer * sums.rows;
                sums.z += value(&z)? * per_layer * sums.rows;
                for (term, weight) in [(balance, weights.load_balance), (z, weights.z)] {
                    if weight != 0.0 {
                        let term = (term * (weight * per_layer * share))?;
                        self.sums.loss += value(&term)?;
                        self.loss = (self.loss + term)?;
                    }
                }
            }
        }
        self.sums.router.add(&sums);
        Ok(self)
    }
}

/// Load-balance loss and z-loss of one layer.
fn losses(routing: &Routing) -> Result<[Tensor; 2]> {
    let Routing { logits, counts, .. } = routing;
    let total: usize = counts.iter().sum();
    let scale = counts.len() as f64 / total.max(1) as f64;
    let shares: Vec<f32> = counts.iter().map(|&count| (count as f64 * scale) as f32).collect();
    let shares = Tensor::from_vec(shares, counts.len(), logits.device())?;
    let log_total = log_sum_exp(logits)?;
    let probabilities = logits.broadcast_sub(&log_total)?.exp()?.mean(0)?;
    Ok([(probabilities * shares)?.sum_all()?, log_total.sqr()?.mean_all()?])
}
