//! Connections: accepts them, gives each a bounded time to send its request, and lets them finish at the end.

use std::net::TcpListener as StdListener;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

/// Connections at a time.
const MOST_CONNECTIONS: usize = 1024;
/// Time that connections get to send what they have at the end.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// Serves connections until `stop` becomes true. The head of a request has to come within `patience`.
pub(super) async fn serve(
    listener: StdListener,
    router: Router,
    patience: Duration,
    mut stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let graceful = GracefulShutdown::new();
    let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let Ok(permit) = room.clone().acquire_owned().await else { break };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stops| *stops) => break,
        };
        let Ok((stream, _)) = accepted else {
            // Out of file handles, or the client left at once: the listener itself is well.
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        // Tokens are small and should not wait for each other.
        let _ = stream.set_nodelay(true);
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(patience)
            .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router.clone()));
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // A connection that breaks concerns nobody but its client.
            let _ = connection.await;
            drop(permit);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(LAST_WORDS, graceful.shutdown()).await;
    Ok(())
}
