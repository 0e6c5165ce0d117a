"""Draws what a step on NVMe costs against its tokens: docs/pictures/tokens.svg, from bench/results/large_steps.jsonl.

for shape in 1x16 1x64 1x256; do
    python bench/accumulation_table.py --micro-batch $shape --accumulation 1 --rounds 3 --lines $lines
done
python bench/accumulation_table.py --micro-batch 1x512 --accumulation 1,4,16 --rounds 3 --lines $lines
python bench/draw_tokens.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from results import RESULTS

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "tokens.svg"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 300, 56, 24, 48, 46
LINES = (("#2f6fb7", "time of a step", "seconds"), ("#e08a3c", "peak memory", "peak_rss_gib"))


def main() -> None:
    lines = [json.loads(line) for line in (RESULTS / "large_steps.jsonl").read_text().splitlines()]
    PICTURE.write_text(picture(sorted(lines, key=tokens_of)))


def tokens_of(line: dict[str, Any]) -> int:
    return int(line["batch_size"] * line["context"] * line["accumulation"])


def picture(lines: list[dict[str, Any]]) -> str:
    """Return an SVG with infinity's time and memory over plain PyTorch's, by tokens per step."""
    first, last = (math.log2(tokens_of(lines[place])) for place in (0, -1))
    ratios = {key: [line["ways"]["auto"][key] / line["ways"]["torch"][key] for line in lines] for _, _, key in LINES}
    highest = math.ceil(max(max(values) for values in ratios.values()))

    def x(tokens: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(tokens) - first) / (last - first)

    def y(ratio: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * ratio / highest

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#4c5a68" role="img" aria-labelledby="title">',
        '<title id="title">Time and memory of a step on NVMe, over plain PyTorch in memory, by tokens per step</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for ratio in range(highest + 1):
        stroke = "#9aa7b4" if ratio == 1 else "#e3e8ed"
        parts.append(f'<path d="M{LEFT} {y(ratio):.1f}H{WIDTH - RIGHT}" stroke="{stroke}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio} ×</text>')
    for line in lines:
        tokens = tokens_of(line)
        parts.append(f'<text x="{x(tokens):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tokens:,}</text>')
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">tokens per step</text>')
    for number, (color, name, key) in enumerate(LINES):
        points = [(x(tokens_of(line)), y(ratio)) for line, ratio in zip(lines, ratios[key], strict=True)]
        style = f'fill="none" stroke="{color}" stroke-width="2" stroke-linejoin="round"'
        parts.append(f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}" {style}/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{color}"/>' for a, b in points]
        mark = LEFT + 12 + 330 * number
        parts.append(f'<path d="M{mark} 22h24" {style}/><text x="{mark + 32}" y="26">{name}, over plain PyTorch</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
