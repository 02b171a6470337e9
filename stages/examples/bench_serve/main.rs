//! Load on running servers: `bench_serve OUT PROMPTS TOKENS REQUESTS LEVELS NAME=ADDRESS …`.
//!
//! Each server (one per schedule) gets the same prompts at each level of concurrency, in turns, so that a machine that slows
//! down slows all of them. REQUESTS is the least number of requests of a cell, LEVELS is a list such as `1,2,4`. Prompts are JSON
//! lines with `turns`. Writes `load.json`, `README.md` and plots to OUT. `scripts/bench_serve.sh` starts the servers.
#![expect(clippy::print_stdout, clippy::disallowed_methods, reason = "a measuring tool")]

mod client;

use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use serde_json::{Value, json};

use client::{Timed, ask};

/// File, figure and title of each plot.
const PLOTS: [(&str, &str, &str); 4] = [
    ("throughput.svg", "tokens_per_s", "tokens per second"),
    ("per_user.svg", "tokens_per_s_per_user", "tokens per second of one user"),
    ("first_token.svg", "first_token_s_p99", "seconds to the first token, 99 % of requests"),
    ("verified.svg", "verified_per_round", "drafted tokens verified per request and round"),
];

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// How often every cell is measured; its figures are over all of them, its throughput is their median.
const TURNS: usize = 3;

/// What one server did at one level.
#[derive(Default)]
struct Cell {
    requests: Vec<Timed>,
    tokens_per_s: Vec<f64>,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [out, prompts, tokens, requests, levels, servers @ ..] = &arguments[..] else {
        return Err("usage: bench_serve OUT PROMPTS TOKENS REQUESTS LEVELS NAME=ADDRESS …".into());
    };
    let prompts = read_prompts(Path::new(prompts))?;
    let (tokens, requests): (usize, usize) = (tokens.parse()?, requests.parse()?);
    let levels: Vec<usize> = levels.split(',').map(str::parse).collect::<std::result::Result<_, _>>()?;
    let servers: Vec<(&str, &str)> = servers.iter().filter_map(|server| server.rsplit_once('=')).collect();
    if servers.is_empty() || levels.is_empty() || prompts.is_empty() {
        return Err("no server, level or prompt".into());
    }
    for (_, address) in &servers {
        // Pages and estimates warm up.
        load(address, &prompts, tokens, 2, 2)?;
    }
    let mut cells: Vec<Vec<Cell>> = levels.iter().map(|_| servers.iter().map(|_| Cell::default()).collect()).collect();
    for turn in 0..TURNS {
        for (&level, row) in levels.iter().zip(&mut cells) {
            for i in 0..servers.len() {
                let place = (i + turn) % servers.len();
                let count = requests.max(2 * level);
                let (seconds, done) = load(servers[place].1, &prompts, tokens, level, count)?;
                let written: usize = done.iter().map(|timed| timed.tokens).sum();
                row[place].tokens_per_s.push(written as f64 / seconds);
                row[place].requests.extend(done);
                println!("turn {turn}, {level} clients, {}: {:.1} tok/s", servers[place].0, written as f64 / seconds);
            }
        }
    }
    let report = report(&levels, &servers, &cells);
    fs_err::create_dir_all(out)?;
    let setup = json!({ "tokens": tokens, "requests": requests, "turns": TURNS, "prompts": prompts.len() });
    let result = json!({ "setup": setup, "cells": report });
    fs_err::write(Path::new(out).join("load.json"), serde_json::to_string_pretty(&result)? + "\n")?;
    let mut text = format!(
        "# Serving under load\n\nEvery client sends a prompt as soon as its last one is answered: {} prompts in turn, {tokens} new tokens each at \
         temperature 0, at least {requests} requests and two of each client per measurement. One server per schedule, {TURNS} turns; \
         throughput is the median over turns, times are over all requests. *Verified per round* are the drafted tokens that a pass \
         verifies for a request.\n\n{}\n{}",
        prompts.len(),
        table(&report),
        against_fixed(&levels, &report),
    );
    for (file, key, title) in PLOTS {
        fs_err::write(Path::new(out).join(file), plot(&levels, &servers, &report, key, title))?;
        let _ = write!(text, "\n![{title}]({file})\n");
    }
    fs_err::write(Path::new(out).join("README.md"), &text)?;
    println!("{text}");
    Ok(())
}

fn read_prompts(path: &Path) -> Result<Vec<String>> {
    let text = fs_err::read_to_string(path)?;
    let prompt = |line: &str| Some(serde_json::from_str::<Value>(line).ok()?["turns"][0].as_str()?.to_owned());
    Ok(text.lines().filter_map(prompt).filter(|prompt| prompt.len() < 1500).collect())
}

/// `clients` threads that send the next of `count` requests as soon as the last one is answered; the seconds that it took.
fn load(address: &str, prompts: &[String], tokens: usize, clients: usize, count: usize) -> Result<(f64, Vec<Timed>)> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..clients)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    loop {
                        let i = next.fetch_add(1, Ordering::SeqCst);
                        if i >= count {
                            return Ok(());
                        }
                        let body = json!({
                            "messages": [{ "role": "user", "content": prompts[i % prompts.len()] }],
                            "max_tokens": tokens, "temperature": 0, "stream": true,
                            "stream_options": { "include_usage": true },
                        });
                        let timed = ask(address, &body)?;
                        done.lock().map_err(|_| "a client panicked")?.push(timed);
                    }
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a client panicked")?)
    })?;
    let seconds = begun.elapsed().as_secs_f64();
    Ok((seconds, done.into_inner().map_err(|_| "a client panicked")?))
}

