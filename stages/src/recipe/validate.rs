//! Checks of a recipe's values, alone and together. All problems are reported at once.

use std::fmt::Display;

use super::layers::check_ids;
use super::{Algorithm, MarkovInit, Phase, PromptSource, Recipe, SharedExpert, TargetLayers};
use crate::error::{Error, Result};

/// Longest block that a drafter's configuration may state.
const MAX_BLOCK_SIZE: usize = 256;
/// Most steps of training-time test.
const MAX_TTT_LENGTH: usize = 64;
/// Longest suffix of the n-gram lookup.
const MAX_NGRAM: usize = 64;

/// Collects what is wrong.
#[derive(Default)]
struct Problems(Vec<String>);

impl Problems {
    fn check(&mut self, fits: bool, field: &str, value: impl Display, allowed: impl Display) {
        if !fits {
            self.0.push(format!("`{field}` is {value}, allowed: {allowed}"));
        }
    }

    fn at_least_one(&mut self, field: &str, value: u64) {
        self.check(value >= 1, field, value, "at least 1");
    }

    fn not_negative(&mut self, field: &str, value: f64) {
        self.check(value.is_finite() && value >= 0.0, field, value, "a number of at least 0");
    }

    fn positive(&mut self, field: &str, value: f64) {
        self.check(value.is_finite() && value > 0.0, field, value, "a number above 0");
    }

    fn share(&mut self, field: &str, value: f64) {
        self.check((0.0..=1.0).contains(&value), field, value, "0 to 1");
    }

    fn seed(&mut self, field: &str, value: u64) {
        self.check(i64::try_from(value).is_ok(), field, value, format!("0 to {}", i64::MAX));
    }

    fn filters(&mut self, section: &str, top_p: f64, min_p: f64) {
        self.check(top_p > 0.0 && top_p <= 1.0, &format!("{section}.top_p"), top_p, "above 0, at most 1");
        self.share(&format!("{section}.min_p"), min_p);
    }
}

impl Recipe {
    pub(super) fn check(&self, origin: &str) -> Result<()> {
        let mut problems = Problems::default();
        self.check_data(&mut problems);
        self.check_draft(&mut problems);
        self.check_eagle3(&mut problems);
        self.check_train(&mut problems);
        self.check_phases(&mut problems);
        self.check_eval(&mut problems);
        match problems.0.as_slice() {
            [] => Ok(()),
            list => Err(Error::Recipe { origin: origin.into(), problem: list.join("\n") }),
        }
    }

    fn check_data(&self, problems: &mut Problems) {
        let Self { target, data, prepare, .. } = self;
        problems.check(
            !target.model.trim().is_empty(),
            "target.model",
            "empty",
            "a folder, file, Hub id or `pypi:` name",
        );
        problems.share("data.max_bad_ratio", data.max_bad_ratio);
        problems.check(data.limit != Some(0), "data.limit", 0, "at least 1, or no such key for all prompts");
        problems.check(
            prepare.regenerate || data.prompts != PromptSource::BuiltIn,
            "prepare.regenerate",
            "false",
            "true, since the built-in prompts of `data.prompts` have no answers",
        );
        let samples = prepare.samples_per_prompt;
        problems.at_least_one("prepare.samples_per_prompt", samples as u64);
        problems.check(
            samples <= 1 || (prepare.regenerate && !prepare.sampling().is_greedy()),
            "prepare.samples_per_prompt",
            samples,
            "1 where the answers of a prompt are all the same (`regenerate` false or `temperature` 0)",
        );
        problems.not_negative("prepare.temperature", prepare.temperature);
        problems.filters("prepare", prepare.top_p, prepare.min_p);
        problems.at_least_one("prepare.max_new_tokens", prepare.max_new_tokens as u64);
        problems.check(
            prepare.max_length > prepare.max_new_tokens,
            "prepare.max_length",
            prepare.max_length,
            format!("more than `prepare.max_new_tokens` ({})", prepare.max_new_tokens),
        );
        problems.at_least_one("prepare.batch_size", prepare.batch_size as u64);
        problems.at_least_one("prepare.samples_per_shard", prepare.samples_per_shard as u64);
        problems.seed("prepare.seed", prepare.seed);
    }

