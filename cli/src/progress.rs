//! Draws the events of a stage: bars with rate and time left on a terminal, else a plain line every few seconds.

use std::io::IsTerminal as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use deepspec_engine::progress::{Event, Reporter};
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};

use crate::args::GlobalOptions;
use crate::printer::Printer;

/// Shortest time between two plain lines of progress.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// How often a bar moves while no event comes, so that the time left stays true.
const TICK: Duration = Duration::from_millis(500);
const BAR: &str = "{prefix} [{bar:24}] {pos}/{len} {msg} | {per_sec} | eta {eta}";

/// Shows the events of one command.
pub(crate) struct TerminalReporter<'a> {
    printer: &'a Printer,
    draws_bars: bool,
    task: Mutex<Option<Task>>,
}

/// The task under way.
struct Task {
    name: String,
    unit: String,
    total: u64,
    first: u64,
    done: u64,
    started: Instant,
    shown: Instant,
    bar: Option<ProgressBar>,
}

impl<'a> TerminalReporter<'a> {
    /// A reporter that draws bars if standard error is a terminal and the options allow it.
    pub(crate) fn new(printer: &'a Printer, options: &GlobalOptions) -> Self {
        let draws_bars = !options.quiet && !options.no_progress && std::io::stderr().is_terminal();
        Self { printer, draws_bars, task: Mutex::new(None) }
    }
}

impl Reporter for TerminalReporter<'_> {
    fn event(&self, event: Event<'_>) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Stage(text) => above(task.as_ref(), || self.printer.heading(text)),
            Event::Note(text) | Event::Line(text) => above(task.as_ref(), || self.printer.words(text)),
            Event::Warning(text) => above(task.as_ref(), || self.printer.warning(text)),
            Event::Started { task: name, total, done, unit } => {
                finish(task.take(), self.printer);
                *task = Some(Task::new(name, total, done, unit, self.draws_bars));
            }
            Event::Advanced { done, detail } => {
                if let Some(line) = task.as_mut().and_then(|task| task.advance(done, detail)) {
                    self.printer.words(&line);
                }
            }
            Event::Finished => finish(task.take(), self.printer),
        }
    }
}

impl Drop for TerminalReporter<'_> {
    fn drop(&mut self) {
        // A stage that failed leaves its task open; its bar must not stay on the screen above the error.
        let task = self.task.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(bar) = task.take().and_then(|task| task.bar) {
            bar.finish_and_clear();
        }
    }
}

/// Prints above the bar, if there is one.
fn above(task: Option<&Task>, print: impl FnOnce()) {
    match task.and_then(|task| task.bar.as_ref()) {
        Some(bar) => bar.suspend(print),
        None => print(),
    }
}

fn finish(task: Option<Task>, printer: &Printer) {
    let Some(task) = task else { return };
    if let Some(bar) = &task.bar {
        bar.finish_and_clear();
    }
    let Task { name, unit, done, started, .. } = task;
    printer.words(&format!("{name}: {done} {unit} in {}", HumanDuration(started.elapsed())));
}

impl Task {
    fn new(name: &str, total: u64, done: u64, unit: &str, draws_bar: bool) -> Self {
        let bar = draws_bar.then(|| {
            let style = ProgressStyle::with_template(BAR).expect("the template is a valid constant");
            let bar = ProgressBar::new(total).with_prefix(name.to_owned()).with_message(unit.to_owned());
            bar.set_style(style.progress_chars("=> "));
            bar.set_position(done);
            // What an earlier run did says nothing about the speed of this one.
            bar.reset_eta();
            bar.enable_steady_tick(TICK);
            bar
        });
        let now = Instant::now();
        Self { name: name.into(), unit: unit.into(), total, first: done, done, started: now, shown: now, bar }
    }

    /// Takes in how far the task is; the line to print, if it is time for one.
    fn advance(&mut self, done: u64, detail: &str) -> Option<String> {
        self.done = done;
        if let Some(bar) = &self.bar {
            let separator = if detail.is_empty() { "" } else { " | " };
            bar.set_message(format!("{}{separator}{detail}", self.unit));
            bar.set_position(done);
            return None;
        }
        if self.shown.elapsed() < LINE_INTERVAL {
            return None;
        }
        self.shown = Instant::now();
        Some(self.line(detail, self.started.elapsed()))
    }

    fn line(&self, detail: &str, elapsed: Duration) -> String {
        let Self { name, unit, total, first, done, .. } = self;
        let rate = done.saturating_sub(*first) as f64 / elapsed.as_secs_f64().max(1e-9);
        let mut line = format!("{name} {done}/{total} {unit}");
        if !detail.is_empty() {
            line.push_str(&format!(" | {detail}"));
        }
        if rate > 0.0 {
            let left = Duration::try_from_secs_f64(total.saturating_sub(*done) as f64 / rate).unwrap_or(Duration::MAX);
            line.push_str(&format!(" | {rate:.1} {unit}/s | eta {}", HumanDuration(left)));
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_counts_only_this_run() {
        let mut task = Task::new("regenerate", 100, 40, "prompts", false);
        assert_eq!(task.advance(60, "812 tok/s"), None, "no line so soon after the start");
        assert_eq!(
            task.line("812 tok/s", Duration::from_secs(10)),
            "regenerate 60/100 prompts | 812 tok/s | 2.0 prompts/s | eta 20 seconds"
        );
        task.done = 40;
        assert_eq!(task.line("", Duration::from_secs(10)), "regenerate 40/100 prompts");
    }

    #[test]
    fn a_bar_starts_where_an_earlier_run_ended() {
        let mut task = Task::new("cache", 10, 4, "samples", true);
        assert_eq!(task.bar.as_ref().unwrap().position(), 4);
        assert_eq!(task.advance(7, "1.2 GB"), None, "the bar says it");
        let bar = task.bar.unwrap();
        assert_eq!((bar.position(), bar.message()), (7, "samples | 1.2 GB".to_owned()));
    }

    #[test]
    fn a_line_comes_after_the_interval() {
        let mut task = Task::new("train", 10, 0, "steps", false);
        task.shown = Instant::now().checked_sub(2 * LINE_INTERVAL).unwrap();
        let line = task.advance(5, "").unwrap();
        assert!(line.starts_with("train 5/10 steps | "), "{line}");
        assert_eq!(task.advance(6, ""), None);
    }
}
