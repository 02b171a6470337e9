//! Who proposes the tokens of a round: one trait for every drafter, learned or not.
//!
//! The engine hands a proposer the committed tokens of each request and, where it asks for them, the target's features of
//! committed positions. A proposer returns tokens with the distributions they were drawn from, which is all that lossless
//! verification needs.

use candle_core::{Layout, Storage, Tensor};
use deepspec_kernels::linear::Linear;

use super::error::SpeculateError;
use super::{Adjustments, CounterRng, Distribution, History, SamplingParams, Stream};
use crate::draft::markov_head::{MarkovState, slot_rows};
use crate::draft::{DSpark, DraftVocabulary};
use crate::error::{Error, Result};
use crate::kv_cache::KvCache;

/// One request's turn to draft.
#[derive(Debug, Clone, Copy)]
pub struct DraftRequest<'a> {
    /// Cache slot of the sequence.
    pub slot: usize,
    /// Committed tokens, prompt included; the last one is the anchor.
    pub tokens: &'a [u32],
    /// Most tokens that can still be used.
    pub most: usize,
    /// Tokens that end the sequence.
    pub stop_ids: &'a [u32],
    /// Sampling settings, applied to the draft side as to the target's.
    pub sampling: &'a SamplingParams,
    /// Biases and penalties with the text that they look at, applied to the draft side as to the target's.
    pub adjustments: Option<(&'a Adjustments, &'a History)>,
    /// Seed of the request.
    pub seed: u64,
    /// Rounds of the request so far: every round has draws of its own.
    pub round: u64,
}

/// Proposed tokens of one request; empty when there is nothing to propose.
#[derive(Debug, Clone, Default)]
pub struct Proposal {
    /// Tokens for the positions after the anchor.
    pub tokens: Vec<u32>,
    /// The distribution that each token was drawn from.
    pub distributions: Vec<Distribution>,
    /// Logits of each token's survival, given all before it, calibrated where the drafter is; empty when the proposer has no
    /// confidence.
    pub confidence_logits: Vec<f32>,
    /// Tokens at the end of the text that a lookup found again; 0 for a drafter. Longer matches are accepted more often.
    pub matched: usize,
    /// Why drafting ended before its time: a row of unusable numbers. The tokens drawn before it stand, since whether they
    /// are verified must not depend on what they are.
    pub fault: Option<SpeculateError>,
}

impl Proposal {
    /// Draws the next token from a drafter's logits, over the tokens of its `vocabulary` where it has not all, and adds it.
    /// Logits without a distribution end the proposal with a [fault](Self::fault); then there is no token.
    ///
    /// `logits` are adjusted in place as the request asks for.
    ///
    /// # Errors
    /// When the logits are not as many as the vocabulary's tokens.
    pub(super) fn draw(
        &mut self,
        logits: &mut [f32],
        request: &DraftRequest<'_>,
        vocabulary: Option<&DraftVocabulary>,
    ) -> Result<Option<u32>> {
        if let Some((adjustments, history)) = request.adjustments {
            let mut seen = history.clone();
            self.tokens.iter().for_each(|&token| seen.push(token));
            match vocabulary {
                None => adjustments.apply(logits, &seen),
                Some(vocabulary) => adjustments
                    .apply_over(logits, &seen, |token| vocabulary.draft_token(token).map(|token| token as usize)),
            }
        }
        let mut distribution = match Distribution::from_logits(logits, request.sampling) {
            Ok(distribution) => distribution,
            Err(error) => {
                self.fault = Some(error);
                return Ok(None);
            }
        };
        if let Some(vocabulary) = vocabulary {
            distribution = distribution.over(vocabulary.tokens())?;
        }
        let position = (request.tokens.len() + self.tokens.len()) as u64;
        let draws = CounterRng::new(request.seed, Stream::Draft, position);
        let token = distribution.sample(draws.uniform_f64(request.round));
        self.tokens.push(token);
        self.distributions.push(distribution);
        Ok(Some(token))
    }

    /// Takes in the confidence logits of its tokens. One that is not a finite number promises nothing and is a fault.
    fn set_confidences(&mut self, logits: &[f32]) {
        for (position, &logit) in logits.iter().enumerate().take(self.tokens.len()) {
            if !logit.is_finite() && self.fault.is_none() {
                self.fault = Some(SpeculateError::Confidence { position, value: logit });
            }
            self.confidence_logits.push(if logit.is_finite() { logit } else { f32::NEG_INFINITY });
        }
    }
}

