"""Small SVG plots: lines over an axis, and groups of horizontal bars. They read on light and dark pages."""

import math
from html import escape

COLORS = ["#2563eb", "#d9730d", "#0f9d78", "#b0338f", "#8a6d00", "#0891b2", "#c0392b", "#7c8694"]
STYLE = ("svg{background:#fff;font:12px system-ui,sans-serif}text{fill:#5b6675}.title{fill:#1c2430;font-weight:600}"
         ".grid{stroke:#dfe3e8}polyline{fill:none;stroke-width:2}")
WIDTH = 560


def ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from `low` to `high`, at least four of them where there is room."""
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(span))
    step = next(factor * power for factor in (1, 0.5, 0.2, 0.1) if span / (factor * power) >= 3.5)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def page(title: str, height: float, body: list[str]) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
            f"<style>{STYLE}</style><text x=\"10\" y=\"20\" class=\"title\">{escape(title)}</text>{''.join(body)}</svg>\n")


def legend(names: list[str], y: float) -> list[str]:
    step = (WIDTH - 20) / max(len(names), 1)
    return [f'<rect x="{10 + step * i:.0f}" y="{y - 9:.0f}" width="9" height="9" fill="{COLORS[i % len(COLORS)]}"/>'
            f'<text x="{24 + step * i:.0f}" y="{y:.0f}">{escape(name)}</text>' for i, name in enumerate(names)]


def lines(title: str, x_label: str, series: list[tuple[str, list[tuple[float, float]]]],
          y_range: tuple[float, float] | None = None) -> str:
    """One line per (name, points); the y axis spans the values, with a margin, unless its range is given."""
    points = [point for _, found in series for point in found]
    if not points:
        return page(title + ": nothing was measured", 40, [])
    left, right, top, bottom = 50, 16, 36, 320
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low_x, high_x = min(xs), max(max(xs), min(xs) + 1e-9)
    margin = 0.08 * max(max(ys) - min(ys), 0.05)
    low_y, high_y = y_range or (max(0.0, min(ys) - margin), max(ys) + margin)

    def place(x: float, y: float) -> tuple[float, float]:
        return (left + (x - low_x) / (high_x - low_x) * (WIDTH - left - right),
                bottom - (y - low_y) / (high_y - low_y) * (bottom - top))

    body = []
    for value in ticks(low_y, high_y):
        y = place(low_x, value)[1]
        body.append(f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>'
                    f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for value in ticks(low_x, high_x):
        x = place(value, low_y)[0]
        body.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>')
    body.append(f'<text x="{(left + WIDTH) / 2:.0f}" y="{bottom + 38}" text-anchor="middle">{escape(x_label)}</text>')
    for i, (name, found) in enumerate(series):
        color = COLORS[i % len(COLORS)]
        placed = [place(x, y) for x, y in found]
        body.append(f'<polyline stroke="{color}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in placed)}"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"><title>{escape(name)}: {value:.3f} at {at:g}'
                 f"</title></circle>" for (x, y), (at, value) in zip(placed, found)]
    return page(title, bottom + 74, body + legend([name for name, _ in series], bottom + 62))


def bars(title: str, groups: list[tuple[str, list[tuple[str, float]]]]) -> str:
    """Per group one bar per (name, value)."""
    longest = max((value for _, found in groups for _, value in found), default=1.0) or 1.0
    left, right, row, y, body = 130, 60, 18, 34.0, []
    for heading, found in groups:
        body.append(f'<text x="10" y="{y + 13:.0f}" class="title">{escape(heading)}</text>')
        y += 20
        for i, (name, value) in enumerate(found):
            width = value / longest * (WIDTH - left - right)
            body.append(f'<text x="{left - 8}" y="{y + 12:.0f}" text-anchor="end">{escape(name)}</text>'
                        f'<rect x="{left}" y="{y + 2:.0f}" width="{width:.1f}" height="13" fill="{COLORS[i % len(COLORS)]}"/>'
                        f'<text x="{left + width + 6:.1f}" y="{y + 12:.0f}">{value:.2f}</text>')
            y += row
        y += 6
    return page(title, y + 6, body)
