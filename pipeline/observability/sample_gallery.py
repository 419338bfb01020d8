"""The samples on a run's page: histograms of rewards and lengths over time, and some samples to read.

Training is divided into `PHASES` by policy version. Each phase shows its best, its worst, some truncated and some
failed samples. For a run without stored samples this part of the page is empty.
"""

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from pipeline.config.model_directory import model_directory
from pipeline.errors import ConfigError
from pipeline.observability.conversation_view import SampleReader
from pipeline.observability.episode_view import visible
from pipeline.observability.metric_charts import Chart
from pipeline.observability.number_format import number, plural
from pipeline.observability.run_history import History
from pipeline.observability.sample_reader import Filter, ReadSample, SampleTable, read_samples
from pipeline.observability.svg_drawing import SERIES, draw

PHASES = ("Begin", "Middle", "End")
SAMPLES_PER_PHASE = 2
"""Number of samples of each kind in each phase."""
_COLUMNS, _CELLS = 40, 16
_WIDTH, _HEIGHT = 5.2, 2.3
Samples = dict[str, list[ReadSample]]


def gallery(history: History) -> tuple[list[Chart], str]:
    """The histograms over time, and the samples of each phase as HTML; both empty without stored samples.

    A run without training has the samples of each evaluation set instead.
    """
    samples, reader = read_samples(history.paths), _reader(history)
    trained = samples.where(Filter(kind="train"))
    shown = phases(trained) if len(trained) else _sets(samples)
    cards = "".join(_phase(title, chosen, reader) for title, chosen in shown)
    return spread_charts(trained) if len(trained) else [], cards


def spread_charts(samples: SampleTable) -> list[Chart]:
    """Histograms of rewards and lengths over policy versions."""
    versions, rewards, lengths = (samples.column(name) for name in ("version_min", "reward", "length"))
    rows = [row for row in zip(versions, rewards, lengths, strict=True) if None not in row]
    note = "Each column is the weights of some steps; the darker a cell, the larger its share of that column's samples."
    if not rows:
        missing = "no stored sample has a reward"
        return [Chart(title, note, missing=missing) for title in ("Rewards over time", "Lengths over time")]
    steps, scores, sizes = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    return [
        _spread("Rewards over time", note, steps, scores),
        _spread("Lengths over time", f"Tokens of a sample, prompt included. {note}", steps, sizes),
    ]


def phases(samples: SampleTable) -> Iterator[tuple[str, Samples]]:
    """Each phase that has samples: a title with its policy versions, and the samples of each kind."""
    versions = [version for version in samples.column("version_min") if version is not None]
    # Failed samples have no version: the time assigns them to the phase of the samples around them.
    stamps = np.array(samples.column("time"), dtype=float)
    edges = np.linspace(min(versions), max(versions) + 1, len(PHASES) + 1).tolist() if versions else []
    times = _times(samples, edges) if versions else [stamps.min(), stamps.max() + 1]
    for index, name in enumerate(PHASES[: len(times) - 1]):
        part = samples.between(float(times[index]), float(times[index + 1]))
        if len(part):
            yield f"{name}: {_weights(part)}", _chosen(part)


def _sets(samples: SampleTable) -> Iterator[tuple[str, Samples]]:
    """Each evaluation set, in the order of their first evaluations."""
    for name in dict.fromkeys(samples.column("eval_set")):
        part = samples.where(Filter(eval_set=name))
        yield f"{name}: {plural(len(part), 'sample')} kept", _chosen(part)


def _times(samples: SampleTable, edges: Sequence[float]) -> list[float]:
    """The time of the first sample of each phase, and the end: the edges of the phases."""
    pairs = [
        (version, stamp)
        for version, stamp in zip(samples.column("version_min"), samples.column("time"), strict=True)
        if version is not None
    ]
    begins = [min((stamp for version, stamp in pairs if version >= edge), default=float("inf")) for edge in edges[:-1]]
    return [float("-inf"), *begins[1:], float("inf")]


