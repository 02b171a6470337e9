//! Reliability diagrams of confidences: observed against predicted acceptance, for the page and as SVG files of their own.

use super::confidence::{CalibrationReport, ReliabilityBin};
use super::plots::{Line, Point, lines};

/// Positions in a diagram, and colours there are.
const DIAGRAM_POSITIONS: usize = 7;
/// Blue first, as in the other plots.
const COLORS: [usize; DIAGRAM_POSITIONS] = [2, 3, 1, 4, 5, 6, 7];

/// The plot, and its legend as (text, number of the colour).
pub(super) fn diagram(title: &str, report: &CalibrationReport) -> (String, Vec<(String, usize)>) {
    let (mut drawn, mut legend) = (Vec::new(), Vec::new());
    for at in report.positions.iter().take(DIAGRAM_POSITIONS) {
        let color = COLORS[at.position % DIAGRAM_POSITIONS];
        let point = |bin: &ReliabilityBin| {
            let (x, y) = (bin.predicted_mean, bin.observed_mean);
            let radius = 2.0 + 6.0 * (bin.count as f64 / at.count.max(1) as f64).sqrt();
            let tip = format!("up to {}: predicted {x:.3}, observed {y:.3}, {} rounds", at.position + 1, bin.count);
            Point { x, y, radius, tip }
        };
        drawn.push(Line { color, dashed: false, points: at.reliability.iter().map(point).collect() });
        legend.push((format!("up to {}", at.position + 1), color));
    }
    let ticks: Vec<(f64, String)> =
        (0..=4).map(|step| f64::from(step) / 4.0).map(|at| (at, format!("{at:.2}"))).collect();
    (lines(title, (0.0, 1.0), &ticks, "predicted acceptance", &drawn, true), legend)
}
