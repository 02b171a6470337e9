//! What a run of the prepare stage came to, and what one would cost, as data and as rows of a table.

use super::rejects::{Counts, Reject, count_kinds};

/// What a run of the stage came to.
#[derive(Debug, Clone, PartialEq)]
pub struct PrepareOutcome {
    /// Rows read, up to the one that filled the limit.
    pub rows_read: u64,
    /// Rows in which something was changed so that they could be used, by kind of change.
    pub repaired: Counts,
    /// Rows and answers that are not used, by kind of reason.
    pub rejected: Counts,
    /// Conversations that end before their last user turn, by kind of reason.
    pub shortened: Counts,
    /// Samples in the cache.
    pub samples: u64,
    /// Tokens of all samples.
    pub tokens: u64,
    /// Tokens on which a drafter is trained.
    pub supervised_tokens: u64,
    /// Samples whose last answer was cut by a limit.
    pub cut_answers: u64,
    /// Answers that should be supervised but can't be, since the template prints them otherwise in history.
    pub unsupervised_answers: u64,
    /// Tokens that the target generated in this run; none for answers that were there.
    pub new_tokens: u64,
    /// Size of the cache's shards.
    pub bytes: u64,
    /// Time of each part of this run.
    pub seconds: Seconds,
}

/// Wall-clock time of the parts of a run, in seconds.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Seconds {
    /// Reading the data and rendering prompts.
    pub read: f64,
    /// Answers by the target.
    pub regenerate: f64,
    /// Rendering samples and writing the cache.
    pub cache: f64,
}

/// What a run would cost, without the target.
#[derive(Debug, Clone, PartialEq)]
pub struct PreparePlan {
    /// Rows read, up to the one that filled the limit.
    pub rows_read: u64,
    /// Rows in which something was changed so that they could be used, by kind of change.
    pub repaired: Counts,
    /// Rows that are not used.
    pub rejects: Vec<Reject>,
    /// Rows that are used.
    pub prompts: u64,
    /// Samples that will be made of them, at most.
    pub samples: u64,
    /// Tokens of all samples, at most; exact where the answers are in the data.
    pub tokens_at_most: u64,
    /// Size of the cache's shards, at most.
    pub bytes_at_most: u64,
}

impl PrepareOutcome {
    /// Share of the tokens on which a drafter is trained, in percent.
    pub fn supervised_percent(&self) -> f64 {
        100.0 * self.supervised_tokens as f64 / self.tokens.max(1) as f64
    }

    /// The outcome as rows of a table: what, and how much.
    pub fn summary(&self) -> Vec<(String, String)> {
        let mut rows = vec![("rows read".to_owned(), self.rows_read.to_string())];
        for (what, counts) in
            [("repaired", &self.repaired), ("rejected", &self.rejected), ("shortened", &self.shortened)]
        {
            rows.extend(counts.iter().map(|(kind, count)| (format!("{what}: {kind}"), count.to_string())));
        }
        let tokens = format!("{} ({:.1} % supervised)", self.tokens, self.supervised_percent());
        let Seconds { read, regenerate, cache } = self.seconds;
        rows.extend([
            ("samples".to_owned(), self.samples.to_string()),
            ("tokens".to_owned(), tokens),
            ("cut answers".to_owned(), self.cut_answers.to_string()),
        ]);
        if self.unsupervised_answers > 0 {
            rows.push(("answers not supervised".to_owned(), self.unsupervised_answers.to_string()));
        }
        if self.new_tokens > 0 {
            let rate = self.new_tokens as f64 / regenerate.max(1e-9);
            rows.push(("generated".to_owned(), format!("{} tokens, {rate:.0} tok/s", self.new_tokens)));
        }
        rows.extend([
            ("target cache".to_owned(), size(self.bytes)),
            ("time".to_owned(), format!("read {read:.1} s, regenerate {regenerate:.1} s, cache {cache:.1} s")),
        ]);
        rows
    }
}

impl PreparePlan {
    /// Rows that are not used, by kind of reason.
    pub fn rejected(&self) -> Counts {
        count_kinds(&self.rejects)
    }

    /// The plan as rows of a table: what, and how much.
    pub fn summary(&self) -> Vec<(String, String)> {
        let mut rows = vec![("rows read".to_owned(), self.rows_read.to_string())];
        for (what, counts) in [("repaired", &self.repaired), ("rejected", &self.rejected())] {
            rows.extend(counts.iter().map(|(kind, count)| (format!("{what}: {kind}"), count.to_string())));
        }
        rows.extend([
            ("prompts".to_owned(), self.prompts.to_string()),
            ("samples".to_owned(), self.samples.to_string()),
            ("tokens, at most".to_owned(), self.tokens_at_most.to_string()),
            ("target cache, at most".to_owned(), size(self.bytes_at_most)),
        ]);
        rows
    }
}

/// A number of bytes for people, in powers of 1000.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    let mut value = bytes as f64 / 1000.0;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}
