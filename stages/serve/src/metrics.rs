//! Counters of the server, in Prometheus' text form. Names that begin with `vllm:` are those that dashboards for that server
//! look for.

use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;

use super::api_error::Reason;
use deepspec_engine::{DrafterFaults, FinishReason, PhaseTimes, RoundRecord};

/// Upper ends of the buckets of times, in seconds.
const BUCKETS: [f64; 14] = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0];
/// Weight of a new step in the running means.
const RATE: f64 = 0.05;

/// How often a value lay below each bucket's end.
#[derive(Debug, Clone, Default)]
struct Histogram {
    counts: [u64; BUCKETS.len()],
    count: u64,
    sum: f64,
}

impl Histogram {
    fn observe(&mut self, value: f64) {
        for (count, _) in self.counts.iter_mut().zip(BUCKETS).filter(|(_, end)| value <= *end) {
            *count += 1;
        }
        self.count += 1;
        self.sum += value;
    }
}

/// Why a request left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It was answered.
    Finished(FinishReason),
    /// Its client left, or the server stopped.
    Aborted,
    /// The engine failed.
    Failed,
}

/// What a drafter has brought over a number of rounds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct DraftTotals {
    /// Rounds in which it was asked, trials included.
    pub(super) drafted: u64,
    /// Tokens committed by them.
    pub(super) tokens: u64,
    /// Rounds in which it was left out because it did not pay.
    pub(super) left_out: u64,
}

impl DraftTotals {
    /// Rounds in which it was thought of.
    pub(super) fn considered(self) -> u64 {
        self.drafted + self.left_out
    }

    /// What has come since `earlier`.
    pub(super) fn since(self, earlier: Self) -> Self {
        Self {
            drafted: self.drafted - earlier.drafted,
            tokens: self.tokens - earlier.tokens,
            left_out: self.left_out - earlier.left_out,
        }
    }
}

/// All counters.
#[derive(Debug, Clone, Default)]
struct Counters {
    running: usize,
    waiting: usize,
    prompt_tokens: u64,
    generation_tokens: u64,
    rounds: u64,
    /// Tokens committed by rounds.
    committed: u64,
    /// Rounds with proposed tokens.
    drafts: u64,
    drafted: u64,
    verified: u64,
    accepted: u64,
    accepted_per_position: Vec<u64>,
    drafter: DraftTotals,
    stopped: u64,
    length: u64,
    aborted: u64,
    failed: u64,
    refused: [u64; Reason::ALL.len()],
    first_token: Histogram,
    per_token: Histogram,
    whole: Histogram,
    times: PhaseTimes,
    is_idle_drafter: bool,
    drafter_faults: Option<DrafterFaults>,
    recent: Recent,
}

/// Running means over the last steps, for the live page.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(super) struct Recent {
    /// Tokens per second of all sequences together.
    pub(super) tokens_per_s: f64,
    /// Tokens per second that plain decoding of as many sequences would give; 0 where that is not known.
    pub(super) plain_tokens_per_s: f64,
    /// Tokens committed per round.
    pub(super) tau: f64,
    /// Tokens verified per sequence and round.
    pub(super) verified: f64,
    /// Rows of a pass.
    pub(super) rows: f64,
    /// Sequences in work.
    pub(super) running: usize,
    /// Requests that wait.
    pub(super) waiting: usize,
}

/// What one step was.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) duration: Duration,
    pub(super) tokens: usize,
    pub(super) running: usize,
    pub(super) waiting: usize,
    /// Seconds of a plain pass for as many sequences.
    pub(super) plain_s: Option<f64>,
    pub(super) times: PhaseTimes,
    /// Whether a prompt was read, too: the step then tells little of decoding.
    pub(super) reads_prompt: bool,
}

/// The counters, shared between the engine and the routes.
#[derive(Debug, Default)]
pub(super) struct Metrics(Mutex<Counters>);

