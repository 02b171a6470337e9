//! A drafter that turns bad in the middle of a run.

use candle_core::Tensor;
use deepspec_models::Error as ModelError;
use deepspec_models::speculate::{Distribution, DraftRequest, Proposal, Proposer, SpeculateError};

/// How a drafter turns bad.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Fault {
    /// Proposing fails as a whole.
    Propose,
    /// Taking features fails.
    Observe,
    /// A row of one request has no distribution after its second token.
    Row,
    /// The confidences of one request are not numbers.
    Confidence,
    /// It gives fewer proposals than it was asked for.
    Missing,
    /// Its tokens are none that the target would write: no failure, but no use either.
    Useless,
}

/// A good drafter that turns bad after a number of calls.
pub(crate) struct TurnsBad<'a> {
    pub(crate) inner: Box<dyn Proposer + 'a>,
    pub(crate) fault: Fault,
    pub(crate) good_calls: usize,
}

impl TurnsBad<'_> {
    fn is_bad(&mut self) -> bool {
        let was_good = self.good_calls > 0;
        self.good_calls = self.good_calls.saturating_sub(1);
        !was_good
    }
}

impl Proposer for TurnsBad<'_> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn block_size(&self) -> usize {
        self.inner.block_size()
    }

    fn feature_layers(&self) -> &[i32] {
        self.inner.feature_layers()
    }

    fn observe(&mut self, features: &Tensor, commits: &[(usize, usize)]) -> Result<(), ModelError> {
        if self.fault == Fault::Observe && self.is_bad() {
            return Err(ModelError::Batch("injected".into()));
        }
        self.inner.observe(features, commits)
    }

    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Proposal>, ModelError> {
        if self.fault == Fault::Observe {
            return self.inner.propose(requests);
        }
        let is_bad = self.is_bad();
        if is_bad && self.fault == Fault::Propose {
            return Err(ModelError::Batch("injected".into()));
        }
        let mut proposals = self.inner.propose(requests)?;
        if is_bad {
            let first = &mut proposals[0];
            match self.fault {
                Fault::Row => {
                    first.tokens.truncate(2);
                    first.distributions.truncate(2);
                    first.confidence_logits.truncate(2);
                    first.fault = Some(SpeculateError::NanLogit { token: 0 });
                }
                Fault::Confidence => {
                    first.confidence_logits.fill(f32::NEG_INFINITY);
                    first.fault = Some(SpeculateError::Confidence { position: 0, value: f32::NAN });
                }
                Fault::Missing => drop(proposals.pop()),
                Fault::Useless => {
                    for proposal in &mut proposals {
                        for (token, distribution) in proposal.tokens.iter_mut().zip(&mut proposal.distributions) {
                            *token = (*token + 101) % 256;
                            *distribution = Distribution::OneHot(*token);
                        }
                    }
                }
                Fault::Propose | Fault::Observe => {}
            }
        }
        Ok(proposals)
    }

    fn release(&mut self, slot: usize) {
        self.inner.release(slot);
    }
}