def _chosen(part: SampleTable) -> Samples:
    best = list(part.best(SAMPLES_PER_PHASE).load())
    shown = {(sample["position"], sample["sample"], sample["time"]) for sample in best}
    # Twice the number of candidates, since a small phase may have the same samples as its best and its worst.
    worst = [
        s for s in part.worst(2 * SAMPLES_PER_PHASE).load() if (s["position"], s["sample"], s["time"]) not in shown
    ]
    return {
        "best": best,
        "worst": worst[:SAMPLES_PER_PHASE],
        "cut off": list(part.where(Filter(cut=True)).newest(SAMPLES_PER_PHASE).load()),
        "failed": list(part.where(Filter(failed=True)).newest(SAMPLES_PER_PHASE).load()),
    }


def _weights(part: SampleTable) -> str:
    versions = [version for version in part.column("version_min") if version is not None]
    among = f"weights {min(versions)}–{max(versions)}, " if versions else ""
    return f"{among}{plural(len(part), 'sample')} kept"


def _reader(history: History) -> SampleReader | None:
    if history.config is None:
        return None
    try:
        return SampleReader(model_directory(history.config.model))
    except ConfigError:
        return None


def _phase(title: str, chosen: Samples, reader: SampleReader | None) -> str:
    cards = "".join(
        _card(kind, sample, reader, opened=index == 0)
        for kind, samples in chosen.items()
        for index, sample in enumerate(samples)
    )
    return f'<h3 class="phase">{escape(title)}</h3><div class="samples">{cards}</div>'


def _card(kind: str, sample: ReadSample, reader: SampleReader | None, *, opened: bool) -> str:
    reward = "failed" if sample["reward"] is None else f"reward {sample['reward']:g}"
    head = f"<b>{escape(kind)}</b> · {reward} · position {sample['position']}"
    return f"<details{' open' if opened else ''}><summary>{head}</summary>{_body(sample, reader)}</details>"


def _body(sample: ReadSample, reader: SampleReader | None) -> str:
    if sample["failure"] is not None:
        return f'<pre class="reason">{escape(visible(sample["failure"]))}</pre>'
    if reader is None:
        return '<p class="note">the model directory is not here, so its tokens have no text</p>'
    turns = "".join(
        f'<div class="turn{" sampled" if part.sampled else ""}"><span>{escape(part.role)}</span>'
        f"<pre>{escape(visible(part.text))}</pre></div>"
        for row in sample.rows()
        for part in reader.parts(row.tokens, row.mask)
        if part.sampled or part.text.strip()
    )
    return f'{turns}<p class="note">{escape(_facts(sample))}</p>'


def _facts(sample: ReadSample) -> str:
    lines = [
        f"advantage {number(sample['advantage'], '+.2f')}",
        "not trained" if sample.step is None else f"trained at step {sample.step}, lag {sample.lag}",
        f"{sample['length']} tokens, {sample['sampled']} sampled",
        *(f"{name} {value:g}" for name, value in sorted(sample["metrics"].items())),
    ]
    return visible(" · ".join(lines))


def _spread(title: str, note: str, steps: np.ndarray, values: np.ndarray) -> Chart:
    """A two-dimensional histogram of values over steps; each column is normalized to 1."""
    columns = min(_COLUMNS, int(steps.max() - steps.min()) + 1)
    low, high = float(values.min()), float(values.max())
    # A margin of about half a cell keeps the extreme values off the edges.
    margin = 0.5 if high == low else (high - low) / (2 * _CELLS)
    counts, at, among = np.histogram2d(
        steps, values, bins=(columns, _CELLS), range=((steps.min(), steps.max() + 1), (low - margin, high + margin))
    )
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)

    def paint(axes: Axes) -> None:
        for column, row in zip(*np.nonzero(shares), strict=True):
            corner, size = (at[column], among[row]), (at[column + 1] - at[column], among[row + 1] - among[row])
            strength = 0.12 + 0.88 * float(shares[column, row])  # even a small share is visible
            axes.add_patch(Rectangle(corner, *size, facecolor=SERIES[0], alpha=strength, linewidth=0))
        axes.set_xlim(at[0], at[-1])
        axes.set_ylim(among[0], among[-1])

    spoken = f"{title}: from {low:.3g} to {high:.3g}, median {float(np.median(values)):.3g}"
    return Chart(title, note, svg=draw(_WIDTH, _HEIGHT, paint, spoken))
