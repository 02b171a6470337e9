//! Drafting with Eagle3: token after token, each from the drafter's own last output row.

use candle_core::Tensor;

use super::propose::{host, output_head};
use super::{DraftRequest, Proposal, Proposer};
use crate::draft::eagle3::Eagle3;
use crate::error::{Error, Result};
use crate::kv_cache::KvCache;
use crate::linear::Linear;
use crate::target::select_rows;

/// A trained Eagle3 drafter with the committed rows of the engine's slots.
///
/// A row needs the token after its position, so what [`Proposer::observe`] brings waits for the next proposal. A proposal ends
/// early behind a drafted stop token.
#[derive(Debug)]
pub struct Eagle3Proposer<'a> {
    drafter: &'a Eagle3,
    lm_head: &'a Linear,
    cache: KvCache,
    /// Per slot, hidden rows of committed positions that are not in the cache yet.
    waiting: Vec<Vec<Tensor>>,
}

impl<'a> Eagle3Proposer<'a> {
    /// A proposer for `slots` sequences of at most `capacity` committed tokens. A drafter without an output head of its
    /// own uses `target_head`, which one with a draft vocabulary cannot.
    ///
    /// # Errors
    /// When the head has not one output per draft token, or the memory cannot be had.
    pub fn new(drafter: &'a Eagle3, target_head: &'a Linear, slots: usize, capacity: usize) -> Result<Self> {
        let config = drafter.config();
        let sizes = (config.body.vocab_size, config.draft_vocab());
        let lm_head = output_head(drafter.lm_head.as_ref(), target_head, drafter.vocabulary(), sizes)?;
        let cache = drafter.new_context(slots, capacity + drafter.config().ttt_length)?;
        Ok(Self { drafter, lm_head, cache, waiting: vec![Vec::new(); slots] })
    }

    /// Brings the committed rows of the requests into the cache; the output row of each request's last position.
    fn commit(&mut self, requests: &[&DraftRequest<'_>]) -> Result<Tensor> {
        let (mut hidden, mut tokens, mut commits) = (Vec::new(), Vec::new(), Vec::new());
        for request in requests {
            let known = self.cache.len(request.slot);
            let waiting = std::mem::take(&mut self.waiting[request.slot]);
            let len = waiting.iter().map(|rows| rows.dims()[0]).sum::<usize>();
            if len == 0 || known + len + 1 != request.tokens.len() {
                return Err(Error::Batch(format!(
                    "{known} rows and {len} new ones before an anchor at {}",
                    request.tokens.len() as i64 - 1
                )));
            }
            hidden.extend(waiting);
            tokens.extend_from_slice(&request.tokens[known + 1..]);
            commits.push((request.slot, len));
        }
        self.drafter.extend_context(&mut self.cache, &Tensor::cat(&hidden, 0)?, &tokens, &commits)
    }

    /// Draws the next token of each request from its output row and adds it to its proposal.
    fn draw(&self, hidden: &Tensor, drafting: &[(usize, &DraftRequest<'_>)], proposals: &mut [Proposal]) -> Result<()> {
        let logits = self.lm_head.forward(&self.drafter.head_rows(hidden)?)?;
        let vocab = logits.dims()[1];
        let (storage, layout) = logits.storage_and_layout();
        let logits = host(&storage, layout)?;
        let mut adjusted = Vec::with_capacity(vocab);
        for (&(place, request), row) in drafting.iter().zip(logits.chunks_exact(vocab)) {
            adjusted.clear();
            adjusted.extend_from_slice(row);
            proposals[place].draw(&mut adjusted, request, self.drafter.vocabulary())?;
        }
        Ok(())
    }
}

impl Proposer for Eagle3Proposer<'_> {
    fn name(&self) -> &'static str {
        "eagle3"
    }

    fn block_size(&self) -> usize {
        self.drafter.config().ttt_length
    }

    fn feature_layers(&self) -> &[i32] {
        &self.drafter.config().target_layer_ids
    }

    fn observe(&mut self, features: &Tensor, commits: &[(usize, usize)]) -> Result<()> {
        let rows = self.drafter.feature_rows(features)?;
        let mut first = 0;
        for &(slot, len) in commits {
            // A copy: a view would hold the rows of all sequences.
            self.waiting[slot].push(rows.narrow(0, first, len)?.force_contiguous()?);
            first += len;
        }
        Ok(())
    }

    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Result<Vec<Proposal>> {
        let mut proposals = vec![Proposal::default(); requests.len()];
        let mut drafting: Vec<(usize, &DraftRequest<'_>)> =
            requests.iter().enumerate().filter(|(_, request)| request.most > 0).collect();
        if drafting.is_empty() {
            return Ok(proposals);
        }
        let mut hidden = self.commit(&drafting.iter().map(|&(_, request)| request).collect::<Vec<_>>())?;
        self.draw(&hidden, &drafting, &mut proposals)?;
        for ahead in 0..self.block_size() - 1 {
            let is_open = |&(place, request): &(usize, &DraftRequest<'_>)| {
                let Proposal { tokens, fault, .. } = &proposals[place];
                tokens.len() < request.most
                    && fault.is_none()
                    && tokens.last().is_some_and(|last| !request.stop_ids.contains(last))
            };
            let rows: Vec<usize> = (0..drafting.len()).filter(|&row| is_open(&drafting[row])).collect();
            if rows.len() < drafting.len() {
                hidden = select_rows(&hidden, &rows)?;
                drafting = rows.iter().map(|&row| drafting[row]).collect();
            }
            if drafting.is_empty() {
                break;
            }
            let slots: Vec<usize> = drafting.iter().map(|(_, request)| request.slot).collect();
            let tokens: Vec<u32> =
                drafting.iter().filter_map(|&(place, _)| proposals[place].tokens.last().copied()).collect();
            hidden = self.drafter.draft_rows(&self.cache, &hidden, &tokens, &slots, ahead)?;
            self.draw(&hidden, &drafting, &mut proposals)?;
        }
        Ok(proposals)
    }

    fn release(&mut self, slot: usize) {
        self.cache.truncate(slot, 0);
        self.waiting[slot].clear();
    }
}
