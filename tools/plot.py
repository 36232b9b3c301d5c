#!/usr/bin/env python3
"""Draws the GPU benchmark: time and share of the memory roof against batch, one SVG a layer and step length.

    tools/plot.py [--results CSV] [--peers CSV] [--out DIR]

Reads what `replayssm bench ops --device cuda --csv` appends (of rows that repeat, the last counts) and peers' figures.
A peer's share is of the bytes that replayssm's own call of the same kind is counted to move, so it is drawn only where
there is such a call. Needs the standard library alone.
"""

import argparse
import csv
import html
import math
import os
import sys
from dataclasses import dataclass

TITLES = {
    "qwen3.5-4b": "Gated DeltaNet, 32 heads of 128 x 128 (Qwen3.5-4B)",
    "qwen3.5-122b": "Gated DeltaNet, 64 heads of 128 x 128 (Qwen3.5-122B)",
    "qwen3.6-27b": "Gated DeltaNet, 48 heads of 128 x 128 (Qwen3.6-27B)",
    "kimi-linear": "Kimi Delta Attention, 32 heads of 128 x 128 (Kimi-Linear)",
    "kimi-k3": "Kimi Delta Attention, 96 heads of 128 x 128 (Kimi-K3)",
    "nemotron-3-super": "Mamba-2, 128 heads of 64 x 128 (Nemotron-3-Super)",
    "nemotron-3-nano-4b": "Mamba-2, 96 heads of 80 x 128 (Nemotron-3-Nano-4B)",
    "mamba2-48x64x128": "Mamba-2, 48 heads of 64 x 128",
}
# Colours by kind of call; of Okabe and Ito, which colour-blind readers can tell apart.
COLOURS = {
    ("conventional", "fp32"): "#5b5b5b",
    ("conventional", "bf16"): "#56b4e9",
    ("replay", "fp32"): "#d55e00",
    ("replay", "bf16"): "#0072b2",
    ("exact", "fp32"): "#009e73",
}
MARKERS = ("square", "triangle", "diamond", "cross", "plus")
TOKENS = (1, 4)
NOTE = "A peer's share: the bytes that replayssm's own call of the same kind is counted to move, over the peer's time."
PEER_WINDOW = 16  # of the peers' replay, and the window of conventional rows

WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 1100, 450, 380
LEFT, TOP, GAP = 70, 64, 90
LEGEND_LINE = 21


@dataclass
class Series:
    label: str
    colour: str
    marker: str  # "circle" for our own
    time: dict  # batch -> us
    share: dict  # batch -> part of the roof


def read_csv(path, columns):
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [column for column in columns if column not in (reader.fieldnames or [])]
        if missing:
            raise ValueError(f"{path}: expected a column '{missing[0]}', found none")
        return list(reader)


def read_results(path):
    """The GPU's rows: by shape, tokens, decode, read and accepted tokens, then batch, then window."""
    columns = "shape,device,batch,tokens,accepted,window,read,decode,us_median,bytes,roof_gb_s,roof_share".split(",")
    groups, machine = {}, ""
    for row in read_csv(path, columns):
        if not row["device"].startswith("cuda") or row["op"].endswith(("_prefill", "_layer")):
            continue
        key = (row["shape"], int(row["tokens"]), row["decode"], row["read"], float(row["accepted"]))
        figures = {name: float(row[name]) for name in ("us_median", "bytes", "roof_gb_s", "roof_share")}
        groups.setdefault(key, {}).setdefault(int(row["batch"]), {})[int(row["window"])] = figures
        machine = f"{row['machine']}, {row['date']}"
    return groups, machine


def widest_window(batches):
    """Of the windows measured at the most batches the one that is fastest at the largest."""
    def rank(window):
        measured = [batch for batch, windows in batches.items() if window in windows]
        return len(measured), -batches[max(measured)][window]["us_median"]

    return max({window for windows in batches.values() for window in windows}, key=rank)


def own_series(groups, shape, tokens):
    """One line a kind of call."""
    series = []
    for decode, read in (("conventional", "fp32"), ("replay", "fp32"), ("exact", "fp32"), ("replay", "bf16")):
        for accepted in sorted({key[4] for key in groups}, reverse=True):
            batches = groups.get((shape, tokens, decode, read, accepted))
            if not batches:
                continue
            window = widest_window(batches)
            figures = {batch: windows[window] for batch, windows in batches.items() if window in windows}
            label = decode + (", BF16 reads" if read == "bf16" else "")
            if tokens > 1:
                label += f", {accepted:g} of {tokens} accepted"
            if decode != "conventional":
                label += f", window {window}"
            series.append(Series(label, COLOURS[decode, read], "circle" if accepted == tokens else "ring",
                                 {batch: row["us_median"] for batch, row in figures.items()},
                                 {batch: row["roof_share"] for batch, row in figures.items()}))
    return series


