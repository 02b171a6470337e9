//! `report.html`: the result as one page that needs nothing else, readable on a phone, light or dark as the reader's
//! system.

use std::fmt::Write;

use super::calibrate::CalibrationOutcome;
use super::confidence::CalibrationReport;
use super::metrics::{Acceptance, DEFINITIONS, PositionAcceptance};
use super::outcome::{EvalOutcome, Group, TemperatureResult};
use super::plots::{Bar, Line, Point, bars, escape, lines};
use super::reliability::diagram;
use super::report::{Table, digits, number, tables};
use super::verdict::{Comparison, Verdict};
use crate::recipe::Proposer;

const STYLE: &str = include_str!("report.css");
/// Colours of drafting, the target and the rest in the time split.
const SPLIT_COLORS: [(&str, usize); 3] = [("draft", 2), ("target", 3), ("other", 5)];

/// The whole page.
pub(super) fn page(outcome: &EvalOutcome) -> String {
    let title = escape(&outcome.title());
    let mut body = format!("<p class=\"soft\">deepspec evaluation</p><h1>{title}</h1>");
    let prompts: usize = outcome.sets.iter().map(|set| set.prompts).sum();
    _ = write!(
        body,
        "<p class=\"soft\">{prompts} prompts · {} · {} · {}</p>",
        escape(&outcome.origin.machine),
        escape(&outcome.origin.kernels),
        escape(&outcome.origin.started)
    );
    body.push_str(&tiles(outcome));
    let said: Vec<String> = outcome.headline().iter().map(|text| format!("<li>{}</li>", escape(text))).collect();
    _ = write!(body, "<ul>{}</ul>", said.concat());
    let cautions = outcome.cautions();
    if !cautions.is_empty() {
        let items: Vec<String> = cautions.iter().map(|text| format!("<li>{}</li>", escape(text))).collect();
        _ = write!(body, "<ul class=\"mind\">{}</ul>", items.concat());
    }
    for result in &outcome.temperatures {
        body.push_str(&section(result));
    }
    body.push_str(&outcome.calibration.as_ref().map_or(String::new(), calibration));
    let passes = outcome.step_cost_table();
    _ = write!(body, "<h2>{}</h2>{}", escape(&passes.title), table(&passes));
    let definitions = DEFINITIONS.iter().map(|(name, meaning)| (*name, (*meaning).to_owned()));
    _ = write!(body, "<h2>What was run</h2>{}", list(outcome.facts().into_iter()));
    _ = write!(body, "<h2>Definitions</h2>{}", list(definitions));
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{title}</title>\
         <style>{STYLE}</style></head>\n<body><main>{body}</main></body></html>\n"
    )
}

/// The few numbers that most readers come for, of the first temperature.
fn tiles(outcome: &EvalOutcome) -> String {
    let mut tiles = String::new();
    let mut tile = |value: &str, class: &str, text: &str| {
        let (value, text) = (escape(value), escape(text));
        _ = write!(
            tiles,
            "<div class=\"tile\"><b class=\"{class}\">{value}</b><span class=\"soft\">{text}</span></div>"
        );
    };
    let speculative = |result: &TemperatureResult| -> Vec<_> {
        result.all.proposers.iter().filter(|found| found.proposer != Proposer::Plain).cloned().collect()
    };
    for found in outcome.temperatures.first().map(speculative).unwrap_or_default() {
        let tau = number(found.acceptance.tau);
        match found.speedup.map(|speedup| speedup.totals) {
            Some(totals) => {
                let range = match (totals.low, totals.high) {
                    (Some(low), Some(high)) => format!(" (95 %: {} to {})", digits(low), digits(high)),
                    _ => String::new(),
                };
                let verdict = found.verdict.map_or("no verdict".into(), Verdict::short);
                let class = match found.verdict {
                    Some(Verdict::Faster) => "good",
                    Some(Verdict::Slower) => "bad",
                    _ => "",
                };
                let text = format!("{} against plain decoding{range}, tau {tau}; verdict: {verdict}", found.name);
                tile(&format!("{}×", digits(totals.value)), class, &text);
            }
            None => tile(&tau, "", &format!("tau of {}", found.name)),
        }
    }
    if outcome.comparison.answers > 0 {
        let (value, class) = match outcome.lossless {
            Some(true) => ("lossless", "good"),
            Some(false) => ("not lossless", "bad"),
            None => ("not shown lossless", ""),
        };
        let Comparison { answers, different, .. } = outcome.comparison;
        let text =
            format!("{different} of {answers} answers differ from plain decoding: {}", outcome.comparison.basis());
        tile(value, class, &text);
    }
    format!("<div class=\"tiles\">{tiles}</div>")
}

