//! The result in words and tables: for the terminal, for `README.md` and as the parts of the HTML page.

use std::fmt::Write;

use super::calibrate::CalibrationOutcome;
use super::metrics::{DEFINITIONS, ratio};
use super::outcome::{EvalOutcome, Group, ProposerResult, TemperatureResult};
use super::speed::Interval;
use crate::recipe::Proposer;

/// Prompts below which the intervals are called wide.
const FEW_PROMPTS: usize = 20;
/// Files of the reliability diagrams of a calibration.
pub(super) const RELIABILITY_BEFORE: &str = "reliability_before.svg";
pub(super) const RELIABILITY_AFTER: &str = "reliability_after.svg";
/// Row counts that the table of step costs shows.
const STEP_COST_COLUMNS: usize = 12;
/// What stands in a cell without a value.
const NONE: &str = "–";

/// A table of text; the first column holds names, the others numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// What it shows.
    pub title: String,
    /// Names of the columns.
    pub header: Vec<String>,
    /// Rows, each as long as the header.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(title: impl Into<String>, header: &[&str]) -> Self {
        Self { title: title.into(), header: header.iter().map(|name| (*name).to_owned()).collect(), rows: Vec::new() }
    }

    fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | ").replace('\n', " "));
        let escaped = |cells: &[String]| line(&cells.iter().map(|cell| cell.replace('|', "\\|")).collect::<Vec<_>>());
        let rule: Vec<String> =
            (0..self.header.len()).map(|column| if column == 0 { "---" } else { "---:" }.to_owned()).collect();
        let rows: String = self.rows.iter().map(|row| escaped(row)).collect();
        format!("{}{}{rows}", escaped(&self.header), line(&rule))
    }
}

impl EvalOutcome {
    /// The summary over all prompts: per temperature what each proposer reaches and what its rounds cost, then what the
    /// target's passes cost.
    pub fn tables(&self) -> Vec<Table> {
        let of_one = |result| [summary_table(result), cost_table(result)];
        self.temperatures.iter().flat_map(of_one).chain([self.step_cost_table()]).collect()
    }

    /// Cost of a pass by its rows.
    pub(super) fn step_cost_table(&self) -> Table {
        let mut table = Table::new("Cost of a target pass", &["rows"]);
        let row = |name: &str| vec![name.to_owned()];
        let (mut cost, mut ratio) = (row("ms"), row("ratio to 1 row"));
        // More rows than these belong to several sequences at once.
        for entry in self.step_costs.iter().take(STEP_COST_COLUMNS) {
            table.header.push(entry.rows.to_string());
            cost.push(number(Some(1e3 * entry.seconds), 1));
            ratio.push(number(Some(entry.seconds / self.step_costs[0].seconds), 2));
        }
        table.rows = vec![cost, ratio];
        table
    }

    /// What the result says, in sentences: speed of each proposer, then whether the output is that of plain decoding.
    pub fn headline(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for result in &self.temperatures {
            let at = if self.temperatures.len() > 1 {
                format!(" at temperature {}", result.temperature)
            } else {
                String::new()
            };
            lines.extend(result.all.proposers.iter().filter_map(|found| speed_sentence(found, &at)));
        }
        lines.extend(self.calibration.as_ref().map(CalibrationOutcome::headline));
        lines.push(self.lossless_sentence());
        lines
    }

    fn lossless_sentence(&self) -> String {
        match self.lossless {
            Some(true) => {
                let count = self.compared;
                format!("all {count} answers compared at temperature 0 equal those of plain decoding, token for token")
            }
            Some(false) => format!(
                "NOT lossless: {} of {} answers compared at temperature 0 differ from those of plain decoding",
                self.differences.len(),
                self.compared
            ),
            None => "not compared with plain decoding token by token: that needs temperature 0, `plain` and another \
                     proposer"
                .into(),
        }
    }

    /// Title of the reports.
    pub(super) fn title(&self) -> String {
        let drafter = self.drafter.as_ref().map_or("speculative decoding", |drafter| &drafter.name);
        format!("{drafter} on {}", self.recipe.target.model)
    }

