//! Summaries as aligned text for the terminal.

use comfy_table::{CellAlignment, ContentArrangement, Table as Grid, TableStyle, presets};
use deepspec_stages::eval::{EvalOutcome, Table};

/// Two columns: what, and how much.
pub(super) fn pairs(rows: &[(String, String)]) -> String {
    let mut grid = grid(presets::NOTHING);
    for (what, value) in rows {
        grid.add_row([what, value]);
    }
    grid.to_string()
}

/// The tables and sentences of an evaluation.
pub(super) fn evaluation(outcome: &EvalOutcome) -> String {
    let mut text: Vec<String> = outcome.tables().iter().map(table).collect();
    text.push(outcome.headline().join("\n"));
    text.join("\n\n")
}

fn table(table: &Table) -> String {
    let mut grid = grid(presets::ASCII_MARKDOWN);
    grid.set_header(&table.header);
    for row in &table.rows {
        grid.add_row(row);
    }
    for column in grid.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!("{}\n{grid}", table.title)
}

fn grid(style: TableStyle) -> Grid {
    let mut grid = Grid::new();
    grid.load_style(style).set_content_arrangement(ContentArrangement::Disabled);
    grid
}
