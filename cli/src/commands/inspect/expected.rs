//! The tensors that a configuration implies, so that everything wrong with a checkpoint can be listed at once. The
//! loaders of the models crate take the same tensors, but stop at the first fault.

use std::collections::BTreeMap;

use deepspec_models::config::{DraftConfig, MarkovHeadType, MoeConfig, TargetConfig};

/// Names and shapes that must be there, and those that may be.
#[derive(Debug, Default)]
pub(super) struct Expected {
    required: BTreeMap<String, Vec<usize>>,
    optional: BTreeMap<String, Vec<usize>>,
}

impl Expected {
    /// Tensors of a target, under Hugging Face names.
    pub(super) fn of_target(config: &TargetConfig) -> Self {
        let mut expected = Self::default();
        let table = [config.vocab_size, config.hidden_size];
        expected.require("model.embed_tokens.weight", &table);
        expected.require("model.norm.weight", &[config.hidden_size]);
        if config.tie_word_embeddings {
            expected.optional.insert("lm_head.weight".into(), table.into());
        } else {
            expected.require("lm_head.weight", &table);
        }
        expected.layers("model.", config, None);
        expected
    }

    /// Tensors of a DSpark or DFlash drafter. The frozen embedding and head may be left to the target's checkpoint.
    pub(super) fn of_drafter(config: &DraftConfig) -> Self {
        let mut expected = Self::default();
        let (hidden, vocab, rank) = (config.body.hidden_size, config.body.vocab_size, config.markov_rank);
        let draft_vocab = config.draft_vocab();
        expected.optional.insert("embed_tokens.weight".into(), vec![vocab, hidden]);
        // A drafter with fewer tokens than the target cannot borrow its head.
        if config.draft_vocab_size.is_some() {
            expected.require("lm_head.weight", &[draft_vocab, hidden]);
            expected.require("d2t", &[draft_vocab]);
        } else {
            expected.optional.insert("lm_head.weight".into(), vec![vocab, hidden]);
            expected.optional.insert("d2t".into(), vec![vocab]);
        }
        expected.optional.insert("t2d".into(), vec![vocab]);
        expected.require("fc.weight", &[hidden, config.target_layer_ids.len() * hidden]);
        expected.require("hidden_norm.weight", &[hidden]);
        expected.require("norm.weight", &[hidden]);
        expected.layers("", &config.body, config.moe.as_ref());
        if let Some(kind) = config.markov_head_type {
            expected.require("markov_head.markov_w1.weight", &[vocab, rank]);
            expected.require("markov_head.markov_w2.weight", &[draft_vocab, rank]);
            match kind {
                MarkovHeadType::Vanilla => {}
                MarkovHeadType::Gated => expected.linear("markov_head.gate_proj", rank, hidden + rank, true),
                MarkovHeadType::Rnn => expected.linear("markov_head.joint_proj", 3 * rank, hidden + 2 * rank, true),
            }
        }
        if config.enable_confidence_head {
            let markov = if config.confidence_head_with_markov { rank } else { 0 };
            expected.linear("confidence_head.proj", 1, hidden + markov, true);
        }
        expected
    }

    /// The shape that a tensor must have, if it is known.
    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.required.get(name).or_else(|| self.optional.get(name)).map(Vec::as_slice)
    }

    /// Tensors without which the model does not load.
    pub(super) fn required(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.required.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()))
    }

    fn require(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.required.insert(name.into(), shape.into());
    }

    fn linear(&mut self, name: &str, outputs: usize, inputs: usize, has_bias: bool) {
        self.require(format!("{name}.weight"), &[outputs, inputs]);
        if has_bias {
            self.require(format!("{name}.bias"), &[outputs]);
        }
    }

    fn layers(&mut self, prefix: &str, config: &TargetConfig, moe: Option<&MoeConfig>) {
        let TargetConfig { hidden_size, intermediate_size, head_dim, attention_bias, mlp_bias, .. } = *config;
        let (q_width, kv_width) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        for layer in 0..config.num_hidden_layers {
            let at = |name: &str| format!("{prefix}layers.{layer}.{name}");
            self.require(at("input_layernorm.weight"), &[hidden_size]);
            self.require(at("post_attention_layernorm.weight"), &[hidden_size]);
            self.linear(&at("self_attn.q_proj"), q_width, hidden_size, attention_bias);
            self.linear(&at("self_attn.k_proj"), kv_width, hidden_size, attention_bias);
            self.linear(&at("self_attn.v_proj"), kv_width, hidden_size, attention_bias);
            self.linear(&at("self_attn.o_proj"), hidden_size, q_width, attention_bias);
            if let Some(moe) = moe {
                for (name, shape) in moe.tensors(hidden_size) {
                    self.require(at(&name), &shape);
                }
            } else {
                self.linear(&at("mlp.gate_proj"), intermediate_size, hidden_size, mlp_bias);
                self.linear(&at("mlp.up_proj"), intermediate_size, hidden_size, mlp_bias);
                self.linear(&at("mlp.down_proj"), hidden_size, intermediate_size, mlp_bias);
            }
            if config.qk_norm {
                self.require(at("self_attn.q_norm.weight"), &[head_dim]);
                self.require(at("self_attn.k_norm.weight"), &[head_dim]);
            }
        }
    }
}