    /// What was run and on what, as (name, value).
    pub(super) fn facts(&self) -> Vec<(&'static str, String)> {
        let eval = &self.recipe.eval;
        let list = |values: &[f64]| values.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let drafter = self.drafter.as_ref().map_or("none".to_owned(), |drafter| {
            format!(
                "{}, {:.1} M trained parameters, {} layers, block of {}, target layers {:?}, Markov rank {}, {} confidence head{}, \
                 fingerprint {}",
                drafter.name,
                drafter.parameters as f64 / 1e6,
                drafter.layers,
                drafter.block_size,
                drafter.target_layer_ids,
                drafter.markov_rank,
                if drafter.confidence_head { "with" } else { "no" },
                drafter.temperatures.as_ref().map_or(String::new(), |values| format!(" scaled by {values:?}")),
                self.fingerprints.drafter.as_deref().unwrap_or(NONE)
            )
        });
        let sets: Vec<String> = self
            .sets
            .iter()
            .map(|set| {
                let turns = if set.multi_turn > 0 {
                    format!(", {} with later turns unused", set.multi_turn)
                } else {
                    String::new()
                };
                let rejects =
                    if set.rejected > 0 { format!(", {} rows rejected", set.rejected) } else { String::new() };
                let held = if set.calibration > 0 {
                    format!(", {} more for calibration", set.calibration)
                } else {
                    String::new()
                };
                format!("{} ({} prompts{held}{turns}{rejects})", set.name, set.prompts)
            })
            .collect();
        let commit = self.origin.git_commit.as_ref().map_or(String::new(), |commit| format!(" ({commit})"));
        let precision = format!("{:?}", self.recipe.target.precision).to_lowercase();
        vec![
            ("target", format!("{}, {precision}, fingerprint {}", self.recipe.target.model, self.fingerprints.target)),
            ("drafter", drafter),
            ("prompts", sets.join("; ")),
            (
                "sampling",
                format!(
                    "temperature {}, top-p {}, top-k {}, min-p {}, at most {} tokens, seed {} + place of the prompt",
                    list(&eval.temperatures),
                    eval.top_p,
                    eval.top_k,
                    eval.min_p,
                    eval.max_new_tokens,
                    eval.seed
                ),
            ),
            ("sequences at once", eval.batch_size.to_string()),
            ("n-gram lookup", format!("suffixes of up to {}, {} tokens per round", eval.ngram_max, eval.ngram_block)),
            ("confidence threshold", eval.confidence_threshold.to_string()),
            ("length of drafts", if eval.adaptive { "adaptive" } else { "fixed" }.to_owned()),
            ("machine", self.origin.machine.clone()),
            ("kernels", format!("{}, {} threads", self.origin.kernels, self.origin.threads)),
            ("program", format!("deepspec {}{commit}", self.origin.version)),
            ("started", self.origin.started.clone()),
            (
                "peak memory",
                self.peak_memory_bytes.map_or(NONE.into(), |bytes| format!("{:.0} MiB", bytes as f64 / 1048576.0)),
            ),
            ("prompt tokens SHA-256", self.prompt_ids_sha256.clone()),
            ("chat template SHA-256", self.template_sha256.clone()),
            ("tokenizer", self.tokenizer.clone()),
            ("identity", self.identity.clone()),
        ]
    }

    /// Warnings, and what else limits the result.
    pub(super) fn cautions(&self) -> Vec<String> {
        let mut cautions = self.warnings.clone();
        let prompts: usize = self.sets.iter().map(|set| set.prompts).sum();
        if prompts < FEW_PROMPTS {
            cautions.push(format!("{prompts} prompts are few: the intervals say how wide the results scatter"));
        }
        if self.calibration.is_none() && self.drafter.as_ref().is_some_and(|drafter| drafter.temperatures.is_some()) {
            cautions.push(
                "the confidences are scaled by temperatures that were fitted before: prompts of that fit which are measured \
                 here too make the calibration look better than it is"
                    .into(),
            );
        }
        if self.temperatures.iter().flat_map(|result| &result.all.proposers).all(|found| found.speedup.is_none()) {
            cautions.push("no speedup: `eval.proposers` lacks `plain` or anything to compare it with".into());
        }
        cautions
    }

    /// `README.md` of the result.
    pub(super) fn markdown(&self) -> String {
        let mut text = format!("# {}\n\n{}", self.title(), list(self.headline()));
        let cautions = self.cautions();
        if !cautions.is_empty() {
            _ = write!(text, "\n## Mind\n\n{}", list(cautions));
        }
        let tables = self.temperatures.iter().flat_map(tables).chain([self.step_cost_table()]);
        for table in tables {
            _ = write!(text, "\n## {}\n\n{}", table.title, table.markdown());
        }
        if let Some(calibration) = &self.calibration {
            _ = write!(text, "\n## Calibration\n\n{}.\n", calibration.table.describe());
            _ = write!(text, "\n![before]({RELIABILITY_BEFORE}) ![after]({RELIABILITY_AFTER})\n");
            for table in calibration.tables() {
                _ = write!(text, "\n### {}\n\n{}", table.title, table.markdown());
            }
        }
        let facts = self.facts().into_iter().map(|(name, value)| format!("{name}: {value}"));
        _ = write!(text, "\n## What was run\n\n{}", list(facts));
        let definitions = DEFINITIONS.iter().map(|(name, meaning)| format!("**{name}**: {meaning}"));
        _ = write!(text, "\n## Definitions\n\n{}", list(definitions));
        text.push_str(
            "\n## Files\n\n- `results.json`: all numbers\n- `report.html`: the same with plots\n- `journal.jsonl`: every \
             answer with its rounds and times\n- `calibration.jsonl`, `reliability_*.svg`: the same of a calibration, \
             where there was one\n\nWritten by `deepspec eval`; not to be edited by hand.\n",
        );
        text
    }
}

