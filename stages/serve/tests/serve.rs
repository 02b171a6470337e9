//! The server over real sockets, with the tiny target: answers, refusals, clients that leave, and the end.
#![expect(clippy::unwrap_used, reason = "tests fail as tests do")]

#[path = "serve/admission.rs"]
mod admission;
#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "serve/connections.rs"]
mod connections;
#[path = "serve/drafter.rs"]
mod drafter;
#[path = "serve/robustness.rs"]
mod robustness;
#[path = "serve/server.rs"]
mod server;
#[path = "../../tests/common/tiny.rs"]
mod tiny;
#[path = "../../tests/common/tiny_drafter.rs"]
mod tiny_drafter;
#[path = "../../tests/common/turns_bad.rs"]
mod turns_bad;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use deepspec_models::config::DrafterConfig;
use deepspec_models::speculate::{CounterRng, Stream};
use deepspec_serve::Capacity;
use serde_json::{Value, json};

use server::{PATIENCE, Reply, THINK, get, metric, open, post, post_bytes, read, serve, wait_until_idle};

#[test]
fn clients_are_answered() {
    serve(None, |address, _| {
        let ask = |path: &str, body: Value| {
            let reply = post(address, path, &body);
            assert_eq!(reply.status, 200, "{reply:?}");
            reply
        };
        assert_eq!(get(address, "/health").status, 200);
        assert_eq!(get(address, "/v1/models").json()["data"][0]["id"], "tiny");
        assert_eq!(get(address, "/v1/models/tiny").json()["max_model_len"], 200);
        assert!(get(address, "/").body.contains("<script>"));
        assert_eq!(get(address, "/openapi.json").json()["openapi"], "3.1.0");

        let messages = json!([{ "role": "system", "content": "Be brief." }, { "role": "user", "content": "Hi ho" }]);
        let body = json!({ "model": "tiny", "messages": messages, "max_tokens": 40, "temperature": 0 });
        let whole = ask("/v1/chat/completions", body.clone()).json();
        let content = whole["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(!content.is_empty() && whole["object"] == "chat.completion");
        let usage = &whole["usage"];
        assert_eq!(
            usage["total_tokens"],
            usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap()
        );
        let (details, speculation) = (&usage["completion_tokens_details"], &whole["speculation"]);
        assert_eq!(details["accepted_prediction_tokens"], speculation["accepted_tokens"]);

        // The same as events.
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        streamed["stream_options"] = json!({ "include_usage": true });
        streamed["return_rounds"] = json!(true);
        let events = ask("/v1/chat/completions", streamed).events();
        let parts = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
        assert_eq!(parts.collect::<String>(), content);
        assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
        let (last, end) = (&events[events.len() - 1], &events[events.len() - 2]);
        assert_eq!(&last["usage"], usage);
        assert!(last["choices"].as_array().unwrap().is_empty() && events[0]["usage"].is_null());
        assert_eq!(end["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]);
        assert!(events.iter().any(|event| !event["choices"][0]["round"]["proposed"].is_null()));

        // Stop texts, choices, seeds, log probabilities.
        let start: String = content.chars().take(3).collect();
        let stop: String = content.chars().skip(3).take(2).collect();
        let mut stopping = body.clone();
        stopping["stop"] = json!([stop]);
        let stopped = ask("/v1/chat/completions", stopping).json();
        assert_eq!(stopped["choices"][0]["message"]["content"].as_str(), content.find(&stop).map(|at| &content[..at]));
        assert!(!start.is_empty());
        assert_eq!(
            (&stopped["choices"][0]["finish_reason"], &stopped["choices"][0]["stop_reason"]),
            (&json!("stop"), &json!(stop))
        );
        let sampled = json!({
            "prompt": ["one", "two"], "n": 2, "seed": 11, "max_tokens": 12, "temperature": 1.2, "logprobs": 2, "ignore_eos": true,
        });
        let first = ask("/v1/completions", sampled.clone()).json();
        let texts = |reply: &Value| -> Vec<String> {
            reply["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap().into()).collect()
        };
        assert_eq!(texts(&first).len(), 4);
        assert_ne!(texts(&first)[0], texts(&first)[1]);
        assert_eq!(texts(&first), texts(&ask("/v1/completions", sampled).json()), "a seed gives the same answer");
        let logprobs = &first["choices"][0]["logprobs"];
        assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 12);
        assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
        assert_eq!(logprobs["text_offset"][0], 0);
        let mut detailed = body;
        (detailed["logprobs"], detailed["top_logprobs"]) = (json!(true), json!(3));
        let entries = ask("/v1/chat/completions", detailed).json()["choices"][0]["logprobs"]["content"].clone();
        for entry in entries.as_array().unwrap() {
            assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 3);
            assert_eq!(entry["top_logprobs"][0]["logprob"], entry["logprob"], "greedy takes the likeliest: {entry}");
        }

        // The simple form, whole and line by line.
        let simple = json!({ "prompt": "once", "max_tokens": 5, "temperature": 0 });
        let text = ask("/generate", simple.clone()).json()["text"][0].clone();
        assert!(text.as_str().unwrap().starts_with("once"));
        let mut simple = simple;
        simple["stream"] = json!(true);
        let lines = ask("/generate", simple).body;
        assert_eq!(serde_json::from_str::<Value>(lines.lines().last().unwrap()).unwrap()["text"][0], text);
        // Tokens for a prompt, and none.
        ask("/v1/completions", json!({ "prompt": [5, 6, 7], "max_tokens": 1 }));
        ask("/v1/completions", json!({ "prompt": "", "max_tokens": 1 }));

        assert!(metric(address, "vllm:spec_decode_num_draft_tokens_total") > 0.0);
        assert!(metric(address, "vllm:generation_tokens_total") > 100.0);
    });
}

/// The parts of a chat answer in events, joined: reasoning and content.
fn chat_parts(events: &[Value]) -> [String; 2] {
    let part = |name: &str| events.iter().filter_map(|event| event["choices"][0]["delta"][name].as_str()).collect();
    [part("reasoning_content"), part("content")]
}

/// Reasoning and answer over the API: the same tokens, with the marks as text and split at them.
#[test]
fn reasoning_comes_apart_from_the_answer() {
    serve(None, |address, _| {
        // ASCII only, so that no character is cut by a mark, and a mark now and then.
        let mut bias: serde_json::Map<String, Value> =
            (128..256).chain(260..320).map(|token| (token.to_string(), json!(-100))).collect();
        let mut split = 0;
        for seed in 0..40 {
            // From rare to frequent marks.
            bias.insert(THINK[1].to_string(), json!(5.0 + 0.25 * f64::from(seed)));
            let common = json!({
                "seed": seed, "temperature": 2.0, "max_tokens": 32, "logit_bias": bias, "ignore_eos": true, "logprobs": true,
            });
            let mut chat = common.clone();
            chat["messages"] = json!([{ "role": "user", "content": "<think> a a b a a b" }]);
            chat["chat_template_kwargs"] = json!({ "enable_thinking": true });
            let whole = post(address, "/v1/chat/completions", &chat).json();
            let message = &whole["choices"][0]["message"];
            let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
            let found = [text("reasoning_content"), text("content")];
            // What the tokens say.
            let mut expected = [String::new(), String::new()];
            let mut part = 0;
            for entry in whole["choices"][0]["logprobs"]["content"].as_array().unwrap() {
                match entry["token"].as_str().unwrap() {
                    "</think>" if part == 0 => part = 1,
                    // Control tokens have no text.
                    "<think>" | "</think>" | "<|im_start|>" | "<|im_end|>" => {}
                    token => expected[part].push_str(token),
                }
            }
            let expected = [expected[0].trim_matches('\n'), expected[1].trim_start_matches('\n')];
            assert_eq!(found, expected, "seed {seed}");
            split += usize::from(found.iter().all(|part| !part.is_empty()));
            chat["stream"] = json!(true);
            let events = post(address, "/v1/chat/completions", &chat).events();
            assert_eq!(chat_parts(&events), found, "seed {seed}, streamed");
            // Without thinking, the mark of the prompt is not there and nothing is split.
            chat["chat_template_kwargs"] = json!({ "enable_thinking": false });
            chat["stream"] = json!(false);
            let plain = post(address, "/v1/chat/completions", &chat).json();
            assert!(plain["choices"][0]["message"]["reasoning_content"].is_null(), "seed {seed}: {plain}");
        }
        assert!(split > 5, "only {split} answers had both parts");
    });
}

/// The budget ends inside a character; what was whole is the answer.
#[test]
fn a_budget_that_ends_inside_an_emoji_gives_what_was_whole() {
    serve(None, |address, _| {
        let bias: serde_json::Map<String, Value> = "👍".bytes().map(|byte| (byte.to_string(), json!(14))).collect();
        let mut cut = 0;
        for budget in 1..=40 {
            let mut body = json!({
                "messages": [{ "role": "user", "content": "👍👍👍" }], "max_tokens": budget, "seed": budget,
                "logit_bias": bias, "logprobs": true, "ignore_eos": true,
            });
            let reply = post(address, "/v1/chat/completions", &body);
            assert_eq!(reply.status, 200);
            let choice = &reply.json()["choices"][0];
            let entries = choice["logprobs"]["content"].as_array().unwrap();
            let byte = |entry: &Value| match entry["token"].as_str().unwrap() {
                control if control.starts_with('<') && control.len() > 1 => Vec::new(),
                _ => entry["bytes"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8).collect(),
            };
            let mut bytes: Vec<u8> = entries.iter().flat_map(byte).collect();
            let chunks: Vec<_> = bytes.utf8_chunks().collect();
            if let Some(rest) = chunks.last().map(|chunk| chunk.invalid().to_vec())
                && !rest.is_empty()
                && str::from_utf8(&rest).unwrap_err().error_len().is_none()
            {
                cut += 1;
                bytes.truncate(bytes.len() - rest.len());
            }
            let expected = String::from_utf8_lossy(&bytes).into_owned();
            assert_eq!(choice["message"]["content"], expected, "budget {budget}");
            body["stream"] = json!(true);
            let events = post(address, "/v1/chat/completions", &body).events();
            assert_eq!(chat_parts(&events)[1], expected, "budget {budget}, streamed");
        }
        assert!(cut > 5, "only {cut} budgets ended inside a character");
    });
}

#[test]
fn wrong_requests_are_told_what_is_wrong() {
    serve(None, |address, _| {
        let chat = |extra: Value| {
            let mut body = json!({ "messages": [{ "role": "user", "content": "x" }], "max_tokens": 2 });
            body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            post(address, "/v1/chat/completions", &body)
        };
        for (extra, status, param) in [
            (json!({ "temperature": "hot" }), 400, "temperature"),
            (json!({ "model": "gpt-9" }), 404, "model"),
            (json!({ "max_tokens": 100_000 }), 400, "messages"),
            (json!({ "n": 129 }), 400, "n"),
            (json!({ "n": 6 }), 400, "n"),
            (json!({ "logit_bias": { "9999": 1 } }), 400, "logit_bias"),
            (json!({ "stop_token_ids": [9999] }), 400, "stop_token_ids"),
            (json!({ "tools": [{ "type": "function" }] }), 400, "tools"),
            (json!({ "nonsense": 1 }), 400, "nonsense"),
        ] {
            let reply = chat(extra.clone());
            let error = &reply.json()["error"];
            assert_eq!((reply.status, error["param"].as_str()), (status, Some(param)), "{extra}: {reply:?}");
            assert!(error["message"].is_string() && error["type"].is_string());
        }
        let raw = |body: &[u8]| read(post_bytes(address, "/v1/completions", body));
        for body in [&b""[..], b"{", b"[]", b"\"x\"", b"{\"prompt\": \"\xff\"}", b"{\"prompt\": \"\\ud800\"}", b"\0\0"]
        {
            let reply = raw(body);
            assert_eq!(
                (reply.status, reply.json()["error"]["type"].as_str()),
                (400, Some("invalid_request_error")),
                "{body:?}"
            );
        }
        assert_eq!(raw(&vec![b' '; (4 << 20) + 1]).status, 413);
        assert_eq!(raw("[".repeat(100_000).as_bytes()).status, 400, "deep nesting");
        assert_eq!(raw(br#"{"prompt": [400], "max_tokens": 1}"#).json()["error"]["param"], "prompt");
        assert_eq!(read(open(address, "POST /v1/completions HTTP/1.1", b"{}")).status, 415);
        assert_eq!(get(address, "/nothing").json()["error"]["code"], "not_found");
        assert_eq!(get(address, "/v1/completions").status, 405);
        assert_eq!(get(address, "/v1/models/other").status, 404);
        // Nothing of all that has reached the engine.
        assert_eq!(metric(address, "vllm:prompt_tokens_total"), 0.0);
    });
}

#[test]
fn a_key_is_asked_for_where_there_is_one() {
    serve(Some("secret"), |address, _| {
        let with =
            |key: &str| read(open(address, &format!("GET /v1/models HTTP/1.1\r\nauthorization: {key}"), b"")).status;
        assert_eq!(get(address, "/v1/models").status, 401);
        assert_eq!(
            (with("Bearer secret"), with("Bearer secre"), with("secret"), with("Bearer ")),
            (200, 401, 401, 401)
        );
        assert_eq!((get(address, "/metrics").status, get(address, "/stats").status), (401, 401));
        assert_eq!((get(address, "/health").status, get(address, "/").status), (200, 200));
    });
}

/// Memory of this process; 0 where the system does not say.
fn resident_bytes() -> usize {
    let text = fs_err::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
}

#[test]
fn clients_that_leave_free_their_places() {
    serve(None, |address, _| {
        let body = json!({ "prompt": "a b a b", "max_tokens": 190, "temperature": 0, "ignore_eos": true });
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let mut memory = 0;
        for i in 0..500 {
            if i == 100 {
                memory = resident_bytes();
            }
            let body = if i % 2 == 0 { &body } else { &streamed };
            let mut stream = post_bytes(address, "/v1/completions", body.to_string().as_bytes());
            if i % 4 == 1 {
                // Hears the beginning first.
                let _ = stream.read(&mut [0; 64]);
            }
            if i % 7 == 0 {
                let _ = stream.shutdown(Shutdown::Write);
            }
            drop(stream);
        }
        wait_until_idle(address);
        // A sequence's caches are half a megabyte: of 400 kept ones there would be 200. Other tests run in the same process.
        let grown = resident_bytes().saturating_sub(memory);
        assert!(grown < 64 << 20, "{grown} bytes");
        let aborted = r#"vllm:request_success_total{model_name="tiny",finished_reason="abort"}"#;
        let text = get(address, "/metrics").body;
        let line = text.lines().find(|line| line.starts_with(aborted)).unwrap();
        assert!(line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() > 20.0, "{line}");
        // All places are there again.
        let replies: Vec<_> =
            (0..5).map(|_| post_bytes(address, "/v1/completions", body.to_string().as_bytes())).collect();
        let replies: Vec<Reply> = replies.into_iter().map(read).collect();
        assert!(replies.iter().all(|reply| reply.status == 200), "{replies:?}");
        assert!(replies.windows(2).all(|pair| pair[0].json()["choices"] == pair[1].json()["choices"]));
    });
}

/// Clients that send a head or a body bit by bit, or nothing, and such as do not read: they hold up nobody, and those who
/// send are told to leave.
#[test]
fn slow_clients_hold_up_nobody() {
    serve(None, |address, _| {
        let connect = |sent: &str| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            stream.write_all(sent.as_bytes()).unwrap();
            stream
        };
        let head =
            "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: 400\r\n";
        let slow_heads: Vec<_> = (0..20).map(|_| connect(&head[..30])).collect();
        let slow_bodies: Vec<_> = (0..20).map(|_| connect(&format!("{head}\r\n{{\"prompt\": "))).collect();
        let silent: Vec<_> = (0..20).map(|_| connect("")).collect();
        let stopped_sending = connect(&format!("{head}\r\n{{\"prompt\""));
        stopped_sending.shutdown(Shutdown::Write).unwrap();
        // This one never reads.
        let body =
            json!({ "prompt": "a b", "max_tokens": 150, "stream": true, "ignore_eos": true, "return_rounds": true });
        let deaf = post_bytes(address, "/v1/completions", body.to_string().as_bytes());

        let begun = Instant::now();
        let trickle = thread::scope(|scope| {
            let slow = &slow_bodies;
            let trickle = scope.spawn(move || {
                // A byte now and then does not buy more time.
                let mut rounds = 0;
                while begun.elapsed() < 2 * PATIENCE {
                    for mut stream in slow {
                        let _ = stream.write_all(b" ");
                    }
                    rounds += 1;
                    thread::sleep(Duration::from_millis(50));
                }
                rounds
            });
            for _ in 0..5 {
                let reply = post(address, "/v1/completions", &json!({ "prompt": "a", "max_tokens": 3 }));
                assert_eq!(reply.status, 200);
            }
            assert!(begun.elapsed() < 5 * PATIENCE, "others waited for slow ones: {:?}", begun.elapsed());
            trickle.join().unwrap()
        });
        assert!(trickle > 10);
        let first_line = |mut stream: TcpStream| {
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).lines().next().unwrap_or_default().to_owned()
        };
        for stream in slow_bodies {
            assert!(first_line(stream).contains("408"), "a body that does not come");
        }
        for stream in slow_heads.into_iter().chain(silent).chain([stopped_sending]) {
            let line = first_line(stream);
            assert!(line.is_empty() || line.contains("400") || line.contains("408"), "{line}");
        }
        assert!(begun.elapsed() < 10 * PATIENCE, "the server kept slow clients: {:?}", begun.elapsed());
        drop(deaf);
        wait_until_idle(address);
        assert_eq!(get(address, "/health").status, 200);
    });
}

#[test]
fn more_than_can_wait_are_sent_away() {
    serve(None, |address, _| {
        let body = json!({ "prompt": "a b c", "max_tokens": 190, "temperature": 0, "ignore_eos": true }).to_string();
        let streams: Vec<_> = (0..12).map(|_| post_bytes(address, "/v1/completions", body.as_bytes())).collect();
        let replies: Vec<Reply> = streams.into_iter().map(read).collect();
        let away: Vec<&Reply> = replies.iter().filter(|reply| reply.status == 429).collect();
        assert!(!away.is_empty() && replies.iter().all(|reply| [200, 429].contains(&reply.status)), "{replies:?}");
        assert!(away.iter().all(|reply| reply.head.to_lowercase().contains("retry-after:")));
        assert_eq!(metric(address, "deepspec_requests_refused_total"), away.len() as f64);
    });
}

#[test]
fn what_is_in_work_is_finished_at_the_end() {
    let (reply, log) = serve(None, |address, interrupt| {
        let body =
            json!({ "prompt": "a b c", "max_tokens": 150, "temperature": 0, "ignore_eos": true, "stream": true });
        let mut stream = post_bytes(address, "/v1/completions", body.to_string().as_bytes());
        // It has begun.
        let mut start = [0; 1];
        stream.read_exact(&mut start).unwrap();
        interrupt.set();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).unwrap();
        String::from_utf8([&start[..], &rest].concat()).unwrap()
    });
    assert!(reply.contains("\"finish_reason\":\"length\"") && reply.contains("[DONE]"), "{reply}");
    assert!(log.iter().any(|line| line.starts_with("listening on http://127.0.0.1:")), "{log:?}");
}

/// Requests that are nearly right, and bytes that are not: never a failure of the server.
#[test]
fn random_requests_do_no_harm() {
    const REQUESTS: u64 = 1500;
    let names = [
        "prompt",
        "messages",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "seed",
        "stop",
        "stream",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stream_options",
        "model",
        "echo",
        "suffix",
        "best_of",
        "tools",
        "response_format",
        "user",
        "ignore_eos",
        "stop_token_ids",
        "return_rounds",
    ];
    let values = [
        json!(null),
        json!(true),
        json!(0),
        json!(1),
        json!(-1),
        json!(2.5),
        json!(1e300),
        json!(u64::MAX),
        json!(""),
        json!("a"),
        json!("tiny"),
        json!([]),
        json!([1, 2]),
        json!(["x", ""]),
        json!({}),
        json!({ "5": 3 }),
        json!({ "include_usage": true }),
        json!([{ "role": "user", "content": "hi" }]),
        json!([{ "role": "user", "content": [{ "type": "text", "text": "\u{1F44D}" }] }]),
        json!("<|im_start|>\u{0}\u{fdd0}"),
        json!(0.5),
        json!(3),
    ];
    serve(None, |address, _| {
        let mut counts = [0_usize; 6];
        for case in 0..REQUESTS {
            let draws = CounterRng::new(case, Stream::Shuffle, 1);
            let pick = |i: u64, below: usize| draws.below(i, below as u64) as usize;
            let mut body = json!({ "max_tokens": 3 });
            let path = ["/v1/completions", "/v1/chat/completions", "/generate"][pick(4, 3)];
            let (name, usual) = if path.contains("chat") {
                ("messages", json!([{ "role": "user", "content": "hi" }]))
            } else {
                ("prompt", json!("hi"))
            };
            body[name] = if pick(0, 4) > 0 { usual } else { values[pick(1, values.len())].clone() };
            for i in 0..draws.below(2, 3) {
                body[names[pick(10 + i, names.len())]] = values[pick(20 + i, values.len())].clone();
            }
            let mut bytes = body.to_string().into_bytes();
            if pick(3, 6) == 0 {
                for i in 0..3 {
                    let at = pick(30 + i, bytes.len());
                    bytes[at] = draws.below(40 + i, 256) as u8;
                }
            }
            let reply = read(post_bytes(address, path, &bytes));
            counts[usize::from(reply.status / 100)] += 1;
            assert!(reply.status < 500, "{path} {}: {reply:?}", String::from_utf8_lossy(&bytes));
            if reply.status >= 400 {
                assert!(reply.json()["error"]["message"].is_string());
            }
        }
        assert!(counts[2] > 300 && counts[4] > 300, "{counts:?}");
        assert_eq!(get(address, "/health").status, 200);
    });
}

/// Caches larger than the memory allowed are an error at the start, not a hang.
#[test]
fn caches_that_do_not_fit_are_refused_at_the_start() {
    let (target, drafter) = (tiny::target(), tiny_drafter::drafter("decode/dspark_vanilla"));
    let (target, drafter) = (target.config(), DrafterConfig::Block(drafter.config().clone()));
    let plan = |context, memory| Capacity::plan(target, Some(&drafter), 4, context, memory);
    let fits = plan(Some(256), None).unwrap();
    assert_eq!(plan(None, None).unwrap().context, 512);
    assert!(fits.bytes > Capacity::plan(target, None, 4, Some(256), None).unwrap().bytes);
    assert_eq!(plan(Some(256), Some(fits.bytes as u64)).unwrap(), fits);
    let error = plan(Some(256), Some(fits.bytes as u64 - 1)).unwrap_err();
    assert!(error.to_string().contains("need") && error.hint().unwrap().contains("--context"), "{error}");
    assert!(plan(Some(513), None).unwrap_err().to_string().contains("2 to 512"));
}