    fn check_draft(&self, problems: &mut Problems) {
        let draft = &self.draft;
        problems.at_least_one("draft.num_layers", draft.num_layers as u64);
        let precision = draft.precision;
        let is_storable = precision.of_drafter() == precision;
        problems.check(is_storable, "draft.precision", "q4", "f32, bf16 or q8: no drafter has weights in 4 bits");
        let range = 1..=MAX_BLOCK_SIZE;
        problems.check(range.contains(&draft.block_size), "draft.block_size", draft.block_size, "1 to 256");
        problems.check(
            draft.sample_from_anchor || draft.block_size != 1,
            "draft.block_size",
            1,
            "at least 2 with `sample_from_anchor` false, since the anchor's row predicts nothing",
        );
        if let TargetLayers::Ids(ids) = &draft.target_layer_ids
            && let Err(allowed) = check_ids(ids, i32::MAX)
        {
            problems.check(false, "draft.target_layer_ids", format!("{ids:?}"), allowed);
        }
        if draft.algorithm == Algorithm::Dflash {
            problems.check(draft.markov_rank == 0, "draft.markov_rank", draft.markov_rank, "0 for `dflash`");
            problems.check(!draft.confidence_head, "draft.confidence_head", "true", "false for `dflash`");
        }
        problems.check(
            !draft.confidence_head_with_markov || (draft.confidence_head && draft.markov_rank > 0),
            "draft.confidence_head_with_markov",
            "true",
            "false without `confidence_head` or with `markov_rank` 0",
        );
        problems.check(
            draft.markov_rank > 0 || self.init.markov == MarkovInit::Random,
            "init.markov",
            "bigram",
            "random with `draft.markov_rank` 0",
        );
        problems.check(draft.vocab_size != Some(0), "draft.vocab_size", 0, "at least 1, or no such key for all tokens");
        if let Some(size) = draft.vocab_size.filter(|&size| size > 0) {
            let rank = draft.markov_rank;
            let allowed =
                format!("at least `draft.markov_rank` ({rank}), the rank that a head of so many tokens can have");
            problems.check(size >= rank, "draft.vocab_size", size, allowed);
        }
        problems.check(draft.sliding_window != Some(0), "draft.sliding_window", 0, "at least 1, or no such key");
        self.check_experts(problems);
    }

    fn check_experts(&self, problems: &mut Problems) {
        let (draft, train) = (&self.draft, &self.train);
        let sizes = [
            ("draft.num_experts", draft.num_experts),
            ("draft.experts_per_token", draft.experts_per_token),
            ("draft.moe_intermediate_size", draft.moe_intermediate_size),
        ];
        let given = sizes.iter().filter(|(_, size)| size.is_some()).count();
        for (field, size) in sizes {
            problems.check(size != Some(0), field, 0, "at least 1, or no such key");
            let others =
                "that `draft.num_experts`, `experts_per_token` and `moe_intermediate_size` are all there or none is";
            problems.check(size.is_some() || given == 0, field, "absent", others);
        }
        if let (Some(experts), Some(per_token)) = (draft.num_experts, draft.experts_per_token) {
            let allowed = format!("at most `draft.num_experts` ({experts})");
            problems.check(per_token <= experts, "draft.experts_per_token", per_token, allowed);
        }
        let without = "no such key without `draft.num_experts`";
        problems.check(given > 0 || draft.shared_expert.is_none(), "draft.shared_expert", "given", without);
        problems.check(
            draft.shared_expert != Some(SharedExpert::Width(0)),
            "draft.shared_expert",
            0,
            "true, false or at least 1",
        );
        for (field, weight) in [("train.load_balance", train.load_balance), ("train.router_z", train.router_z)] {
            problems.not_negative(field, weight.unwrap_or(0.0));
            problems.check(given > 0 || weight.is_none(), field, "given", without);
        }
    }