/// A source of draft tokens.
pub trait Proposer {
    /// Name in tables and metrics.
    fn name(&self) -> &'static str;

    /// Most tokens of one proposal.
    fn block_size(&self) -> usize;

    /// Whether a proposal costs next to nothing and is a function of the committed tokens alone.
    fn is_lookup(&self) -> bool {
        false
    }

    /// Target layers whose outputs [`Proposer::observe`] wants; empty for none.
    fn feature_layers(&self) -> &[i32] {
        &[]
    }

    /// Takes the target's features of newly committed positions: `commits` is (slot, number of rows) in row order.
    ///
    /// # Errors
    /// When a slot is full or the widths do not fit.
    fn observe(&mut self, features: &Tensor, commits: &[(usize, usize)]) -> Result<()> {
        let _ = (features, commits);
        Ok(())
    }

    /// Number of last committed positions whose features a proposal depends on; `None` for all.
    fn window(&self) -> Option<usize> {
        None
    }

    /// Passes over the next `len` committed positions of a slot, whose features it is not given. Those of at least a window follow.
    ///
    /// # Errors
    /// When the proposer has no window, or the slot is full.
    fn skip(&mut self, slot: usize, len: usize) -> Result<()> {
        Err(Error::Batch(format!("{} cannot pass over {len} positions of slot {slot}", self.name())))
    }

    /// Drafts for several requests at once, one proposal each.
    ///
    /// # Errors
    /// When the drafter fails.
    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Proposal>>;

    /// Forgets a slot's sequence.
    fn release(&mut self, slot: usize) {
        let _ = slot;
    }
}

/// Plain decoding: never proposes.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProposer;

impl Proposer for NoProposer {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn block_size(&self) -> usize {
        0
    }

    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Proposal>> {
        Ok(vec![Proposal::default(); requests.len()])
    }
}

/// N-gram lookup (prompt lookup decoding): what followed the last earlier occurrence of the longest matching suffix.
#[derive(Debug, Clone, Copy)]
pub struct NgramProposer {
    longest: usize,
    block_size: usize,
}

impl NgramProposer {
    /// Looks up suffixes of `longest` down to 1 tokens and proposes at most `block_size`.
    pub fn new(longest: usize, block_size: usize) -> Self {
        Self { longest, block_size }
    }

    /// Length of the match and what followed it: one pass over the text, from its end, for all lengths.
    fn lookup<'t>(&self, tokens: &'t [u32], most: usize) -> (usize, &'t [u32]) {
        let n = tokens.len();
        let Some(&anchor) = tokens.last().filter(|_| most > 0) else { return (0, &[]) };
        let (mut longest, mut from) = (0, n);
        // An occurrence ends before the last token, so that something follows it.
        for end in (1..n).rev().filter(|&end| tokens[end - 1] == anchor) {
            let before = tokens[..end].iter().rev().zip(tokens.iter().rev());
            let length = before.take(self.longest).take_while(|(earlier, last)| earlier == last).count();
            if length > longest {
                (longest, from) = (length, end);
            }
            if length == self.longest {
                break;
            }
        }
        (longest, &tokens[from..n.min(from + most)])
    }
}

impl Proposer for NgramProposer {
    fn name(&self) -> &'static str {
        "ngram"
    }

    fn block_size(&self) -> usize {
        self.block_size
    }

    fn is_lookup(&self) -> bool {
        true
    }

    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Proposal>> {
        let propose = |request: &DraftRequest<'_>| {
            let (matched, tokens) = self.lookup(request.tokens, self.block_size.min(request.most));
            let distributions = tokens.iter().map(|&token| Distribution::OneHot(token)).collect();
            Proposal { tokens: tokens.to_vec(), distributions, matched, ..Proposal::default() }
        };
        Ok(requests.iter().map(propose).collect())
    }
}

/// A trained DSpark (or DFlash) drafter with the contexts of the engine's slots.
#[derive(Debug)]
pub struct DSparkProposer<'a> {
    drafter: &'a DSpark,
    lm_head: &'a Linear,
    cache: KvCache,
}