/// Lines as a Markdown list.
fn list(lines: impl IntoIterator<Item = String>) -> String {
    lines.into_iter().map(|line| ["- ", &line, "\n"].concat()).collect()
}

/// All tables of one temperature.
pub(super) fn tables(result: &TemperatureResult) -> Vec<Table> {
    let mut tables = vec![
        summary_table(result),
        cost_table(result),
        acceptance_table(result),
        position_table(result),
        speed_table(result),
    ];
    tables.extend(calibration_table(result));
    for (what, groups) in [("domain", &result.domains), ("set", &result.sets)] {
        if groups.len() > 1 {
            tables.push(group_table(what, groups, result.temperature));
        }
    }
    tables
}

fn summary_table(result: &TemperatureResult) -> Table {
    let Group { proposers, prompts, .. } = &result.all;
    let positions = proposers.iter().map(|found| found.acceptance.positions.len()).max().unwrap_or(0);
    let mut table = Table::new(format!("Temperature {}, {prompts} prompts", result.temperature), &["", "tau"]);
    table.header.extend((1..=positions).map(|k| format!("accept@{k}")));
    table.header.extend(["tokens/s", "speedup [95 %]", "identical"].map(str::to_owned));
    for found in proposers {
        let mut row = vec![found.name.clone(), number(found.acceptance.tau, 2)];
        row.extend((0..positions).map(|k| number(found.acceptance.positions.get(k).and_then(|at| at.accept_rate), 2)));
        row.push(number(found.speed.tokens_per_s, 1));
        row.push(found.speedup.map_or(NONE.into(), |speedup| interval(&speedup.totals)));
        row.push(found.identical_to_plain.map_or(NONE, |same| if same { "yes" } else { "NO" }).into());
        table.rows.push(row);
    }
    table
}

/// What a round costs and what it brings.
fn cost_table(result: &TemperatureResult) -> Table {
    let header = ["", "draft ms", "verify ms", "other ms", "round ms", "break-even tau", "tau"];
    let mut table = Table::new(format!("Cost of a round at temperature {}", result.temperature), &header);
    for found in &result.all.proposers {
        let cost = found.round_cost;
        table.rows.push(vec![
            found.name.clone(),
            number(cost.map(|cost| cost.draft_ms), 2),
            number(cost.map(|cost| cost.verify_ms), 2),
            number(cost.map(|cost| cost.other_ms), 2),
            number(cost.map(|cost| cost.round_ms), 2),
            number(cost.and_then(|cost| cost.break_even_tau), 2),
            number(found.acceptance.tau, 2),
        ]);
    }
    table
}

fn acceptance_table(result: &TemperatureResult) -> Table {
    let header = [
        "",
        "rounds",
        "fallback",
        "tau",
        "tau (vLLM)",
        "verify rate",
        "draft length",
        "verify length",
        "rollbacks",
        "repetition",
    ];
    let mut table = Table::new(format!("Acceptance at temperature {}", result.temperature), &header);
    for found in &result.all.proposers {
        let acceptance = &found.acceptance;
        table.rows.push(vec![
            found.name.clone(),
            acceptance.rounds.to_string(),
            percent(ratio(acceptance.fallback_rounds, acceptance.rounds)),
            number(acceptance.tau, 3),
            number(acceptance.tau_vllm, 3),
            number(acceptance.verify_rate, 3),
            number(acceptance.avg_draft_len, 2),
            number(acceptance.avg_verify_len, 2),
            acceptance.rollback_count.to_string(),
            percent(found.repetition),
        ]);
    }
    table
}

/// Conditional acceptance and counts, which the summary leaves out.
fn position_table(result: &TemperatureResult) -> Table {
    let header = ["", "position", "proposed", "accepted", "accept@k", "conditional accept@k"];
    let mut table = Table::new(format!("Acceptance per position at temperature {}", result.temperature), &header);
    for found in &result.all.proposers {
        for at in &found.acceptance.positions {
            table.rows.push(vec![
                found.name.clone(),
                at.k.to_string(),
                at.proposed.to_string(),
                at.accepted.to_string(),
                number(at.accept_rate, 3),
                number(at.conditional_rate, 3),
            ]);
        }
    }
    table
}

