//! Plots as inline SVG: points and lines in a unit square, and horizontal bars. Colours are the style sheet's variables
//! `--c0`, `--c1` …; every mark carries a tooltip. All text is escaped.

use std::fmt::Write;

/// Width of every plot in its own units; it scales to the column.
const WIDTH: f64 = 420.0;

/// A line with its points.
pub(super) struct Line {
    /// Number of the colour.
    pub(super) color: usize,
    /// Drawn dashed and without dots.
    pub(super) dashed: bool,
    /// Points, in order.
    pub(super) points: Vec<Point>,
}

/// A point of a line.
pub(super) struct Point {
    /// Position, in units of the axis.
    pub(super) x: f64,
    /// Height, 0 to 1.
    pub(super) y: f64,
    /// Radius of the dot.
    pub(super) radius: f64,
    /// Tooltip.
    pub(super) tip: String,
}

/// A horizontal bar of one or several parts.
pub(super) struct Bar {
    /// Text before the bar.
    pub(super) label: String,
    /// (number of the colour, length, tooltip).
    pub(super) parts: Vec<(usize, f64, String)>,
    /// Text behind the bar.
    pub(super) value: String,
}

/// Text for use in HTML and SVG.
pub(super) fn escape(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut safe, c| {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            other => safe.push(other),
        }
        safe
    })
}