impl<'a> DSparkProposer<'a> {
    /// A proposer for `slots` sequences of at most `capacity` committed tokens. A drafter without an output head of its
    /// own uses `target_head`, which one with a draft vocabulary cannot.
    ///
    /// # Errors
    /// When the head has not one output per draft token, or the memory cannot be had.
    pub fn new(drafter: &'a DSpark, target_head: &'a Linear, slots: usize, capacity: usize) -> Result<Self> {
        let config = drafter.config();
        let sizes = (config.body.vocab_size, config.draft_vocab());
        let lm_head = output_head(drafter.lm_head.as_ref(), target_head, drafter.vocabulary(), sizes)?;
        let cache = drafter.new_context(slots, capacity + drafter.config().block_size)?;
        Ok(Self { drafter, lm_head, cache })
    }
}

impl Proposer for DSparkProposer<'_> {
    fn name(&self) -> &'static str {
        if self.drafter.markov_head().is_some() { "dspark" } else { "dflash" }
    }

    fn block_size(&self) -> usize {
        self.drafter.config().proposals()
    }

    fn feature_layers(&self) -> &[i32] {
        &self.drafter.config().target_layer_ids
    }

    fn observe(&mut self, features: &Tensor, commits: &[(usize, usize)]) -> Result<()> {
        self.drafter.extend_context(&mut self.cache, features, commits)
    }

    fn window(&self) -> Option<usize> {
        self.drafter.config().sliding_window
    }

    fn skip(&mut self, slot: usize, len: usize) -> Result<()> {
        self.drafter.skip_context(&mut self.cache, slot, len)
    }

    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Proposal>> {
        let slots = self.block_size();
        let mut proposals = vec![Proposal::default(); requests.len()];
        let mut anchors = Vec::new();
        let mut previous = Vec::new();
        for request in requests {
            let Some(&anchor) = request.tokens.last() else {
                return Err(Error::Batch("a draft request without an anchor".into()));
            };
            let known = self.cache.len(request.slot);
            if known + 1 != request.tokens.len() {
                return Err(Error::Batch(format!(
                    "{known} context rows before an anchor at {}",
                    request.tokens.len() - 1
                )));
            }
            anchors.push((request.slot, anchor));
            previous.push(anchor);
        }
        let steps = requests.iter().map(|r| r.most.min(slots)).max().unwrap_or(0);
        if steps == 0 {
            return Ok(proposals);
        }
        let hidden = self.drafter.predicting_rows(&self.drafter.block_hidden(&self.cache, &anchors)?)?;
        let width = hidden.dims()[1];
        let blocks = hidden.reshape((requests.len(), slots, width))?.narrow(1, 0, steps)?.contiguous()?;
        let used = blocks.reshape((requests.len() * steps, width))?;
        let base = self.lm_head.forward(&used)?;
        let (storage, layout) = base.storage_and_layout();
        let (base, vocab) = (host(&storage, layout)?, base.dims()[1]);
        let mut previous_of_row = vec![0; requests.len() * steps];
        let mut logits = Vec::with_capacity(vocab);
        let mut state = MarkovState::default();
        // Left to right: the token drawn at slot j conditions the bias of slot j + 1 (Eq. 4–6).
        for j in 0..steps {
            let bias = match self.drafter.markov_head() {
                Some(markov) => {
                    let embedding = markov.embedding(&previous)?;
                    Some(markov.bias(&markov.latent(&embedding, &slot_rows(&blocks, j)?, &mut state)?)?)
                }
                None => None,
            };
            let bias = bias.as_ref().map(Tensor::storage_and_layout);
            let bias = bias.as_ref().map(|(storage, layout)| host(storage, layout)).transpose()?;
            for (i, request) in requests.iter().enumerate().filter(|(_, request)| j < request.most) {
                if proposals[i].fault.is_some() {
                    continue;
                }
                let row = i * steps + j;
                let base = &base[row * vocab..(row + 1) * vocab];
                logits.clear();
                match bias {
                    Some(bias) => logits.extend(base.iter().zip(&bias[i * vocab..(i + 1) * vocab]).map(|(u, b)| u + b)),
                    None => logits.extend_from_slice(base),
                }
                if let Some(token) = proposals[i].draw(&mut logits, request, self.drafter.vocabulary())? {
                    previous_of_row[row] = std::mem::replace(&mut previous[i], token);
                }
            }
        }
        if let Some(head) = self.drafter.confidence_head() {
            let embedding = self.drafter.markov_head().map(|markov| markov.embedding(&previous_of_row)).transpose()?;
            let confidence: Vec<f32> = head.logits(&used, embedding.as_ref())?.to_vec1()?;
            for (proposal, confidence) in proposals.iter_mut().zip(confidence.chunks_exact(steps)) {
                proposal.set_confidences(confidence);
                if let Some(temperatures) = self.drafter.calibration() {
                    temperatures.scale(&mut proposal.confidence_logits);
                }
            }
        }
        Ok(proposals)
    }

    fn release(&mut self, slot: usize) {
        self.cache.truncate(slot, 0);
    }
}

