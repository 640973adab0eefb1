"""Pictures and pages of whole models: SVG and HTML that need no other file and no host, in light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final, NamedTuple

COLORS: Final = {
    "eager": ("#8a8a8a", "#a0a0a0"),
    "batched_mm": ("#d98e00", "#e8a93a"),
    "grouped_mm": ("#3a9bd9", "#6cbcf0"),
    "moereg": ("#00805e", "#2bb58c"),
    "moereg_prepared": ("#8a3fa8", "#c583e0"),
}
"""Each implementation's color in light and in dark; others share the next."""
_OTHER: Final = ("#b8482e", "#ee7f63")
_BAR, _HEIGHT, _HEAD, _LEFT = 16, 150, 66, 36

_STYLE: Final = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1c1c1c;--line:#d8d8d8;--box:#f0f5f2}
@media (prefers-color-scheme: dark){:root{--bg:#161616;--ink:#ececec;--line:#3a3a3a;--box:#202622}}
body{background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif;margin:2rem auto;padding:0 1rem}
body{max-width:60rem}h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}p{margin:.3rem 0}
.verdict{background:var(--box);border-left:4px solid #00805e;padding:.6rem 1rem}svg{max-width:100%;height:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td:not(:first-child),th{text-align:right}
th,td{padding:.25rem 0 .25rem 1.2rem;border-bottom:1px solid var(--line);white-space:pre}
"""


class Bar(NamedTuple):
    """Height of a bar, the ends of its whisker, and the text on it."""

    value: float
    low: float
    high: float
    text: str


Groups = Mapping[str, Mapping[str, Bar]]
"""Bars by implementation, by the label of their group, whose commas begin lines."""


def draw_bars(panels: Mapping[str, Groups], labels: Mapping[str, str], title: str) -> str:
    """An SVG with a panel for each model, two in a row, and a group of bars for each case.

    Args:
        panels: Groups by the title of their panel.
        labels: How implementations are called, in the order of their bars.
        title: What the height of a bar is, which is 1 at a dashed line.
    """
    group_width = _BAR * len(labels) + 26
    width = _LEFT + 10 + max(map(len, panels.values()), default=1) * group_width
    height, columns = _HEAD + _HEIGHT + 40, min(2, len(panels) or 1)
    full_height = 60 + math.ceil(len(panels) / columns) * height
    full_width = max(columns * width, 7 * len(title), _LEFT + sum(8 * len(label) + 26 for label in labels.values()))
    light, dark = (
        "".join(f".c{place}{{fill:{COLORS.get(name, _OTHER)[mode]}}}" for place, name in enumerate(labels))
        for mode in (0, 1)
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full_width} {full_height}" width="{full_width}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="11"><title>{escape(title)}</title><style>'
        f".bg{{fill:#fff}}text{{fill:#1c1c1c}}.grid{{stroke:#dedede}}.mark{{stroke:#1c1c1c}}{light}"
        "@media (prefers-color-scheme: dark)"
        f"{{.bg{{fill:#161616}}text{{fill:#ececec}}.grid{{stroke:#383838}}.mark{{stroke:#ececec}}{dark}}}</style>"
        f'<rect class="bg" width="100%" height="100%"/><text x="8" y="18" font-size="13">{escape(title)}</text>'
    ]
    for number, (name, groups) in enumerate(panels.items()):
        corner = f"{number % columns * width} {30 + number // columns * height}"
        parts.append(f'<g transform="translate({corner})">{_panel(name, groups, labels, group_width)}</g>')
    x = _LEFT
    for place, label in enumerate(labels.values()):
        parts.append(f'<rect class="c{place}" x="{x}" y="{full_height - 22}" width="10" height="10"/>')
        parts.append(f'<text x="{x + 15}" y="{full_height - 13}">{escape(label)}</text>')
        x += 8 * len(label) + 26
    return "".join([*parts, "</svg>\n"])


def _panel(title: str, groups: Groups, labels: Mapping[str, str], group_width: int) -> str:
    most = max((bar.high for bars in groups.values() for bar in bars.values()), default=1.0)
    scale, bottom, right = _HEIGHT / most, _HEAD + _HEIGHT, _LEFT + len(groups) * group_width
    step = next((each for each in (0.5, 1, 2, 5, 10, 20) if most / each <= 6), most / 5)
    parts = [f'<text x="{_LEFT}" y="14" font-weight="bold">{escape(title)}</text>']
    for value in (1.0, *(number * step for number in range(int(most / step) + 1))):
        y = bottom - value * scale
        kind = 'class="mark" stroke-dasharray="4 3" stroke-width="0.7"' if value == 1 else 'class="grid"'
        parts.append(f'<line {kind} x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for number, (label, bars) in enumerate(groups.items()):
        left = _LEFT + number * group_width + 13
        for place, name in enumerate(labels):
            if (bar := bars.get(name)) is not None:
                x, top, ends = left + place * _BAR, bottom - bar.value * scale, (bar.low * scale, bar.high * scale)
                middle = x + _BAR / 2 - 1
                parts.append(
                    f'<rect class="c{place}" x="{x}" y="{top:.1f}" width="{_BAR - 2}" height="{bar.value * scale:.1f}">'
                    f"<title>{escape(f'{label}, {labels[name]}: {bar.value:.2f}')}</title></rect>"
                    f'<line class="mark" x1="{middle}" x2="{middle}" y1="{bottom - ends[0]:.1f}" '
                    f'y2="{bottom - ends[1]:.1f}"/><text font-size="10" transform="translate({middle + 4} '
                    f'{min(top, bottom - ends[1]) - 4:.1f}) rotate(-90)">{escape(bar.text)}</text>'
                )
        for line, text in enumerate(label.split(", ")):
            x, y = left + _BAR * len(labels) // 2, bottom + 15 + 13 * line
            parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">{escape(text)}</text>')
    return "".join(parts)


def html_page(title: str, verdict: Sequence[str], picture: str, tables: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """One page: the verdict, the picture, and tables by heading, whose rows of one cell are lines."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        '<div class="verdict">' + "".join(f"<p>{escape(line)}</p>" for line in verdict) + "</div>",
        # Inside of a page an SVG needs no namespace.
        picture.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1),
    ]
    for heading, rows in tables.items():
        parts.append(f"<h2>{escape(heading)}</h2>")
        parts += [f"<p>{escape(row[0])}</p>" for row in rows if len(row) == 1]
        cells = ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows if len(row) > 1]
        parts.append("<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>" if cells else "")
    return "".join([*parts, "</body></html>\n"])
