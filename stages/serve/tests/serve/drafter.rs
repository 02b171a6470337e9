//! A drafter that turns bad, or brings nothing, while clients are served: their answers are those of plain decoding, and the server
//! says what is wrong.

use std::net::SocketAddr;
use std::thread;

use deepspec_engine::Sources;
use serde_json::{Value, json};

use crate::server::{Setup, get, metric, post, serve_with, wait_until_idle};
use crate::turns_bad::Fault;

const CLIENTS: usize = 8;
const REQUESTS: usize = 6;

/// Answers of clients that ask at the same time; greedy ones and ones with a seed take turns.
fn answers(address: SocketAddr) -> Vec<Vec<Value>> {
    let ask = |client: usize, i: usize| {
        let body = json!({
            "prompt": format!("{client} a b c {i} a b"), "max_tokens": 40 + 3 * i, "ignore_eos": true,
            "temperature": 0, "stream": false,
        });
        let reply = post(address, "/v1/completions", &body);
        assert_eq!(reply.status, 200, "{reply:?}");
        reply.json()["choices"].clone()
    };
    thread::scope(|scope| {
        let clients: Vec<_> =
            (0..CLIENTS).map(|client| scope.spawn(move || (0..REQUESTS).map(|i| ask(client, i)).collect())).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

fn setup(fault: Option<(Fault, usize)>, sources: Sources) -> Setup {
    Setup { queue: 16, fault, sources, ..Setup::default() }
}

#[test]
fn every_request_ends_as_in_plain_decoding_while_the_drafter_turns_bad() {
    // A lookup alone, whose answers are compared with plain decoding elsewhere.
    let (plain, _) = serve_with(setup(None, Sources::Ngram), |address, _| answers(address));
    for fault in [Fault::Propose, Fault::Observe, Fault::Row, Fault::Confidence, Fault::Missing] {
        for sources in [Sources::Draft, Sources::Hybrid] {
            let ((), log) = serve_with(setup(Some((fault, 25)), sources), |address, _| {
                assert_eq!(get(address, "/health").json(), json!({ "status": "ok" }));
                assert_eq!(answers(address), plain, "{fault:?}, {sources:?}");
                wait_until_idle(address);
                let health = get(address, "/health");
                assert_eq!(health.status, 200, "the answers are right");
                let health = health.json();
                assert_eq!(health["status"], "degraded", "{health}");
                assert!(health["drafter"]["reason"].as_str().unwrap().contains("`dspark`"), "{health}");
                let failed = metric(address, "deepspec_drafter_failed_requests_total");
                assert!(failed >= 1.0 && health["drafter"]["failed_requests"] == failed as u64, "{health}, {failed}");
                let dropped = metric(address, "deepspec_drafter_dropped");
                assert_eq!(dropped > 0.0, health["drafter"]["dropped"] == true);
            });
            assert!(log.iter().any(|line| line.contains("drafter `dspark` failed")), "{log:?}");
        }
    }
}

/// Its proposals are hardly ever verified, since it does not pay; that is what has to be noticed.
#[test]
fn a_useless_drafter_is_called_out_under_the_default_schedule() {
    let mut plain = None;
    for sources in [Sources::Draft, Sources::Hybrid] {
        let ((), log) = serve_with(setup(Some((Fault::Useless, 0)), sources), |address, _| {
            let found = answers(address);
            assert_eq!(plain.get_or_insert_with(|| found.clone()), &found);
            wait_until_idle(address);
            assert!(metric(address, "deepspec_rounds_total") > 900.0);
            assert!(metric(address, "deepspec_fallback_rounds_total") > 200.0);
            assert_eq!(metric(address, "deepspec_drafter_idle"), 1.0);
            assert_eq!(get(address, "/health").json(), json!({ "status": "ok" }));
        });
        let said = log.iter().filter(|line| line.contains("the drafter is of no use here")).count();
        assert!(said >= 1, "{log:?}");
    }
    let ((), log) = serve_with(setup(None, Sources::Draft), |address, _| {
        answers(address);
        wait_until_idle(address);
    });
    assert!(!log.iter().any(|line| line.contains("of no use")), "{log:?}");
}