/// Lines over x with heights from 0 to 1. `ticks` are positions on the x axis with their labels; the axis spans `from`
/// to `to`. `diagonal` draws the line y = x.
pub(super) fn lines(
    title: &str,
    (from, to): (f64, f64),
    ticks: &[(f64, String)],
    x_label: &str,
    lines: &[Line],
    diagonal: bool,
) -> String {
    const HEIGHT: f64 = 300.0;
    const LEFT: f64 = 44.0;
    const RIGHT: f64 = 14.0;
    const TOP: f64 = 12.0;
    const BOTTOM: f64 = 44.0;
    let span = if to > from { to - from } else { 1.0 };
    let x = |value: f64| LEFT + (value - from) / span * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| TOP + (1.0 - value) * (HEIGHT - TOP - BOTTOM);
    let mut svg = open(title, HEIGHT);
    for step in 0..=4 {
        let value = f64::from(step) / 4.0;
        let at = y(value);
        _ = write!(svg, r#"<path class="grid" d="M{LEFT} {at:.1}H{:.1}"/>"#, WIDTH - RIGHT);
        _ = write!(svg, r#"<text x="{}" y="{:.1}" text-anchor="end">{value:.2}</text>"#, LEFT - 6.0, at + 4.0);
    }
    for (value, label) in ticks {
        let (at, below) = (x(*value), HEIGHT - BOTTOM + 18.0);
        _ = write!(svg, r#"<text x="{at:.1}" y="{below}" text-anchor="middle">{}</text>"#, escape(label));
    }
    let (middle, below) = (LEFT + (WIDTH - LEFT - RIGHT) / 2.0, HEIGHT - 6.0);
    _ = write!(svg, r#"<text x="{middle}" y="{below}" text-anchor="middle" class="axis">{}</text>"#, escape(x_label));
    if diagonal {
        _ = write!(svg, r#"<path class="diagonal" d="M{:.1} {:.1}L{:.1} {:.1}"/>"#, x(from), y(0.0), x(to), y(1.0));
    }
    for line in lines {
        let corners: Vec<String> = line.points.iter().map(|p| format!("{:.1} {:.1}", x(p.x), y(p.y))).collect();
        let dash = if line.dashed { r#" stroke-dasharray="2 4""# } else { "" };
        let color = line.color;
        if corners.len() > 1 {
            _ = write!(svg, r#"<path class="line" stroke="var(--c{color})"{dash} d="M{}"/>"#, corners.join("L"));
        }
        for point in line.points.iter().filter(|_| !line.dashed) {
            _ = write!(
                svg,
                r#"<circle cx="{:.1}" cy="{:.1}" r="{:.1}" fill="var(--c{color})"><title>{}</title></circle>"#,
                x(point.x),
                y(point.y),
                point.radius,
                escape(&point.tip)
            );
        }
    }
    svg + "</svg>"
}

/// Groups of horizontal bars; a group with a heading has it above its bars. Bars of no length at all give an empty
/// plot.
pub(super) fn bars(title: &str, groups: &[(Option<String>, Vec<Bar>)]) -> String {
    const LABEL: f64 = 66.0;
    const VALUE: f64 = 84.0;
    const ROW: f64 = 24.0;
    const HEADING: f64 = 24.0;
    let longest = groups.iter().flat_map(|(_, bars)| bars).map(Bar::length).fold(0.0, f64::max);
    let scale = if longest > 0.0 { (WIDTH - LABEL - VALUE) / longest } else { 0.0 };
    let rows: usize = groups.iter().map(|(_, bars)| bars.len()).sum();
    let headings = groups.iter().filter(|(heading, _)| heading.is_some()).count();
    let mut svg = open(title, ROW * rows as f64 + HEADING * headings as f64 + 8.0);
    let mut top = 4.0;
    for (heading, bars) in groups {
        if let Some(heading) = heading {
            _ = write!(svg, r#"<text x="0" y="{}" class="axis">{}</text>"#, top + 16.0, escape(heading));
            top += HEADING;
        }
        for bar in bars {
            let base = top + 15.0;
            _ = write!(svg, r#"<text x="{}" y="{base}" text-anchor="end">{}</text>"#, LABEL - 8.0, escape(&bar.label));
            let mut left = LABEL;
            for (color, length, tip) in &bar.parts {
                let width = length * scale;
                _ = write!(
                    svg,
                    r#"<rect x="{left:.1}" y="{}" width="{width:.1}" height="16" fill="var(--c{color})"><title>{}</title></rect>"#,
                    top + 3.0,
                    escape(tip)
                );
                left += width;
            }
            _ = write!(svg, r#"<text x="{:.1}" y="{base}">{}</text>"#, left + 6.0, escape(&bar.value));
            top += ROW;
        }
    }
    svg + "</svg>"
}

impl Bar {
    fn length(&self) -> f64 {
        self.parts.iter().map(|(_, length, _)| length).sum()
    }
}

/// A plot as a file of its own: with its title, its legend, and colours that suit light and dark pages.
pub(super) fn standalone(title: &str, legend: &[(String, usize)], svg: &str) -> String {
    const STYLE: &str = "svg{--ink:#1c2430;--soft:#5b6675;--rule:#dfe3e8;font:12px system-ui,sans-serif;background:#fff}\
        text{fill:var(--soft)}.axis{fill:var(--ink);font-weight:600}.grid{stroke:var(--rule);fill:none}\
        .diagonal{stroke:var(--soft);stroke-dasharray:4 4;fill:none}.line{fill:none;stroke-width:2}";
    const COLORS: [&str; 8] = ["#7c8694", "#d9730d", "#2563eb", "#0f9d78", "#b0338f", "#8a6d00", "#0891b2", "#c0392b"];
    const TITLE: f64 = 26.0;
    const LEGEND: f64 = 24.0;
    let (head, marks) = svg.split_once('>').unwrap_or(("", svg));
    let marks = marks.trim_end_matches("</svg>");
    let height: f64 = head
        .split_once("viewBox=\"")
        .and_then(|(_, numbers)| numbers.split(['"', ' ']).nth(3)?.parse().ok())
        .unwrap_or(WIDTH);
    let mut colors = String::new();
    for (number, color) in COLORS.iter().enumerate() {
        _ = write!(colors, "--c{number}:{color};");
    }
    let mut file = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {}\"><style>{STYLE} svg{{{colors}}}</style>\
         <text x=\"8\" y=\"18\" class=\"axis\">{}</text><g transform=\"translate(0 {TITLE})\">{marks}</g>",
        TITLE + height + LEGEND,
        escape(title)
    );
    let (step, base) = ((WIDTH - 16.0) / legend.len().max(1) as f64, TITLE + height + 12.0);
    for (place, (text, color)) in legend.iter().enumerate() {
        let left = 8.0 + step * place as f64;
        let top = base - 9.0;
        _ = write!(
            file,
            "<rect x=\"{left:.1}\" y=\"{top}\" width=\"9\" height=\"9\" fill=\"var(--c{color})\"/>\
             <text x=\"{:.1}\" y=\"{base}\">{}</text>",
            left + 13.0,
            escape(text)
        );
    }
    file + "</svg>\n"
}

fn open(title: &str, height: f64) -> String {
    let title = escape(title);
    format!(r#"<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">"#)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_stand_where_the_values_say() {
        let point = |x: f64, y: f64| Point { x, y, radius: 3.0, tip: "a<b".into() };
        let line = Line { color: 2, dashed: false, points: vec![point(1.0, 0.0), point(3.0, 1.0)] };
        let svg = lines("t", (1.0, 3.0), &[(1.0, "1".into())], "k", &[line], false);
        assert!(svg.contains(r#"d="M44.0 256.0L406.0 12.0""#), "{svg}");
        assert!(svg.contains("<title>a&lt;b</title>") && !svg.contains("diagonal"));
        let bar = |length: f64| Bar { label: "x".into(), parts: vec![(1, length, String::new())], value: "v".into() };
        let svg = bars("t", &[(Some("g".into()), vec![bar(1.0), bar(2.0)])]);
        assert!(svg.contains(r#"width="135.0""#) && svg.contains(r#"width="270.0""#), "{svg}");
        assert!(bars("t", &[(None, vec![bar(0.0)])]).contains(r#"width="0.0""#));
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("<a href=\"x\">'&'"), "&lt;a href=&quot;x&quot;&gt;&#39;&amp;&#39;");
        assert!(bars("\"><script>", &[]).contains("aria-label=\"&quot;&gt;&lt;script&gt;\""));
    }
}
