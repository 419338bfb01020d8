"""The two pictures of docs/performance.md, of one run of `tests.gpu.loop`; `python -m docs.performance` draws them."""

from itertools import pairwise
from pathlib import Path
from typing import Any

SHOWN_SECONDS = 40.0
"""Length of the shown part of the run."""
STEPS_SHOWN = 4
Result = dict[str, Any]


def draw(result: Result, folder: Path) -> None:
    """Draw both pictures of one run: its server's rate over time, and a few steps of both GPUs."""
    from matplotlib import pyplot

    steps = steps_of(result)
    first = steps[len(steps) // 3]["time"]
    last = min(first + SHOWN_SECONDS, steps[-1]["time"])
    shown = [row for row in steps if first <= row["time"] <= last]
    beats = [beat for beat in result["pulse"] if first <= beat["time"] <= last]
    pairs = list(pairwise(beats))
    rates = [(then["tokens"] - now["tokens"]) / (then["time"] - now["time"]) / 1e3 for now, then in pairs]
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(9, 4.5), sharex=True, layout="constrained")
    for row in shown:
        upper.axvline(row["time"] - first, color="tab:orange", linewidth=0.8, alpha=0.7)
    upper.plot([then["time"] - first for _, then in pairs], rates, color="tab:blue")
    upper.set(ylabel="1,000 tokens/s", ylim=(0, None), title="The server; lines: new weights")
    lower.plot([beat["time"] - first for beat in beats], [beat["running"] for beat in beats], color="tab:green")
    lower.set(ylabel="samples at work", xlabel="seconds", ylim=(0, None))
    figure.savefig(folder / "tokens.svg", metadata={"Date": None})

    figure, axes = pyplot.subplots(figsize=(9, 2.2), layout="constrained")
    few = shown[:STEPS_SHOWN]
    begin = few[0]["time"] - few[0]["seconds/step"]
    for row in few:
        start = row["time"] - row["seconds/step"] - begin
        data, train, hand = row["seconds/data"], row["seconds/train"], row["sync/handover_seconds"]
        axes.broken_barh([(start, data)], (10, 8), color="lightgray")
        axes.broken_barh([(start + data, train)], (10, 8), color="tab:blue")
        axes.broken_barh([(start + data + train, hand)], (10, 8), color="tab:orange")
        axes.axvline(row["time"] - begin, ymax=0.45, color="tab:orange", linewidth=0.8)
    end = few[-1]["time"] - begin
    axes.broken_barh([(0, end)], (0, 8), color="tab:green", alpha=0.6)
    axes.set(xlim=(0, end), xlabel="seconds", yticks=(4, 14), yticklabels=("serves", "trains"))
    colors = {"waits for rows": "lightgray", "trains": "tab:blue", "hands weights over": "tab:orange"}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    handles.append(pyplot.Rectangle((0, 0), 1, 1, color="tab:green", alpha=0.6))
    names = [*colors, "generates, without a pause"]
    axes.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, 1.35), ncols=4, frameon=False)
    figure.savefig(folder / "steps.svg", metadata={"Date": None})


def steps_of(result: Result) -> list[Result]:
    """What the trainer wrote of each step of RL."""
    return [row for row in result["rows"] if row["kind"] == "train" and row["job"] == "rl"]