fn speed_table(result: &TemperatureResult) -> Table {
    let header =
        ["", "ms/token", "median", "p99", "std", "first token ms", "draft", "target", "other", "speedup (medians)"];
    let mut table = Table::new(format!("Speed at temperature {}", result.temperature), &header);
    for found in &result.all.proposers {
        let (spread, split) = (found.speed.ms_per_token, found.speed.split);
        table.rows.push(vec![
            found.name.clone(),
            number(spread.map(|spread| spread.mean), 2),
            number(spread.map(|spread| spread.p50), 2),
            number(spread.map(|spread| spread.p99), 2),
            number(spread.map(|spread| spread.std), 2),
            number(found.speed.first_token_ms, 1),
            percent(split.map(|split| split.draft)),
            percent(split.map(|split| split.target)),
            percent(split.map(|split| split.other)),
            found.speedup.map_or(NONE.into(), |speedup| interval(&speedup.medians)),
        ]);
    }
    table
}

/// Quality of the confidences; `None` if no proposer has any.
fn calibration_table(result: &TemperatureResult) -> Option<Table> {
    let report = result.all.proposers.iter().find_map(|found| found.calibration.as_ref())?;
    let header = ["position", "rounds", "predicted", "observed", "ECE", "AUROC", "Brier"];
    let mut table = Table::new(format!("Confidence at temperature {}", result.temperature), &header);
    for at in &report.positions {
        table.rows.push(vec![
            (at.position + 1).to_string(),
            at.count.to_string(),
            number(at.predicted_mean, 3),
            number(at.observed_mean, 3),
            number(at.ece, 3),
            number(at.auroc, 3),
            number(at.brier, 3),
        ]);
    }
    let mean = &report.summary;
    let means =
        [mean.predicted_mean, mean.observed_mean, mean.ece, mean.auroc, mean.brier].map(|value| number(value, 3));
    table.rows.push(["mean".to_owned(), String::new()].into_iter().chain(means).collect());
    Some(table)
}

fn group_table(what: &str, groups: &[Group], temperature: f64) -> Table {
    let header = [what, "prompts", "proposer", "tau", "accept@1", "tokens/s", "speedup [95 %]"];
    let mut table = Table::new(format!("Per {what} at temperature {temperature}"), &header);
    for group in groups {
        for found in &group.proposers {
            table.rows.push(vec![
                group.name.clone(),
                group.prompts.to_string(),
                found.name.clone(),
                number(found.acceptance.tau, 2),
                number(found.acceptance.positions.first().and_then(|at| at.accept_rate), 2),
                number(found.speed.tokens_per_s, 1),
                found.speedup.map_or(NONE.into(), |speedup| interval(&speedup.totals)),
            ]);
        }
    }
    table
}

/// How a proposer compares with plain decoding; `None` where that was not measured.
fn speed_sentence(found: &ProposerResult, at: &str) -> Option<String> {
    let Interval { value, low, high } = found.speedup.filter(|_| found.proposer != Proposer::Plain)?.totals;
    let tau = found.acceptance.tau?;
    let range = match (low, high) {
        (Some(low), Some(high)) => format!("95 % interval {low:.2} to {high:.2}"),
        _ => "one prompt, no interval".to_owned(),
    };
    let is_clear = low.is_none_or(|low| low > 1.0) || high.is_none_or(|high| high < 1.0);
    let verdict = match (is_clear, value < 1.0) {
        (false, _) => "shows no clear difference to plain decoding",
        (true, true) => "is slower than plain decoding",
        (true, false) => "is faster than plain decoding",
    };
    let mut sentence = format!("`{}` {verdict}{at}: {value:.2} times its speed ({range}), tau {tau:.2}", found.name);
    if value < 1.0 {
        _ = write!(
            sentence,
            "; a round costs about {0:.1} plain steps here, so only a tau above {0:.1} would pay",
            tau / value
        );
    }
    Some(sentence)
}

/// A number with a fixed count of decimals.
pub(super) fn number(value: Option<f64>, decimals: usize) -> String {
    value.map_or(NONE.into(), |value| format!("{value:.decimals$}"))
}

fn percent(share: Option<f64>) -> String {
    share.map_or(NONE.into(), |share| format!("{:.0} %", 100.0 * share))
}

/// Such as `1.62x [1.55, 1.70]`.
pub(super) fn interval(interval: &Interval) -> String {
    let Interval { value, low, high } = *interval;
    match (low, high) {
        (Some(low), Some(high)) => format!("{value:.2}x [{low:.2}, {high:.2}]"),
        _ => format!("{value:.2}x"),
    }
}
