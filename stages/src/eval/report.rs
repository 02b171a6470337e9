//! The result in words and tables: for the terminal, for `README.md` and as the parts of the HTML page.

use std::fmt::Write;

use super::calibrate::CalibrationOutcome;
use super::metrics::{DEFINITIONS, ratio};
use super::outcome::{EvalOutcome, Group, ProposerResult, TemperatureResult};
use super::speed::Interval;
use super::verdict::{Comparison, Verdict};

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
    /// The summary over all prompts: per temperature what each proposer reaches, what its rounds cost and whether its answers are
    /// those of plain decoding, then what the target's passes cost.
    pub fn tables(&self) -> Vec<Table> {
        let of_one = |result| [summary_table(result), cost_table(result)].into_iter().chain(identity_table(result));
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
            cost.push(number(Some(1e3 * entry.seconds)));
            ratio.push(number(Some(entry.seconds / self.step_costs[0].seconds)));
        }
        table.rows = vec![cost, ratio];
        table
    }

    /// What the result says, in sentences: speed of each proposer, then whether the output is that of plain decoding. Terminal,
    /// `README.md` and page have the same ones.
    pub fn headline(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for result in &self.temperatures {
            let at = if self.temperatures.len() > 1 {
                format!(" at temperature {}", result.temperature)
            } else {
                String::new()
            };
            let sentences = result.all.proposers.iter().filter_map(|found| speed_sentence(found, &at));
            lines.extend(sentences);
        }
        lines.extend(self.calibration.as_ref().map(CalibrationOutcome::headline));
        lines.push(self.lossless_sentence());
        lines
    }

    fn lossless_sentence(&self) -> String {
        let Comparison { answers, different, .. } = self.comparison;
        let basis = self.comparison.basis();
        if answers == 0 {
            return "not compared with plain decoding token by token: that needs temperature 0, `plain` and another proposer"
                .into();
        }
        match self.lossless {
            Some(true) => {
                let idle = self.without_accepted_drafts();
                let except = if idle.is_empty() {
                    String::new()
                } else {
                    format!("; not shown for {}, none of whose drafts was accepted", idle.join(" and "))
                };
                format!(
                    "all {answers} answers compared at temperature 0 equal those of plain decoding, token for token: {basis}{except}"
                )
            }
            Some(false) => format!(
                "NOT lossless: {different} of {answers} answers compared at temperature 0 differ from those of plain decoding: \
                 {basis}"
            ),
            None => format!(
                "not shown that speculation changes nothing: the {answers} answers compared at temperature 0 equal those of plain \
                 decoding, but hold no accepted draft: {basis}"
            ),
        }
    }

    /// Names of the proposers that were compared with plain decoding without an accepted draft.
    fn without_accepted_drafts(&self) -> Vec<String> {
        let all = self.temperatures.iter().flat_map(|result| &result.all.proposers);
        let idle = all.filter(|found| found.comparison.is_some_and(|comparison| comparison.accepted == 0));
        let mut names: Vec<String> = idle.map(|found| format!("`{}`", found.name)).collect();
        names.dedup();
        names
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
    let mut tables = vec![summary_table(result), cost_table(result)];
    tables.extend(identity_table(result));
    tables.extend([acceptance_table(result), position_table(result), speed_table(result)]);
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
    table.header.extend(["tokens/s", "speedup [95 %]", "verdict"].map(str::to_owned));
    for found in proposers {
        let mut row = vec![found.name.clone(), number(found.acceptance.tau)];
        row.extend((0..positions).map(|k| number(found.acceptance.positions.get(k).and_then(|at| at.accept_at_k))));
        row.push(number(found.speed.tokens_per_s));
        row.push(found.speedup.map_or(NONE.into(), |speedup| interval(&speedup.totals)));
        row.push(verdict(found));
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
            number(cost.map(|cost| cost.draft_ms)),
            number(cost.map(|cost| cost.verify_ms)),
            number(cost.map(|cost| cost.other_ms)),
            number(cost.map(|cost| cost.round_ms)),
            number(cost.and_then(|cost| cost.break_even_tau)),
            number(found.acceptance.tau),
        ]);
    }
    table
}

/// Whether the answers at temperature 0 are those of plain decoding, and what that rests on; `None` where nothing was compared.
fn identity_table(result: &TemperatureResult) -> Option<Table> {
    let header = ["", "identical", "answers", "different", "tokens", "of which accepted drafts"];
    let mut table =
        Table::new(format!("Answers beside those of plain decoding at temperature {}", result.temperature), &header);
    for found in &result.all.proposers {
        let Some(comparison) = found.comparison else { continue };
        table.rows.push(vec![
            found.name.clone(),
            comparison.short().into(),
            comparison.answers.to_string(),
            comparison.different.to_string(),
            comparison.tokens.to_string(),
            comparison.accepted.to_string(),
        ]);
    }
    (!table.rows.is_empty()).then_some(table)
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
            number(acceptance.tau),
            number(acceptance.tau_vllm),
            number(acceptance.verify_rate),
            number(acceptance.avg_draft_len),
            number(acceptance.avg_verify_len),
            acceptance.rollback_count.to_string(),
            percent(found.repetition),
        ]);
    }
    table
}

