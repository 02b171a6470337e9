//! The body of a request, read within limits: of its size, of the time it takes, and of what all bodies together take.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use http_body_util::BodyExt as _;

use super::api_error::ApiError;

/// Largest body of a request.
const MOST_BYTES: usize = 4 << 20;
/// Bytes of all bodies that are being read or wait to be understood.
const MOST_BYTES_IN_ALL: usize = 256 << 20;
/// Seconds after which there may be room again.
const RETRY_S: u64 = 2;

/// Bytes of bodies in memory.
#[derive(Debug, Default)]
pub(super) struct Bodies(AtomicUsize);

/// A body in memory.
#[derive(Debug)]
pub(super) struct HeldBody {
    bytes: Vec<u8>,
    counted: usize,
    bodies: Arc<Bodies>,
}

impl Bodies {
    /// Reads the body of a JSON request.
    ///
    /// # Errors
    /// It is of another type, too large, too slow or broken, or there are too many at once.
    pub(super) async fn read(self: &Arc<Self>, request: Request, patience: Duration) -> Result<HeldBody, ApiError> {
        let kind =
            request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        // A page of another origin may send other types without being asked for leave, but not this one.
        if !kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json") {
            return Err(ApiError::bad("the request is not of type `application/json`; set the `Content-Type` header")
                .with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE));
        }
        let held = HeldBody { bytes: Vec::new(), counted: 0, bodies: self.clone() };
        tokio::time::timeout(patience, held.fill(request.into_body())).await.unwrap_or_else(|_| {
            Err(ApiError::bad(format!("the body did not come within {} seconds", patience.as_secs_f64()))
                .with_status(StatusCode::REQUEST_TIMEOUT))
        })
    }
}

impl HeldBody {
    async fn fill(mut self, mut body: Body) -> Result<Self, ApiError> {
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| ApiError::bad(format!("the body cannot be read: {error}")))?;
            if let Ok(data) = frame.into_data() {
                self.push(&data)?;
            }
        }
        Ok(self)
    }

    fn push(&mut self, data: &[u8]) -> Result<(), ApiError> {
        if self.bytes.len() + data.len() > MOST_BYTES {
            return Err(ApiError::bad(format!("the body is larger than {MOST_BYTES} bytes"))
                .with_status(StatusCode::PAYLOAD_TOO_LARGE));
        }
        let before = self.bodies.0.fetch_add(data.len(), Ordering::Relaxed);
        self.counted += data.len();
        if before + data.len() > MOST_BYTES_IN_ALL {
            return Err(ApiError::crowded(before, RETRY_S));
        }
        self.bytes.extend_from_slice(data);
        Ok(())
    }

    /// What was sent.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for HeldBody {
    fn drop(&mut self) {
        self.bodies.0.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_are_counted_and_given_back() {
        let bodies = Arc::new(Bodies::default());
        let held = || HeldBody { bytes: Vec::new(), counted: 0, bodies: bodies.clone() };
        let full = vec![0; MOST_BYTES];
        let mut all: Vec<HeldBody> = (0..MOST_BYTES_IN_ALL / MOST_BYTES).map(|_| held()).collect();
        // Only the counts: nobody needs the memory for a test.
        for held in &mut all {
            bodies.0.fetch_add(MOST_BYTES, Ordering::Relaxed);
            held.counted = MOST_BYTES;
        }
        let mut late = held();
        assert_eq!(late.push(&[0]).unwrap_err().status, StatusCode::TOO_MANY_REQUESTS);
        drop(late);
        all.pop();
        assert!(held().push(&full).is_ok(), "there is room for one again");
        assert_eq!(held().push(&vec![0; MOST_BYTES + 1]).unwrap_err().status, StatusCode::PAYLOAD_TOO_LARGE);
        drop(all);
        assert_eq!(bodies.0.load(Ordering::Relaxed), 0);
    }
}