def peer_series(peers, groups, shape, tokens):
    lines = {}
    for row in peers:
        if row["shape"] == shape and int(row["tokens"]) == tokens:
            key = (row["source"], row["decode"], row["state"])
            lines.setdefault(key, {})[int(row["batch"])] = float(row["us_median"])
    series = []
    for (source, decode, state), time in lines.items():
        own = groups.get((shape, tokens, decode, "fp32", float(tokens)), {}) if state == "fp32" else {}
        share = {}
        for batch, us in time.items():
            figures = own.get(batch, {}).get(PEER_WINDOW)
            if figures is not None:
                share[batch] = figures["bytes"] / (us * 1e-6) / (figures["roof_gb_s"] * 1e9)
        label = f"{source}, {decode}" + (", BF16 state" if state == "bf16" else "")
        colour = COLOURS[decode, state]
        alike = sum(other.colour == colour for other in series)
        series.append(Series(label, colour, MARKERS[alike % len(MARKERS)], time, share))
    return series


def text(x, y, content, size=13, anchor="start", extra=""):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{extra}>'
            f"{html.escape(content)}</text>")


def marker(kind, x, y, colour):
    r = 4.0
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{colour}"/>'
    if kind == "ring":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="white" stroke="{colour}" stroke-width="1.8"/>'
    paths = {
        "square": f"M{x - r:.1f},{y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z",
        "triangle": f"M{x:.1f},{y - 1.3 * r:.1f}l{1.2 * r},{2.2 * r}h{-2.4 * r}z",
        "diamond": f"M{x:.1f},{y - 1.4 * r:.1f}l{1.2 * r},{1.4 * r}l{-1.2 * r},{1.4 * r}l{-1.2 * r},{-1.4 * r}z",
        "cross": f"M{x - r:.1f},{y - r:.1f}l{2 * r},{2 * r}m{-2 * r},0l{2 * r},{-2 * r}",
        "plus": f"M{x - 1.2 * r:.1f},{y:.1f}h{2.4 * r}m{-1.2 * r},{-1.2 * r}v{2.4 * r}",
    }
    return f'<path d="{paths[kind]}" fill="white" stroke="{colour}" stroke-width="1.6"/>'


def dashes(series):
    return "" if series.marker in ("circle", "ring") else ' stroke-dasharray="5,4"'


@dataclass
class Panel:
    """A chart with logarithmic batches below; `place` maps a value to a height between 0 and 1."""

    left: float
    title: str
    batches: list
    ticks: list  # (value, label)
    place: object

    def x(self, batch):
        low, high = math.log2(self.batches[0]), math.log2(self.batches[-1])
        part = 0.5 if high == low else (math.log2(batch) - low) / (high - low)
        return self.left + 16 + part * (PANEL_WIDTH - 32)

    def y(self, value):
        return TOP + PANEL_HEIGHT * (1 - self.place(value))

    def frame(self):
        parts = [text(self.left + PANEL_WIDTH / 2, TOP - 14, self.title, 14, "middle")]
        for value, label in self.ticks:
            y = self.y(value)
            parts.append(f'<path d="M{self.left},{y:.1f}h{PANEL_WIDTH}" stroke="#dddddd"/>')
            parts.append(text(self.left - 8, y + 4.5, label, 12, "end"))
        for batch in self.batches:
            x = self.x(batch)
            parts.append(f'<path d="M{x:.1f},{TOP}v{PANEL_HEIGHT}" stroke="#eeeeee"/>')
            parts.append(text(x, TOP + PANEL_HEIGHT + 19, str(batch), 12, "middle"))
        parts.append(text(self.left + PANEL_WIDTH / 2, TOP + PANEL_HEIGHT + 42, "batch (sequences)", 13, "middle"))
        parts.append(f'<rect x="{self.left}" y="{TOP}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" '
                     'stroke="#888888"/>')
        return parts

    def line(self, series, values):
        points = [(self.x(batch), self.y(value)) for batch, value in sorted(values.items())]
        path = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        width = 2.2 if series.marker in ("circle", "ring") else 1.4
        parts = [f'<path d="M{path}" fill="none" stroke="{series.colour}" stroke-width="{width}"{dashes(series)}/>']
        return parts + [marker(series.marker, x, y, series.colour) for x, y in points]