impl Metrics {
    fn with<T>(&self, change: impl FnOnce(&mut Counters) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A request was refused.
    pub(super) fn refused(&self, reason: Reason) {
        let at = Reason::ALL.iter().position(|&other| other == reason);
        self.with(|counters| at.map(|at| counters.refused[at] += 1));
    }

    /// A request was taken.
    pub(super) fn admitted(&self, prompt_tokens: usize) {
        self.with(|counters| counters.prompt_tokens += prompt_tokens as u64);
    }

    /// The first token of a request came after so long.
    pub(super) fn first_token(&self, after: Duration) {
        self.with(|counters| counters.first_token.observe(after.as_secs_f64()));
    }

    /// A request left after so long with so many tokens, the first of them after `first`.
    pub(super) fn left(&self, outcome: Outcome, whole: Duration, first: Option<Duration>, tokens: usize) {
        self.with(|counters| {
            match outcome {
                Outcome::Finished(FinishReason::Stop) => counters.stopped += 1,
                Outcome::Finished(FinishReason::Length) => counters.length += 1,
                Outcome::Aborted => counters.aborted += 1,
                Outcome::Failed => counters.failed += 1,
            }
            if let (Outcome::Finished(_), Some(first)) = (outcome, first) {
                counters.whole.observe(whole.as_secs_f64());
                if tokens > 1 {
                    counters.per_token.observe(whole.saturating_sub(first).as_secs_f64() / (tokens - 1) as f64);
                }
            }
        });
    }

    /// A round of a sequence.
    pub(super) fn round(&self, round: &RoundRecord) {
        self.with(|counters| {
            counters.rounds += 1;
            counters.committed += round.committed as u64;
            counters.drafts += u64::from(round.proposed > 0);
            counters.drafted += round.block.len() as u64;
            counters.verified += round.proposed as u64;
            counters.accepted += round.accepted as u64;
            counters.drafter.left_out += u64::from(round.is_fallback);
            if round.drafted > 0 {
                counters.drafter.drafted += 1;
                counters.drafter.tokens += round.committed as u64;
            }
            let positions = &mut counters.accepted_per_position;
            positions.resize(positions.len().max(round.proposed), 0);
            for count in &mut positions[..round.accepted] {
                *count += 1;
            }
            let recent = &mut counters.recent;
            let weight = if counters.rounds == 1 { 1.0 } else { RATE };
            recent.tau += weight * (round.committed as f64 - recent.tau);
            recent.verified += weight * (round.proposed as f64 - recent.verified);
        });
    }

    /// A step of the engine.
    pub(super) fn step(&self, step: Step, rows: usize) {
        self.with(|counters| {
            counters.generation_tokens += step.tokens as u64;
            (counters.running, counters.waiting, counters.times) = (step.running, step.waiting, step.times);
            if step.reads_prompt {
                return;
            }
            let recent = &mut counters.recent;
            let weight = if recent.rows == 0.0 { 1.0 } else { RATE };
            let rate = step.tokens as f64 / step.duration.as_secs_f64().max(1e-9);
            recent.tokens_per_s += weight * (rate - recent.tokens_per_s);
            recent.rows += weight * (rows as f64 - recent.rows);
            if let Some(plain_s) = step.plain_s {
                let plain = step.running as f64 / plain_s;
                recent.plain_tokens_per_s += weight * (plain - recent.plain_tokens_per_s);
            }
        });
    }

    /// Nothing is in work.
    pub(super) fn idle(&self) {
        self.with(|counters| (counters.running, counters.waiting) = (0, 0));
    }

    /// Whether the drafter brings next to nothing; returns whether that was so before.
    pub(super) fn set_drafter_idle(&self, is_idle: bool) -> bool {
        self.with(|counters| std::mem::replace(&mut counters.is_idle_drafter, is_idle))
    }

    /// The drafter failed.
    pub(super) fn drafter_failed(&self, faults: &DrafterFaults) {
        self.with(|counters| counters.drafter_faults = Some(faults.clone()));
    }

    /// What went wrong with the drafter, where something did.
    pub(super) fn drafter_faults(&self) -> Option<DrafterFaults> {
        self.with(|counters| counters.drafter_faults.clone())
    }

    /// Running means.
    pub(super) fn recent(&self) -> Recent {
        self.with(|counters| Recent { running: counters.running, waiting: counters.waiting, ..counters.recent })
    }

    /// What the drafter has brought so far.
    pub(super) fn draft_totals(&self) -> DraftTotals {
        self.with(|counters| counters.drafter)
    }

    /// All counters as text.
    pub(super) fn render(&self, model: &str) -> String {
        let counters = self.with(|counters| counters.clone());
        let label = model.replace('\\', r"\\").replace('"', "\\\"").replace('\n', "\\n");
        let mut text = Text { out: String::new(), label };
        let c = &counters;
        text.gauge("vllm:num_requests_running", "Sequences in work.", c.running as f64);
        text.gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", c.waiting as f64);
        text.counter("vllm:prompt_tokens", "Tokens of prompts.", c.prompt_tokens);
        text.counter("vllm:generation_tokens", "Tokens generated.", c.generation_tokens);
        text.counter("vllm:spec_decode_num_drafts", "Rounds in which proposed tokens were verified.", c.drafts);
        text.counter("vllm:spec_decode_num_draft_tokens", "Proposed tokens that were verified.", c.verified);
        text.counter("vllm:spec_decode_num_accepted_tokens", "Proposed tokens that were accepted.", c.accepted);
        let per_position = "vllm:spec_decode_num_accepted_tokens_per_pos";
        text.head(per_position, "Accepted tokens by their position in the proposal.", "counter");
        for (position, &count) in c.accepted_per_position.iter().enumerate() {
            text.line(&format!("{per_position}_total"), &format!(",position=\"{position}\""), count as f64);
        }
        text.counter("deepspec_rounds", "Rounds, those without proposals too.", c.rounds);
        text.counter("deepspec_round_tokens", "Tokens committed by rounds.", c.committed);
        text.counter("deepspec_drafted_tokens", "Proposed tokens, verified or not.", c.drafted);
        text.counter(
            "deepspec_fallback_rounds",
            "Rounds in which a drafter was left out, not paying.",
            c.drafter.left_out,
        );
        text.head("deepspec_requests_refused", "Requests refused by the reason.", "counter");
        for (reason, count) in Reason::ALL.into_iter().zip(c.refused) {
            let label = format!(",reason=\"{}\"", reason.name());
            text.line("deepspec_requests_refused_total", &label, count as f64);
        }
        text.gauge("deepspec_tokens_per_second", "Tokens per second lately.", c.recent.tokens_per_s);
        text.gauge("deepspec_tau", "Tokens committed per round lately.", c.recent.tau);
        text.gauge("deepspec_verified_per_round", "Tokens verified per sequence and round lately.", c.recent.verified);
        text.gauge(
            "deepspec_drafter_idle",
            "1 while the drafter brings next to nothing: too little is accepted, or it does not pay.",
            f64::from(u8::from(c.is_idle_drafter)),
        );
        let faults = c.drafter_faults.as_ref();
        let failed = faults.map_or(0, |faults| faults.requests as u64);
        text.counter(
            "deepspec_drafter_failed_requests",
            "Requests that went on without a drafter that failed.",
            failed,
        );
        text.gauge(
            "deepspec_drafter_dropped",
            "1 once the drafter failed so often that no request asks it any more.",
            f64::from(u8::from(faults.is_some_and(|faults| faults.is_dropped))),
        );
        text.head("vllm:request_success", "Requests by how they ended.", "counter");
        for (reason, count) in [("stop", c.stopped), ("length", c.length), ("abort", c.aborted), ("error", c.failed)] {
            text.line("vllm:request_success_total", &format!(",finished_reason=\"{reason}\""), count as f64);
        }
        text.head("deepspec_step_seconds", "Time of steps by what it was spent on.", "counter");
        for (phase, seconds) in [("draft", c.times.draft_s), ("target", c.times.target_s), ("other", c.times.other_s)] {
            text.line("deepspec_step_seconds_total", &format!(",phase=\"{phase}\""), seconds);
        }
        text.counter("deepspec_steps", "Steps of the engine.", c.times.steps);
        text.histogram("vllm:time_to_first_token_seconds", "Time to the first token.", &c.first_token);
        text.histogram("vllm:time_per_output_token_seconds", "Mean time between tokens of a request.", &c.per_token);
        text.histogram("vllm:e2e_request_latency_seconds", "Time of whole requests.", &c.whole);
        text.out
    }
}

/// Writes the text form.
struct Text {
    out: String,
    label: String,
}

impl Text {
    fn head(&mut self, name: &str, help: &str, kind: &str) {
        let _ = writeln!(self.out, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &str, value: f64) {
        let _ = writeln!(self.out, "{name}{{model_name=\"{}\"{labels}}} {value}", self.label);
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, help, "gauge");
        self.line(name, "", value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.head(name, help, "counter");
        self.line(&format!("{name}_total"), "", value as f64);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, help, "histogram");
        for (end, count) in BUCKETS.iter().zip(histogram.counts) {
            self.line(&format!("{name}_bucket"), &format!(",le=\"{end}\""), count as f64);
        }
        self.line(&format!("{name}_bucket"), ",le=\"+Inf\"", histogram.count as f64);
        self.line(&format!("{name}_sum"), "", histogram.sum);
        self.line(&format!("{name}_count"), "", histogram.count as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_count() {
        let metrics = Metrics::default();
        let round = |proposed: usize, accepted: usize| RoundRecord {
            proposed,
            accepted,
            committed: accepted + 1,
            confidence_logits: Vec::new(),
            block: vec![0; 5],
            drafted: 5,
            is_fallback: false,
        };
        metrics.round(&round(3, 2));
        metrics.round(&round(2, 1));
        metrics.round(&round(0, 0));
        metrics.first_token(Duration::from_millis(30));
        let second = Duration::from_secs(1);
        metrics.left(Outcome::Finished(FinishReason::Stop), second, Some(second / 2), 6);
        metrics.refused(Reason::TooLong);
        metrics.refused(Reason::Invalid);
        metrics.refused(Reason::Invalid);
        let text = metrics.render("a\"b");
        for line in [
            "deepspec_requests_refused_total{model_name=\"a\\\"b\",reason=\"queue_full\"} 0",
            "deepspec_requests_refused_total{model_name=\"a\\\"b\",reason=\"too_long\"} 1",
            "deepspec_requests_refused_total{model_name=\"a\\\"b\",reason=\"invalid\"} 2",
            "vllm:spec_decode_num_drafts_total{model_name=\"a\\\"b\"} 2",
            "vllm:spec_decode_num_draft_tokens_total{model_name=\"a\\\"b\"} 5",
            "vllm:spec_decode_num_accepted_tokens_total{model_name=\"a\\\"b\"} 3",
            "vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name=\"a\\\"b\",position=\"0\"} 2",
            "vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name=\"a\\\"b\",position=\"2\"} 0",
            "vllm:time_to_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"0.02\"} 0",
            "vllm:time_to_first_token_seconds_bucket{model_name=\"a\\\"b\",le=\"0.05\"} 1",
            "vllm:time_per_output_token_seconds_sum{model_name=\"a\\\"b\"} 0.1",
            "vllm:request_success_total{model_name=\"a\\\"b\",finished_reason=\"stop\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        assert_eq!(metrics.draft_totals(), DraftTotals { drafted: 3, tokens: 6, left_out: 0 });
        let recent = metrics.recent();
        assert!(recent.tau > 1.0 && recent.tau < 3.0, "{recent:?}");
    }
}