/// The three rates of acceptance with their counts, which the summary leaves out.
fn position_table(result: &TemperatureResult) -> Table {
    let header = ["", "position", "proposed", "accepted", "accept@k", "accept_rate@k", "conditional accept@k"];
    let mut table = Table::new(format!("Acceptance per position at temperature {}", result.temperature), &header);
    for found in &result.all.proposers {
        for at in &found.acceptance.positions {
            table.rows.push(vec![
                found.name.clone(),
                at.k.to_string(),
                at.proposed.to_string(),
                at.accepted.to_string(),
                number(at.accept_at_k),
                number(at.accept_rate),
                number(at.conditional_rate),
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
            number(spread.map(|spread| spread.mean)),
            number(spread.map(|spread| spread.p50)),
            number(spread.map(|spread| spread.p99)),
            number(spread.map(|spread| spread.std)),
            number(found.speed.first_token_ms),
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
            number(at.predicted_mean),
            number(at.observed_mean),
            number(at.ece),
            number(at.auroc),
            number(at.brier),
        ]);
    }
    let mean = &report.summary;
    let means = [mean.predicted_mean, mean.observed_mean, mean.ece, mean.auroc, mean.brier].map(number);
    table.rows.push(["mean".to_owned(), String::new()].into_iter().chain(means).collect());
    Some(table)
}

fn group_table(what: &str, groups: &[Group], temperature: f64) -> Table {
    let header = [what, "prompts", "proposer", "tau", "accept@1", "tokens/s", "speedup [95 %]", "verdict"];
    let mut table = Table::new(format!("Per {what} at temperature {temperature}"), &header);
    for group in groups {
        for found in &group.proposers {
            table.rows.push(vec![
                group.name.clone(),
                group.prompts.to_string(),
                found.name.clone(),
                number(found.acceptance.tau),
                number(found.acceptance.positions.first().and_then(|at| at.accept_at_k)),
                number(found.speed.tokens_per_s),
                found.speedup.map_or(NONE.into(), |speedup| interval(&speedup.totals)),
                verdict(found),
            ]);
        }
    }
    table
}

/// How a proposer compares with plain decoding; `None` where that was not measured.
fn speed_sentence(found: &ProposerResult, at: &str) -> Option<String> {
    let (speedup, verdict) = (found.speedup?, found.verdict?);
    let (name, Interval { value, low, high }) = (&found.name, speedup.totals);
    let range = match (low, high) {
        (Some(low), Some(high)) => format!(" (95 % interval {} to {})", digits(low), digits(high)),
        _ => String::new(),
    };
    let tau = found.acceptance.tau.map_or(String::new(), |tau| format!(", tau {} tokens a round", digits(tau)));
    let measured = format!("{} times its speed{range}{tau}", digits(value));
    let said = match verdict {
        Verdict::Faster => format!("is faster than plain decoding{at}"),
        Verdict::Slower => format!("is slower than plain decoding{at}"),
        Verdict::NoDifference => format!("shows no clear difference to plain decoding{at}"),
        Verdict::FewPrompts { .. } | Verdict::Drift { .. } | Verdict::AboveTau { .. } => {
            let reason = verdict.reason().unwrap_or_default();
            return Some(format!(
                "`{name}`: no verdict on its speed{at}: {reason}; measured against plain decoding: {measured}"
            ));
        }
    };
    let pays = found.round_cost.and_then(|cost| cost.break_even_tau).filter(|_| verdict != Verdict::Faster);
    let pays = pays.map_or(String::new(), |tau| {
        format!("; a round costs {0} plain steps here, so only a tau above {0} would pay", digits(tau))
    });
    Some(format!("`{name}` {said}: {measured}{pays}"))
}

/// A number with three digits, or three decimals below 1.
pub(super) fn digits(value: f64) -> String {
    let decimals = match value.abs() {
        0.0 => 0,
        size if size < 0.9995 => 3,
        size if size < 9.995 => 2,
        size if size < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// The same of a number that there may be.
pub(super) fn number(value: Option<f64>) -> String {
    value.map_or(NONE.into(), digits)
}

fn percent(share: Option<f64>) -> String {
    share.map_or(NONE.into(), |share| format!("{:.0} %", 100.0 * share))
}

/// Such as `1.62x [1.55, 1.70]`.
pub(super) fn interval(interval: &Interval) -> String {
    let Interval { value, low, high } = *interval;
    match (low, high) {
        (Some(low), Some(high)) => format!("{}x [{}, {}]", digits(value), digits(low), digits(high)),
        _ => format!("{}x", digits(value)),
    }
}

fn verdict(found: &ProposerResult) -> String {
    found.verdict.map_or(NONE.into(), Verdict::short)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let known = [
            (0.0, "0"),
            (0.0004, "0.000"),
            (0.2984, "0.298"),
            (0.9996, "1.00"),
            (1.234, "1.23"),
            (9.996, "10.0"),
            (23.44, "23.4"),
            (99.96, "100"),
            (206.6, "207"),
            (-1.5, "-1.50"),
        ];
        for (value, text) in known {
            assert_eq!(digits(value), text);
        }
    }
}
