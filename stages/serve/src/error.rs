//! Errors of the server itself; what clients are told is in `api_error.rs`.

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything the server reports to whoever starts it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The address or the context cannot be used.
    #[error("{0}")]
    Input(String),
    /// A text cannot be the key of the API.
    #[error("cannot use the API key: {problem}")]
    ApiKey {
        /// What is wrong with it.
        problem: String,
    },
    /// The caches do not fit into memory.
    #[error("{what} need {:.2} GB of memory, {:.2} GB are available", *needed as f64 / 1e9, *available as f64 / 1e9)]
    Memory {
        /// What would be kept there.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes to be had.
        available: u64,
        /// What to do.
        hint: String,
    },
    /// An invariant does not hold.
    #[error("{0}")]
    Invariant(String),
}

impl Error {
    /// What the user can do about it, where something can be done.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Memory { hint, .. } => Some(hint.clone()),
            Self::ApiKey { .. } => Some(
                "give one word of visible ASCII, such as `openssl rand -hex 32` prints; without `--api-key` and \
                 `DEEPSPEC_API_KEY` the server asks for none"
                    .into(),
            ),
            Self::Io(_) | Self::Input(_) | Self::Invariant(_) => None,
        }
    }
}
