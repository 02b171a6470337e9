//! Linear maps of one input whose outputs are wanted apart, such as queries, keys and values.
//!
//! Frozen, they are one packed matrix: a draft round consists of small products, and starting one is a good part of its
//! cost. Every output is computed in the same order of operations either way, so fusing changes no bit. In training each
//! weight stays a variable of its own.

use candle_core::Tensor;
use deepspec_kernels::linear::Linear;

use super::parameters::ParameterSource;
use crate::error::Result;

/// N linear maps of one input.
#[derive(Debug)]
pub enum ParallelLinear<const N: usize> {
    /// One matrix, and the number of outputs of each map.
    Fused(Linear, [usize; N]),
    /// One layer each.
    Separate([Linear; N]),
}

impl<const N: usize> ParallelLinear<N> {
    /// Reads the layers (name, outputs), all of `inputs` inputs.
    ///
    /// # Errors
    /// When a tensor is missing or misshapen.
    pub fn new(
        layers: [(String, usize); N],
        inputs: usize,
        has_bias: bool,
        source: ParameterSource<'_>,
    ) -> Result<Self> {
        let ParameterSource::Frozen(_, precision) = source else {
            let layer = |(name, outputs): &(String, usize)| source.linear(name, *outputs, inputs, has_bias);
            let separate: Vec<Linear> = layers.iter().map(layer).collect::<Result<_>>()?;
            return Ok(Self::Separate(separate.try_into().expect("one layer per name")));
        };
        let (mut weights, mut biases) = (Vec::with_capacity(N), Vec::with_capacity(N));
        for (name, outputs) in &layers {
            weights.push(source.tensor(&format!("{name}.weight"), &[*outputs, inputs])?);
            if has_bias {
                biases.push(source.tensor(&format!("{name}.bias"), &[*outputs])?);
            }
        }
        let bias = if has_bias { Some(Tensor::cat(&biases, 0)?) } else { None };
        let linear = Linear::frozen(&weights.iter().collect::<Vec<_>>(), bias.as_ref(), precision)?;
        Ok(Self::Fused(linear, layers.map(|(_, outputs)| outputs)))
    }

    /// The outputs of all maps; those of a fused matrix are views of its rows.
    ///
    /// # Shapes
    /// `[rows, inputs]` → `[rows, outputs]` of each
    ///
    /// # Errors
    /// When the input width differs from the layers'.
    pub fn forward(&self, x: &Tensor) -> Result<[Tensor; N]> {
        let outputs: Vec<Tensor> = match self {
            Self::Separate(layers) => layers.iter().map(|layer| layer.forward(x)).collect::<Result<_, _>>()?,
            Self::Fused(linear, widths) => {
                let rows = linear.forward(x)?;
                let mut first = 0;
                let mut part = |&width: &usize| {
                    first += width;
                    rows.narrow(1, first - width, width)
                };
                widths.iter().map(&mut part).collect::<Result<_, _>>()?
            }
        };
        Ok(outputs.try_into().expect("one output per map"))
    }
}