    /// Keys that only Eagle3 has, and those of block drafters that mean nothing to it.
    fn check_eagle3(&self, problems: &mut Problems) {
        let Self { draft, train, .. } = self;
        let keys = [
            ("draft.ttt_length", draft.ttt_length.is_some()),
            ("train.step_loss_decay", train.step_loss_decay.is_some()),
        ];
        if draft.algorithm != Algorithm::Eagle3 {
            for (key, is_given) in keys {
                problems.check(!is_given, key, "given", "no such key but for `eagle3`");
            }
            return;
        }
        for (key, is_given) in keys {
            problems.check(is_given, key, "absent", "a value, for `eagle3`");
        }
        if let Some(steps) = draft.ttt_length {
            problems.check((1..=MAX_TTT_LENGTH).contains(&steps), "draft.ttt_length", steps, "1 to 64");
            let block = draft.block_size;
            problems.check(
                block == steps,
                "draft.block_size",
                block,
                format!("`draft.ttt_length` ({steps}) for `eagle3`"),
            );
        }
        if let Some(decay) = train.step_loss_decay {
            problems.check(decay > 0.0 && decay <= 1.0, "train.step_loss_decay", decay, "above 0, at most 1");
        }
        problems.check(draft.num_layers == 1, "draft.num_layers", draft.num_layers, "1 for `eagle3`");
        problems.check(draft.markov_rank == 0, "draft.markov_rank", draft.markov_rank, "0 for `eagle3`");
        problems.check(!draft.confidence_head, "draft.confidence_head", "true", "false for `eagle3`");
        problems.check(draft.sliding_window.is_none(), "draft.sliding_window", "given", "no such key for `eagle3`");
        problems.check(draft.num_experts.is_none(), "draft.num_experts", "given", "no such key for `eagle3`");
        problems.check(draft.sample_from_anchor, "draft.sample_from_anchor", "false", "no such key for `eagle3`");
        problems.check(train.num_anchors == 0, "train.num_anchors", train.num_anchors, "0 for `eagle3`");
        let gamma = train.loss_decay_gamma;
        problems.check(gamma == 0.0, "train.loss_decay_gamma", gamma, "0 for `eagle3`");
        let is_soft = |phase: &Phase| [phase.ce, phase.tv, phase.kl, phase.kl_temperature] == [0.0, 0.0, 1.0, 1.0];
        problems.check(
            train.phases.iter().all(is_soft),
            "train.phases",
            "a list with other terms",
            "`kl` 1 at `kl_temperature` 1 alone for `eagle3`, whose loss is the cross-entropy to the target's distribution",
        );
    }

    fn check_train(&self, problems: &mut Problems) {
        let train = &self.train;
        match (train.epochs, train.steps) {
            (Some(_), Some(_)) => problems.check(false, "train.epochs", "given beside `train.steps`", "one of the two"),
            (None, None) => problems.check(false, "train.epochs", "absent, as is `train.steps`", "one of the two"),
            (Some(epochs), None) => problems.positive("train.epochs", epochs),
            (None, Some(steps)) => problems.at_least_one("train.steps", steps),
        }
        problems.at_least_one("train.batch_size", train.batch_size as u64);
        problems.check(
            train.micro_batch_size >= 1 && train.batch_size.is_multiple_of(train.micro_batch_size),
            "train.micro_batch_size",
            train.micro_batch_size,
            format!("a divisor of `train.batch_size` ({})", train.batch_size),
        );
        if self.draft.algorithm != Algorithm::Eagle3 {
            problems.at_least_one("train.num_anchors", train.num_anchors as u64);
        }
        problems.positive("train.lr", train.lr);
        let warmup = train.warmup_ratio;
        problems.check((0.0..1.0).contains(&warmup), "train.warmup_ratio", warmup, "at least 0, below 1");
        problems.not_negative("train.weight_decay", train.weight_decay);
        problems.positive("train.max_grad_norm", train.max_grad_norm);
        problems.not_negative("train.loss_decay_gamma", train.loss_decay_gamma);
        let decay = train.ema.unwrap_or(0.5);
        problems.check(decay > 0.0 && decay < 1.0, "train.ema", decay, "above 0, below 1, or no such key");
        problems.at_least_one("train.checkpoint_every", train.checkpoint_every);
        problems.at_least_one("train.keep_checkpoints", train.keep_checkpoints as u64);
        problems.at_least_one("train.log_every", train.log_every);
        problems.at_least_one("train.acceptance_prompts", train.acceptance_prompts as u64);
        problems.seed("train.seed", train.seed);
    }

