//! What happens to a drafter that fails or gives unusable numbers: decoding goes on without it.
//!
//! The request in which it failed is decoded plainly from the next round on. After [`FAULTY_REQUESTS`] such requests no other
//! request asks the drafter either. Neither changes a word of the output.

use std::fmt::Display;

/// Requests in which a drafter may fail before it is left out of all others.
const FAULTY_REQUESTS: usize = 3;

/// A drafter's failures since the engine began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DrafterFaults {
    /// Requests that it was dropped from.
    pub requests: usize,
    /// Whether it is dropped from all requests.
    pub is_dropped: bool,
    /// Its name and what the last failure was.
    pub reason: String,
}

impl DrafterFaults {
    /// Counts one more request in which the drafter `name` failed.
    pub(super) fn count(faults: &mut Option<Self>, name: &str, error: &impl Display) {
        let requests = faults.as_ref().map_or(0, |faults| faults.requests) + 1;
        let reason = format!("drafter `{name}` failed: {error}");
        *faults = Some(Self { requests, is_dropped: requests >= FAULTY_REQUESTS, reason });
    }

    /// What a user is told.
    pub fn message(&self) -> String {
        let Self { requests, is_dropped, reason } = self;
        if *is_dropped {
            format!("{reason}; it failed in {requests} requests and is no longer asked, decoding goes on without it")
        } else {
            format!("{reason}; that request goes on without it")
        }
    }
}
