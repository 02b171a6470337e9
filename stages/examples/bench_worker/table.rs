//! The table for people: milliseconds, tokens per second and rate of reading weights per number of rows.

use std::path::PathBuf;

use deepspec_stages::recipe::Precision;
use serde_json::json;

use super::Result;
use super::decoding::Session;

/// Tokens of context before each step.
const CONTEXT: usize = 256;
/// Numbers of rows of a step.
const ROWS: [usize; 8] = [1, 2, 4, 6, 8, 12, 16, 32];
/// Lengths of prompts.
const PROMPTS: [usize; 2] = [256, 512];

pub(crate) fn print(model: &PathBuf) -> Result<()> {
    let tokens: Vec<u32> = (0..512).map(|i| 1000 + i * 37 % 4000).collect();
    for name in super::precisions(model)? {
        let precision: Precision = serde_json::from_value(json!(name))?;
        let mut session = Session::load(model, precision)?;
        let bytes = session.target.weight_bytes() as f64;
        println!("{name}: {:.0} MB of weights", bytes / 1e6);
        for rows in ROWS {
            let time = median(session.steps(&tokens[..CONTEXT], &tokens[..rows], 15)?);
            println!(
                "{rows:4} rows {:7.2} ms {:8.1} tok/s {:6.1} GB/s of weights",
                time * 1e3,
                rows as f64 / time,
                bytes / time / 1e9
            );
        }
        for length in PROMPTS {
            let time = median(session.prefills(&tokens[..length], 4)?);
            println!("{length:4} prompt {:5.0} ms {:8.1} tok/s", time * 1e3, length as f64 / time);
        }
    }
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