fn section(result: &TemperatureResult) -> String {
    let mut html = String::new();
    let mut all = tables(result).into_iter();
    if let Some(summary) = all.next() {
        _ = write!(html, "<h2>{}</h2>{}", escape(&summary.title), table(&summary));
    }
    _ = write!(
        html,
        "<div class=\"plots\">{}{}{}{}</div>",
        acceptance(result),
        taus(result),
        times(result),
        reliability(result)
    );
    let details: Vec<String> = all.map(|part| format!("<h3>{}</h3>{}", escape(&part.title), table(&part))).collect();
    _ = write!(html, "<details><summary>All numbers</summary>{}</details>", details.concat());
    html
}

fn table(table: &Table) -> String {
    let row = |cells: &[String], tag: &str| -> String {
        let cells: Vec<String> = cells.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect();
        format!("<tr>{}</tr>", cells.concat())
    };
    let rows: String = table.rows.iter().map(|cells| row(cells, "td")).collect();
    let header = row(&table.header, "th");
    format!("<div class=\"scroll\"><table><thead>{header}</thead><tbody>{rows}</tbody></table></div>")
}

fn list(facts: impl Iterator<Item = (&'static str, String)>) -> String {
    let facts: Vec<String> =
        facts.map(|(name, value)| format!("<dt>{}</dt><dd>{}</dd>", escape(name), escape(&value))).collect();
    format!("<dl>{}</dl>", facts.concat())
}

fn figure(title: &str, text: &str, legend: &[(String, usize)], svg: &str) -> String {
    let entry = |(name, color): &(String, usize)| {
        format!("<li><i style=\"background:var(--c{color})\"></i>{}</li>", escape(name))
    };
    let legend: String = legend.iter().map(entry).collect();
    format!(
        "<figure><figcaption><b>{}</b>{}</figcaption>{svg}<ul class=\"legend\">{legend}</ul></figure>",
        escape(title),
        escape(text)
    )
}

fn color(proposer: Proposer) -> usize {
    match proposer {
        Proposer::Plain => 0,
        Proposer::Ngram => 1,
        Proposer::Draft => 2,
        Proposer::Hybrid => 4,
    }
}

/// Acceptance of the prefix (solid) and given the tokens before (dashed) per block position.
fn acceptance(result: &TemperatureResult) -> String {
    let (mut drawn, mut legend, mut longest) = (Vec::new(), Vec::new(), 0);
    for found in result.all.proposers.iter().filter(|found| !found.acceptance.positions.is_empty()) {
        let color = color(found.proposer);
        type Rate = (fn(&PositionAcceptance) -> Option<f64>, fn(&Acceptance, &PositionAcceptance) -> u64);
        let points = |(rate, among): Rate| -> Vec<Point> {
            let point = |at: &PositionAcceptance| {
                let y = rate(at)?;
                let rounds = among(&found.acceptance, at);
                let tip = format!("{} at {}: {} of {rounds} rounds", found.name, at.k, digits(y));
                Some(Point { x: at.k as f64, y, radius: 4.0, tip })
            };
            found.acceptance.positions.iter().filter_map(point).collect()
        };
        drawn.push(Line { color, dashed: true, points: points((|at| at.conditional_rate, |_, at| at.reached)) });
        drawn.push(Line { color, dashed: false, points: points((|at| at.accept_at_k, |all, _| all.proposing_rounds)) });
        legend.push((found.name.clone(), color));
        longest = longest.max(found.acceptance.positions.len());
    }
    if drawn.is_empty() {
        return String::new();
    }
    let ticks: Vec<(f64, String)> = (1..=longest).map(|k| (k as f64, k.to_string())).collect();
    let title = "Acceptance per position";
    let svg = lines(title, (1.0, longest as f64), &ticks, "position in the block", &drawn, false);
    let text = "accept@k: share of the rounds with a proposal in which the tokens up to the position were all accepted; dashed: \
                given that those before it were.";
    figure(title, text, &legend, &svg)
}

/// Acceptance length per domain, or per set where the prompts have no domain.
fn taus(result: &TemperatureResult) -> String {
    let (what, groups) = match (&result.domains[..], &result.sets[..]) {
        ([], sets) => ("set", sets),
        (domains, _) => ("domain", domains),
    };
    let group = |group: &Group| {
        let bar = |found: &super::outcome::ProposerResult| {
            let tau = found.acceptance.tau?;
            let tip = format!("{}, {}: tau {}", group.name, found.name, digits(tau));
            Some(Bar { label: found.name.clone(), parts: vec![(color(found.proposer), tau, tip)], value: digits(tau) })
        };
        (Some(format!("{} ({} prompts)", group.name, group.prompts)), group.proposers.iter().filter_map(bar).collect())
    };
    let groups: Vec<(Option<String>, Vec<Bar>)> = groups.iter().map(group).collect();
    let title = format!("Tokens per round, per {what}");
    figure(&title, "Tau: plain decoding has 1; more is better.", &[], &bars(&title, &groups))
}

/// Time per output token by phase.
fn times(result: &TemperatureResult) -> String {
    let bar = |found: &super::outcome::ProposerResult| {
        let (speed, split) = (&found.speed, found.speed.split?);
        let total = 1e3 * speed.wall_s / speed.tokens as f64;
        let shares = [split.draft, split.target, split.other];
        let part = |(&(phase, color), share): (&(&str, usize), f64)| {
            (color, total * share, format!("{phase}: {} ms/token, {:.0} %", digits(total * share), 100.0 * share))
        };
        let parts = SPLIT_COLORS.iter().zip(shares).map(part).collect();
        Some(Bar { label: found.name.clone(), parts, value: format!("{} ms", digits(total)) })
    };
    let rows: Vec<Bar> = result.all.proposers.iter().filter_map(bar).collect();
    let legend = SPLIT_COLORS.map(|(phase, color)| (phase.to_owned(), color));
    let title = "Time per token";
    let text = "Wall-clock time per output token and where it goes; less is better.";
    figure(title, text, &legend, &bars(title, &[(None, rows)]))
}

/// Reliability diagram of the confidences of the verified tokens.
fn reliability(result: &TemperatureResult) -> String {
    let report = result.all.proposers.iter().find_map(|found| found.calibration.as_ref());
    report.map_or(String::new(), |report| reliability_figure("Reliability of the confidence", report))
}

fn reliability_figure(title: &str, report: &CalibrationReport) -> String {
    let (svg, legend) = diagram(title, report);
    let ece = number(report.summary.ece);
    let text = format!(
        "Observed against predicted acceptance of the prefix; the diagonal is perfect, larger dots hold more rounds. \
         Mean ECE {ece}."
    );
    figure(title, &text, &legend, &svg)
}

/// What a calibration brought on the prompts that it was not fitted on.
fn calibration(outcome: &CalibrationOutcome) -> String {
    let CalibrationOutcome { table: fitted, all, .. } = outcome;
    let one = |part: &Table| format!("<h3>{}</h3>{}", escape(&part.title), table(part));
    let tables = outcome.tables().iter().map(one).collect::<Vec<_>>().concat();
    format!(
        "<h2>Calibration</h2><p>{}</p><p class=\"soft\">{}</p><div class=\"plots\">{}{}</div>{tables}",
        escape(&outcome.headline()),
        escape(&fitted.describe()),
        reliability_figure("Reliability before calibration", &all.before),
        reliability_figure("Reliability after calibration", &all.after),
    )
}