/// The head that a drafter drafts with: its own, or the target's, which fits one without a draft vocabulary. `sizes` are those of
/// the target's vocabulary and of the drafter's.
///
/// # Errors
/// When the head has not one output per draft token.
pub(super) fn output_head<'a>(
    own: Option<&'a Linear>,
    target_head: &'a Linear,
    vocabulary: Option<&DraftVocabulary>,
    (vocab, draft_vocab): (usize, usize),
) -> Result<&'a Linear> {
    let head = own.unwrap_or(target_head);
    let (outputs, known) = (head.outputs(), vocabulary.map_or(vocab, DraftVocabulary::size));
    if outputs != draft_vocab || known != draft_vocab {
        return Err(Error::Batch(format!("{outputs} outputs and {known} known tokens for {draft_vocab} draft tokens")));
    }
    Ok(head)
}

/// Values of rows that lie in host memory.
///
/// # Errors
/// When they lie elsewhere, are not contiguous, or not f32.
pub fn host<'a>(storage: &'a Storage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((from, to))) => Ok(&storage.as_slice::<f32>()?[from..to]),
        _ => Err(Error::Batch("logits that are not rows in host memory".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn propose(tokens: &[u32], most: usize) -> Proposal {
        let request = DraftRequest {
            slot: 0,
            tokens,
            most,
            stop_ids: &[],
            sampling: &SamplingParams::greedy(),
            adjustments: None,
            seed: 0,
            round: 0,
        };
        NgramProposer::new(4, 7).propose(&[request]).unwrap().remove(0)
    }

    #[test]
    fn ngram_takes_the_longest_suffix_and_its_latest_occurrence() {
        let found = |tokens, most| {
            let proposal = propose(tokens, most);
            (proposal.matched, proposal.tokens)
        };
        assert_eq!(found(&[1, 2, 3, 9, 1, 2, 4, 7, 1, 2], 7), (2, vec![4, 7, 1, 2]));
        assert_eq!(found(&[5, 1, 2, 8, 6, 2, 0, 1, 2], 2), (2, vec![8, 6]));
        assert_eq!(found(&[3, 3, 3], 7), (2, vec![3]));
        assert_eq!(found(&[1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], 1), (4, vec![9]));
        assert_eq!(found(&[1, 2, 3], 7), (0, vec![]));
        assert_eq!(found(&[1], 7), (0, vec![]));
        assert_eq!(found(&[], 7), (0, vec![]));
        assert_eq!(found(&[1, 1, 1, 1], 0), (0, vec![]));
    }

    #[test]
    fn one_pass_finds_what_a_search_per_length_finds() {
        for seed in 0..200 {
            let draws = CounterRng::new(seed, Stream::Init, 0);
            let tokens: Vec<u32> = (0..60).map(|i| draws.below(i, 4) as u32).collect();
            let n = tokens.len();
            let expected = (1..=4).rev().find_map(|length| {
                let is_match = |&start: &usize| tokens[start..start + length] == tokens[n - length..];
                (0..n - length).rev().find(is_match).map(|start| (length, start + length))
            });
            let found = propose(&tokens, 7);
            let (matched, from) = expected.unwrap_or((0, n));
            assert_eq!((found.matched, &found.tokens[..]), (matched, &tokens[from..n.min(from + 7)]), "{tokens:?}");
        }
    }
}