    fn check_phases(&self, problems: &mut Problems) {
        let phases = &self.train.phases;
        let ends: Vec<f64> = phases.iter().map(|phase| phase.until).collect();
        problems.check(
            ends.first().is_some_and(|first| *first > 0.0)
                && ends.is_sorted_by(|a, b| a < b)
                && ends.last() == Some(&1.0),
            "train.phases",
            format!("a list with `until` {ends:?}"),
            "at least one phase, `until` above 0, rising, and 1 for the last",
        );
        for (index, phase) in phases.iter().enumerate() {
            let field = |name: &str| format!("train.phases.{index}.{name}");
            for (name, weight) in
                [("ce", phase.ce), ("tv", phase.tv), ("kl", phase.kl), ("confidence", phase.confidence)]
            {
                problems.not_negative(&field(name), weight);
            }
            problems.positive(&field("kl_temperature"), phase.kl_temperature);
            let sum = phase.ce + phase.tv + phase.kl;
            problems.check(sum != 0.0, &field("ce"), "0, as are `tv` and `kl`", "at least one of them above 0");
            problems.check(
                phase.confidence == 0.0 || self.draft.confidence_head,
                &field("confidence"),
                phase.confidence,
                "0 without `draft.confidence_head`",
            );
        }
        problems.check(
            !self.draft.confidence_head || phases.iter().any(|phase| phase.confidence > 0.0),
            "train.phases",
            "without a `confidence` above 0",
            "at least one such phase, since `draft.confidence_head` would stay untrained",
        );
    }

    fn check_eval(&self, problems: &mut Problems) {
        let eval = &self.eval;
        problems.check(!eval.prompts.is_empty(), "eval.prompts", "empty", "at least one set");
        problems.check(!has_repeats(&eval.prompts), "eval.prompts", "a list with a repeat", "each set once");
        problems.check(eval.limit != Some(0), "eval.limit", 0, "at least 1, or no such key for all prompts");
        problems.at_least_one("eval.max_new_tokens", eval.max_new_tokens as u64);
        let temperatures = &eval.temperatures;
        problems.check(
            !temperatures.is_empty()
                && !has_repeats(temperatures)
                && temperatures.iter().all(|t| t.is_finite() && *t >= 0.0),
            "eval.temperatures",
            format!("{temperatures:?}"),
            "at least one number, each once and at least 0",
        );
        problems.filters("eval", eval.top_p, eval.min_p);
        problems.check(
            !eval.proposers.is_empty() && !has_repeats(&eval.proposers),
            "eval.proposers",
            format!("[{}]", eval.proposers.iter().map(|proposer| proposer.name()).collect::<Vec<_>>().join(", ")),
            "at least one of `plain`, `ngram`, `draft` and `hybrid`, each once",
        );
        problems.check((1..=MAX_NGRAM).contains(&eval.ngram_max), "eval.ngram_max", eval.ngram_max, "1 to 64");
        let range = 1..=MAX_BLOCK_SIZE;
        problems.check(range.contains(&eval.ngram_block), "eval.ngram_block", eval.ngram_block, "1 to 256");
        let threshold = eval.confidence_threshold;
        problems.check((0.0..1.0).contains(&threshold), "eval.confidence_threshold", threshold, "at least 0, below 1");
        problems.check(
            threshold == 0.0 || self.draft.confidence_head || !eval.needs_drafter(),
            "eval.confidence_threshold",
            threshold,
            "0 without `draft.confidence_head`",
        );
        problems.seed("eval.seed", eval.seed);
        problems.at_least_one("eval.batch_size", eval.batch_size as u64);
    }
}

fn has_repeats<T: PartialEq>(list: &[T]) -> bool {
    list.iter().enumerate().any(|(index, item)| list[..index].contains(item))
}
