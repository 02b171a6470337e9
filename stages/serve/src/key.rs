//! The key of the API: what may be one, and whether a request has it.

use axum::http::{HeaderMap, header};
use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};

/// A key that clients have to send as `Authorization: Bearer KEY`. Only its hash is kept.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey([u8; 32]);

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ApiKey")
    }
}

impl ApiKey {
    /// Takes a key.
    ///
    /// # Errors
    /// [`Error::ApiKey`] for one that no client can send, or that would let in everybody: it is empty, or has characters other
    /// than visible ones of ASCII.
    pub fn new(key: &str) -> Result<Self> {
        let refuse = |problem: &str| Err(Error::ApiKey { problem: problem.into() });
        if key.trim().is_empty() {
            return refuse(if key.is_empty() { "it is empty" } else { "it is nothing but white space" });
        }
        if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return refuse("it has characters that are not visible ASCII, such as a space or a line break");
        }
        Ok(Self(hash(key)))
    }

    /// Whether the head of a request has the key. The scheme's name is read in any case, as RFC 7235 has it.
    pub(super) fn is_in(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        let key =
            given.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        is_same(&self.0, &hash(key.map_or("", |(_, key)| key.trim())))
    }
}

fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

/// Compares in a time that does not depend on where two hashes differ.
fn is_same(left: &[u8; 32], right: &[u8; 32]) -> bool {
    let difference = left.iter().zip(right).fold(0, |sum, (l, r)| sum | (l ^ r));
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn keys_are_compared_whole() {
        assert!(is_same(&hash("a"), &hash("a")));
        assert!(!is_same(&hash("a"), &hash("b")));
        let mut last: [u8; 32] = hash("a");
        last[31] ^= 1;
        assert!(!is_same(&hash("a"), &last));
    }

    #[test]
    fn a_key_that_lets_in_everybody_or_nobody_is_refused() {
        for (key, problem) in [
            ("", "it is empty"),
            (" ", "white space"),
            ("\t\n ", "white space"),
            ("two words", "not visible ASCII"),
            ("secret\n", "not visible ASCII"),
            ("schlüssel", "not visible ASCII"),
        ] {
            let error = ApiKey::new(key).unwrap_err();
            assert!(error.to_string().contains(problem), "{key:?}: {error}");
            assert!(error.hint().is_some());
        }
        assert!(ApiKey::new("sk-~!").is_ok());
    }

    #[test]
    fn the_name_of_the_scheme_is_read_in_any_case() {
        let key = ApiKey::new("secret").unwrap();
        let has = |value: &str| {
            let headers = [(header::AUTHORIZATION, HeaderValue::from_str(value).unwrap())];
            key.is_in(&headers.into_iter().collect())
        };
        for right in ["Bearer secret", "bearer secret", "BEARER secret", "bEaReR   secret", "Bearer secret "] {
            assert!(has(right), "{right}");
        }
        for wrong in
            ["secret", "Bearer", "Bearer ", "Bearer Secret", "Basic secret", "Bearersecret", "", "Bearer secret x"]
        {
            assert!(!has(wrong), "{wrong}");
        }
        assert!(!key.is_in(&HeaderMap::new()));
    }
}
