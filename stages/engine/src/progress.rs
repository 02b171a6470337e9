//! What a running stage tells the program around it: events out, an interrupt flag in. Nothing here prints.

use std::sync::atomic::{AtomicBool, Ordering};

/// Something a stage reports. Texts carry no final line break.
#[derive(Debug, Clone, Copy)]
pub enum Event<'a> {
    /// A stage begins; shown as a heading.
    Stage(&'a str),
    /// A fact about the run: effective configuration, cost estimate, file written.
    Note(&'a str),
    /// Something the user should know and may want to change.
    Warning(&'a str),
    /// A countable task begins or goes on after a resume.
    Started {
        /// Short name, such as `regenerate`.
        task: &'a str,
        /// Units in all.
        total: u64,
        /// Units done by an earlier run.
        done: u64,
        /// Name of the unit, plural.
        unit: &'a str,
    },
    /// Units of the current task done so far, and a rate or state to show beside them.
    Advanced {
        /// Units done.
        done: u64,
        /// Such as `812 tok/s`; may be empty.
        detail: &'a str,
    },
    /// The current task has ended.
    Finished,
    /// A line of a log that stays on screen, such as the step line of training.
    Line(&'a str),
}

/// Receives the events of a stage.
pub trait Reporter: Sync {
    /// Called on the thread that runs the stage.
    fn event(&self, event: Event<'_>);
}

/// Set by a signal handler; stages look at it between units of work, save and return [`crate::Error::Interrupted`].
#[derive(Debug, Default)]
pub struct Interrupt(AtomicBool);

impl Interrupt {
    /// A flag that is not set.
    pub const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Asks the stage to stop.
    pub fn set(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether the stage has been asked to stop.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// What every stage is given besides its recipe and paths.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Where events go.
    pub reporter: &'a dyn Reporter,
    /// Whether to stop.
    pub interrupt: &'a Interrupt,
}

impl Context<'_> {
    /// Reports a fact.
    pub fn note(&self, text: impl AsRef<str>) {
        self.reporter.event(Event::Note(text.as_ref()));
    }

    /// Reports something the user should know.
    pub fn warn(&self, text: impl AsRef<str>) {
        self.reporter.event(Event::Warning(text.as_ref()));
    }

    /// Fails when the user has asked to stop; `safe` says what has been saved.
    ///
    /// # Errors
    /// [`crate::Error::Interrupted`] when the flag is set.
    pub fn check_interrupt(&self, safe: &'static str) -> crate::Result<()> {
        if self.interrupt.is_set() { Err(crate::Error::Interrupted { safe }) } else { Ok(()) }
    }
}
