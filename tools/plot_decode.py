#!/usr/bin/env python3
"""Draws where a decoding step's time goes: stacked bars by batch and decoder, one SVG a model.

    tools/plot_decode.py [--results CSV] [--out DIR]

Reads what `replayssm bench decode --csv` appends (of rows that repeat, the last counts), context 1024 alone. The parts
are timed with marks between them, which cost some time: they are drawn as shares of the step's own median. Needs the
standard library alone.
"""

import argparse
import csv
import html
import os
import sys

PARTS = (("ssm_us", "state-space layers", "#d55e00"), ("attention_us", "attention", "#0072b2"),
         ("matmul_us", "matrix products", "#009e73"), ("other_us", "the rest", "#999999"))
CONTEXT = 1024
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1000, 460, 70, 84, 70


def read_results(path):
    """Rows by model, then (batch, decode, window, read)."""
    columns = "machine,config,batch,context,window,read,decode,step_us_median".split(",") + [part[0] for part in PARTS]
    models = {}
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or [])]
        if missing:
            raise ValueError(f"{path}: expected a column '{missing[0]}', found none")
        for row in reader:
            if int(row["context"]) == CONTEXT:
                key = (int(row["batch"]), row["decode"], int(row["window"]), row["read"])
                models.setdefault(row["config"], {})[key] = row
    return models


def chosen(rows):
    """By batch: conventional, replay at the widest window, exact at its fastest."""
    bars = {}
    for batch in sorted({key[0] for key in rows}):
        for decode, read in (("conventional", "fp32"), ("replay", "fp32"), ("replay", "bf16"), ("exact", "fp32")):
            found = [row for key, row in rows.items() if key[0] == batch and key[1] == decode and key[3] == read]
            if not found:
                continue
            if decode == "exact":
                row = min(found, key=lambda one: float(one["step_us_median"]))
            else:
                row = max(found, key=lambda one: int(one["window"]))
            label = decode + (" bf16" if read == "bf16" else "")
            bars.setdefault(batch, []).append((label, row))
    return bars


def text(x, y, words, size=12, anchor="middle", colour="#222222"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
            f"{html.escape(words)}</text>")


def draw(name, rows):
    bars = chosen(rows)
    count = sum(len(group) for group in bars.values()) + len(bars)
    top = max(float(row["step_us_median"]) for group in bars.values() for _, row in group) * 1e-3
    step = next(one for one in (0.5, 1, 2, 5, 10, 20, 50, 100) if top / one <= 10)
    scale = (HEIGHT - TOP - BOTTOM) / (step * (int(top / step) + 1))
    slot = (WIDTH - LEFT - 20) / count
    any_row = next(iter(rows.values()))
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
           text(LEFT, 26, f"{name}: a decoding step, ms ({any_row['machine']}, {any_row['date']})", 16, "start"),
           text(LEFT, 46, f"random weights in BF16, FP32 state, context {CONTEXT}", 12, "start")]
    x = LEFT + 330
    for _, label, colour in PARTS:
        out.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{colour}"/>')
        out.append(text(x + 17, 47, label, 12, "start"))
        x += 30 + 7 * len(label)
    floor = HEIGHT - BOTTOM
    for i in range(int(top / step) + 2):
        y = floor - i * step * scale
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        out.append(text(LEFT - 8, y + 4, f"{i * step:g}", 12, "end"))
    x = LEFT + slot / 2
    for batch, group in bars.items():
        first = x
        for label, row in group:
            median = float(row["step_us_median"]) * 1e-3
            total = sum(float(row[part]) for part, _, _ in PARTS)
            y = floor
            for part, _, colour in PARTS:
                height = median * float(row[part]) / total * scale
                y -= height
                out.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{slot * 0.8:.1f}" height="{height:.1f}" '
                           f'fill="{colour}"/>')
            out.append(text(x + slot * 0.4, y - 4, f"{median:.2f}", 11))
            out.append(f'<text transform="translate({x + slot * 0.4:.1f},{floor + 10}) rotate(20)" font-size="10" '
                       f'text-anchor="start" fill="#222222">{html.escape(label)}</text>')
            x += slot
        out.append(text((first + x - slot * 0.2) / 2, HEIGHT - 8, f"batch {batch}", 13))
        x += slot
    return "\n".join(out + ["</svg>", ""])


def main():
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    parser = argparse.ArgumentParser(description="Draws where a decoding step's time goes.")
    parser.add_argument("--results", default=os.path.join(root, "bench/results/h200-decode.csv"))
    parser.add_argument("--out", default=os.path.join(root, "docs/plots"))
    options = parser.parse_args()
    try:
        models = read_results(options.results)
        for name, rows in models.items():
            path = os.path.join(options.out, f"decode-{name}.svg")
            with open(path, "w", encoding="utf-8") as file:
                file.write(draw(name, rows))
            print(path)
    except (OSError, ValueError) as error:
        print(f"plot_decode.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