def time_panel(all_series, batches):
    values = [us for series in all_series for us in series.time.values()]
    steps = [digit * 10.0**power for power in range(-1, 6) for digit in (1, 2, 5)]
    low = max(step for step in steps if step <= min(values))
    high = min(step for step in steps if step >= max(values))
    ticks = [(step, f"{step:g}") for step in steps if low <= step <= high]
    return Panel(LEFT, "time of a call (µs)", batches, ticks,
                 lambda us: (math.log(us) - math.log(low)) / max(math.log(high) - math.log(low), 1e-9))


def share_panel(all_series, batches):
    most = max([share for series in all_series for share in series.share.values()] + [1.0])
    high = math.ceil(10 * most) / 10
    ticks = [(tenth / 10, f"{10 * tenth}%") for tenth in range(0, round(10 * high) + 1, 1 if high < 1.5 else 2)]
    return Panel(LEFT + PANEL_WIDTH + GAP, "share of the memory roof measured in the same run", batches, ticks,
                 lambda share: share / high)


def legend(own, peers, peers_date, top):
    parts = []
    for left, heading, entries in ((LEFT, "replayssm", own),
                                   (LEFT + PANEL_WIDTH + GAP, f"peers, measured {peers_date} on the same kind of card",
                                    peers)):
        if entries:
            parts.append(text(left, top, heading, 13, extra=' font-weight="bold"'))
        for i, series in enumerate(entries):
            y = top + (i + 1) * LEGEND_LINE
            width = 2.2 if series.marker in ("circle", "ring") else 1.4
            parts.append(f'<path d="M{left},{y - 4.5}h34" stroke="{series.colour}" stroke-width="{width}"'
                         f"{dashes(series)}/>")
            parts.append(marker(series.marker, left + 17, y - 4.5, series.colour))
            parts.append(text(left + 44, y, series.label))
    return parts


def chart(title, own, peers, peers_date):
    all_series = own + peers
    batches = sorted({batch for series in all_series for batch in series.time})
    panels = [(time_panel(all_series, batches), "time"), (share_panel(all_series, batches), "share")]
    legend_top = TOP + PANEL_HEIGHT + 76
    note_top = legend_top + (max(len(own), len(peers)) + 1) * LEGEND_LINE + 12
    height = note_top + 18
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
             f'viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif" fill="#222222">',
             f'<rect width="{WIDTH}" height="{height}" fill="white"/>', text(LEFT, 26, title, 16)]
    for panel, name in panels:
        parts += panel.frame()
        for series in peers + own:  # ours on top
            values = getattr(series, name)
            if values:
                parts += panel.line(series, values)
    parts += legend(own, peers, peers_date, legend_top)
    if any(series.share for series in peers):
        parts.append(text(LEFT, note_top, NOTE, 12))
    return "\n".join(parts + ["</svg>\n"])


def main():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", default=os.path.join(root, "bench/results/h200.csv"))
    parser.add_argument("--peers", default=os.path.join(root, "bench/results/h200-peers.csv"))
    parser.add_argument("--out", default=os.path.join(root, "docs/plots"))
    flags = parser.parse_args()
    try:
        groups, machine = read_results(flags.results)
        peers = read_csv(flags.peers, "date,source,shape,state,batch,tokens,decode,us_median".split(","))
    except (OSError, ValueError) as error:
        sys.exit(f"plot.py: {error}")
    if not groups:
        sys.exit(f"plot.py: {flags.results}: expected rows of a GPU, found none")
    peers_date = max((row["date"] for row in peers), default="")
    os.makedirs(flags.out, exist_ok=True)
    for shape in sorted({key[0] for key in groups}):
        for tokens in TOKENS:
            own = own_series(groups, shape, tokens)
            if not own:
                continue
            step = "1 token a step" if tokens == 1 else f"{tokens} tokens a step"
            title = f"{TITLES.get(shape, shape)}, {step}, {machine}"
            path = os.path.join(flags.out, f"{shape}-{tokens}.svg")
            with open(path, "w", encoding="utf-8") as file:
                file.write(chart(title, own, peer_series(peers, groups, shape, tokens), peers_date))
            print(path)


if __name__ == "__main__":
    main()
