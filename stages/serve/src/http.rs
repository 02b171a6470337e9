//! Connections: accepts them, bounds the time that each may take to send a request and to take in an answer, and lets them
//! finish at the end.
//!
//! Nothing that a client does or leaves undone holds up the loop that accepts. Connections beyond the usual number get a seat
//! from a small reserve, where only the state of the server can be asked for, for a short time; beyond that they are closed.

use std::io;
use std::net::TcpListener as StdListener;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::Sleep;

/// Connections beyond the usual number, for asking how the server is.
const RESERVE: usize = 32;
/// Most time that a connection of the reserve gets.
const RESERVE_TIME: Duration = Duration::from_secs(2);
/// Time that connections get to send what they have at the end.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// What connections may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Connections at a time.
    pub(super) connections: usize,
    /// Time for the head of a request, and for taking in any part of an answer.
    pub(super) patience: Duration,
}

/// Serves connections with `usual`, those beyond the usual number with `reserve`, until `stop` becomes true.
pub(super) async fn serve(
    listener: StdListener,
    (usual, reserve): (Router, Router),
    limits: Limits,
    mut stop: watch::Receiver<bool>,
) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let graceful = GracefulShutdown::new();
    let seats = Arc::new(Semaphore::new(limits.connections));
    let spare = Arc::new(Semaphore::new(RESERVE));
    loop {
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
        let mut builder = http1::Builder::new();
        builder.timer(TokioTimer::new());
        // A connection that breaks concerns nobody but its client.
        if let Ok(seat) = seats.clone().try_acquire_owned() {
            let io = Patient::new(stream, limits.patience);
            let service = TowerToHyperService::new(usual.clone());
            let connection = builder.header_read_timeout(limits.patience).serve_connection(io, service);
            let connection = graceful.watch(connection);
            tokio::spawn(async move {
                let _ = connection.await;
                drop(seat);
            });
        } else if let Ok(seat) = spare.clone().try_acquire_owned() {
            let time = RESERVE_TIME.min(limits.patience);
            let io = Patient::new(stream, time);
            let service = TowerToHyperService::new(reserve.clone());
            let connection = builder.header_read_timeout(time).keep_alive(false).serve_connection(io, service);
            let connection = graceful.watch(connection);
            tokio::spawn(async move {
                let _ = tokio::time::timeout(time, connection).await;
                drop(seat);
            });
        }
    }
    drop(listener);
    let _ = tokio::time::timeout(LAST_WORDS, graceful.shutdown()).await;
    Ok(())
}

/// A connection that ends when its client takes in nothing for a while.
struct Patient {
    stream: TokioIo<TcpStream>,
    patience: Duration,
    /// Runs while the client has to take in something before there can be more.
    alarm: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn new(stream: TcpStream, patience: Duration) -> Self {
        Self { stream: TokioIo::new(stream), patience, alarm: None }
    }

    /// Passes on what came of an attempt to write, or ends the wait.
    fn watch<T>(&mut self, context: &mut Context<'_>, attempt: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if attempt.is_ready() {
            self.alarm = None;
            return attempt;
        }
        let patience = self.patience;
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        ready!(alarm.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not take in its answer")))
    }
}

impl Read for Patient {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, to: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, to)
    }
}

impl Write for Patient {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let attempt = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(context, attempt)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let attempt = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watch(context, attempt)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