fn quantile(values: impl IntoIterator<Item = f64>, part: f64) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_unstable_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values.get((part * last as f64).round() as usize).copied().unwrap_or(0.0)
}

/// One object per level and server.
fn report(levels: &[usize], servers: &[(&str, &str)], cells: &[Vec<Cell>]) -> Vec<Value> {
    let mut rows = Vec::new();
    for (level, row) in levels.iter().zip(cells) {
        for ((name, _), cell) in servers.iter().zip(row) {
            let sum = |part: fn(&Timed) -> usize| cell.requests.iter().map(part).sum::<usize>() as f64;
            let firsts = || cell.requests.iter().map(|timed| timed.first_s);
            let gaps = || cell.requests.iter().filter_map(Timed::per_token_s);
            let rounds = sum(|timed| timed.rounds).max(1.0);
            rows.push(json!({
                "clients": level,
                "schedule": name,
                "requests": cell.requests.len(),
                "tokens_per_s": quantile(cell.tokens_per_s.iter().copied(), 0.5),
                "tokens_per_s_of_turns": cell.tokens_per_s,
                "tokens_per_s_per_user": 1.0 / quantile(gaps(), 0.5),
                "first_token_s_p50": quantile(firsts(), 0.5),
                "first_token_s_p99": quantile(firsts(), 0.99),
                "per_token_s_p50": quantile(gaps(), 0.5),
                "per_token_s_p99": quantile(gaps(), 0.99),
                "verified_per_round": sum(|timed| timed.verified) / rounds,
                "tau": 1.0 + sum(|timed| timed.accepted) / rounds,
            }));
        }
    }
    rows
}

fn table(rows: &[Value]) -> String {
    let mut text =
        "| clients | schedule | tok/s | tok/s per user | first token p50 / p99 ms | per token p50 / p99 ms | verified \
        per round | tau |\n| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
            .to_owned();
    for row in rows {
        let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
        let ms = |key: &str| 1e3 * number(key);
        let _ = writeln!(
            text,
            "| {} | {} | {:.1} | {:.1} | {:.0} / {:.0} | {:.1} / {:.1} | {:.2} | {:.2} |",
            row["clients"],
            row["schedule"].as_str().unwrap_or_default(),
            number("tokens_per_s"),
            number("tokens_per_s_per_user"),
            ms("first_token_s_p50"),
            ms("first_token_s_p99"),
            ms("per_token_s_p50"),
            ms("per_token_s_p99"),
            number("verified_per_round"),
            number("tau"),
        );
    }
    text
}

/// How the throughput of the scheduled server compares with the best of the plain and fixed ones, at each level; nothing where
/// there are none to compare.
fn against_fixed(levels: &[usize], rows: &[Value]) -> String {
    let mut text = String::new();
    for level in levels {
        let at = |of: fn(&str) -> bool| {
            let rows = rows.iter().filter(|row| row["clients"] == *level && row["schedule"].as_str().is_some_and(of));
            rows.filter_map(|row| row["tokens_per_s"].as_f64()).reduce(f64::max)
        };
        let scheduled = at(|name| name == "scheduled");
        let best = at(|name| name == "plain" || name.starts_with("fixed"));
        if let (Some(scheduled), Some(best)) = (scheduled, best) {
            let _ = writeln!(
                text,
                "- {level} clients: scheduled is {:.2} of the best of plain and fixed",
                scheduled / best
            );
        }
    }
    text
}

/// A figure over the number of clients, one line per schedule.
fn plot(levels: &[usize], servers: &[(&str, &str)], rows: &[Value], key: &str, title: &str) -> String {
    const COLOURS: [&str; 6] = ["#6b7280", "#2f6fb3", "#c2742b", "#1f8a58", "#8a4fb0", "#c03f3f"];
    let most = rows.iter().filter_map(|row| row[key].as_f64()).fold(f64::MIN_POSITIVE, f64::max);
    let decimals = if most < 10.0 { 2 } else { 0 };
    let x = |i: usize| 50.0 + 420.0 * i as f64 / (levels.len().max(2) - 1) as f64;
    let y = |value: f64| 270.0 - 240.0 * value / most;
    let mut svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 620 320\" font-family=\"sans-serif\" \
        font-size=\"12\"><rect width=\"620\" height=\"320\" fill=\"#fff\"/>"
        .to_owned();
    for step in 0..=4 {
        let value = most * f64::from(step) / 4.0;
        let at = y(value);
        let _ = write!(
            svg,
            "<path d=\"M50 {at:.1}H470\" stroke=\"#ddd\"/><text x=\"44\" y=\"{:.1}\" text-anchor=\"end\">{value:.decimals$}</text>",
            at + 4.0
        );
    }
    for (i, level) in levels.iter().enumerate() {
        let _ = write!(svg, "<text x=\"{:.1}\" y=\"288\" text-anchor=\"middle\">{level}</text>", x(i));
    }
    let _ = write!(
        svg,
        "<text x=\"260\" y=\"308\" text-anchor=\"middle\">clients</text><text x=\"50\" y=\"18\">{title}</text>"
    );
    for (s, (name, _)) in servers.iter().enumerate() {
        let colour = COLOURS[s % COLOURS.len()];
        let values = rows.iter().filter(|row| row["schedule"] == *name).filter_map(|row| row[key].as_f64());
        let points: Vec<String> = values.enumerate().map(|(i, value)| format!("{:.1},{:.1}", x(i), y(value))).collect();
        let at = 40 + 18 * s;
        let _ = write!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/><path d=\"M485 {at}h18\" \
             stroke=\"{colour}\" stroke-width=\"2\"/><text x=\"508\" y=\"{}\">{name}</text>",
            points.join(" "),
            at + 4
        );
    }
    svg + "</svg>\n"
}
