"""Writes the tables and pictures of docs/performance.md from the raw figures: python -m docs.performance [--check]

Owns how the results in docs/performance/ of `tests.gpu.loop`, `weights`, `generation`, `speed`, `long_context`,
`tinker`, `sharing`, `learns`, `peers` and `variants` are shown. It measures nothing. With `--check` it fails if the
page has other tables than it would write; pictures are not compared, since every release of matplotlib draws a little
differently.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs.pictures import draw, steps_of
from docs.variant_rows import variants
from tests.gpu.learns import means
from tests.gpu.peers import paces
from tests.gpu.sharing import PACKED, SHARED

HERE = Path(__file__).parent
PAGE, RAW = HERE / "performance.md", HERE / "performance"
BEGIN, END = "<!-- made by python -m docs.performance: {} -->\n", "<!-- end -->\n"
RECOVERED = 6
"""Steps after a fault until they take as long as before."""
STAGES = ("first ten", "after a quarter", "after half", "after three quarters", "last ten")
"""Steps over which rewards are averaged."""
DRAWN = "loop-4b-4xh200"
"""The run in the pictures."""
MOST_LAG = "loop-0.6b-2xh200"
"""The run with `max_lag=4`, which is shown with the runs of a smaller lag."""
Result = dict[str, Any]
Row = dict[str, str]
"""A row of a table, by the titles of its columns."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args(arguments)
    page = PAGE.read_text()
    made = page
    for name, table in TABLES.items():
        made = _replaced(made, name, _written(table()))
    if chosen.check:
        if made != page:
            print(f"{PAGE.name} is not what docs/performance/ gives: python -m docs.performance writes it")
        return int(made != page)
    PAGE.write_text(made)
    draw(_results("loop")[DRAWN], RAW)
    return 0


def loops() -> list[Row]:
    """Whole runs, and each half alone."""
    return [_loop(result, result["command"], result.get("alone", {})) for result in _results("loop").values()]


def _loop(result: Result, command: Result, alone: Result) -> Row:
    return {
        "model": command["shape"].upper()
        + (f", adapters of rank {command['adapter']}" if command.get("adapter") else ""),
        "GPUs: train + serve": _gpus(command),
        "completions": _completions(command),
        "max_lag": str(command["lag"]),
        "samples/s": f"{result['samples_per_second']:.1f}",
        "servers alone": _number(alone.get("generation_samples_per_second"), ".1f"),
        "trainer alone": _number(alone.get("training_samples_per_second"), ".1f"),
        "plain loop alone": _number(alone.get("plain_training_samples_per_second"), ".1f"),
        "relative to the slower half": _number(result.get("efficiency"), ".2f"),
        "s a step": f"{128 / result['samples_per_second']:.2f}",
        "s training": f"{result['seconds/train']:.2f}",
        "s blocked by weights": f"{result['sync/handover_seconds']:.2f}",
        "s to the first step": f"{result['start_seconds']:.0f}",
    }


def staleness() -> list[Row]:
    """Runs that differ in `max_lag`."""
    return [_lag(result) for result in [*_results("lag").values(), _results("loop")[MOST_LAG]]]


def _lag(result: Result) -> Row:
    return {
        "max_lag": str(result["command"]["lag"]),
        "samples/s": f"{result['samples_per_second']:.1f}",
        "s a step": f"{128 / result['samples_per_second']:.2f}",
        "s training": f"{result['seconds/train']:.2f}",
        "trainer idle": f"{result['idle/trainer']:.0%}",
        "running samples, mean": f"{statistics.mean(_beats(result, 'running')):.0f}",
    }


def _beats(result: Result, name: str) -> list[float]:
    """The servers' values of a number from the tenth step to the last one."""
    times = [row["time"] for row in steps_of(result)]
    return [beat[name] for beat in result["pulse"] if times[9] <= beat["time"] <= times[-1]]


def tails() -> list[Row]:
    """Runs that differ in the length of samples, and in the policy for stale ones."""
    return [_tail(result) for result in [_results("loop")[MOST_LAG], *_results("tails").values()]]


def _tail(result: Result) -> Row:
    times, tokens = _beats(result, "time"), _beats(result, "tokens")
    command, alone = result["command"], result.get("alone", {})
    stale = next((key.partition("=")[2] for key in command["overrides"] if key.startswith("training.stale=")), "refuse")
    return {
        "completions": _completions(command),
        "GPUs: train + serve": _gpus(command),
        "training.stale": stale,
        "samples/s": f"{result['samples_per_second']:.1f}",
        "tokens/s of the server": f"{(tokens[-1] - tokens[0]) / (times[-1] - times[0]) / 1e3:.1f}k",
        "running samples, mean": f"{statistics.mean(_beats(result, 'running')):.0f}",
        "trainer idle": f"{result['idle/trainer']:.0%}",
        "refused groups a step": _number(_steady_mean(result, "groups/stale"), ".1f"),
        "tokens masked": f"{_steady_mean(result, 'staleness/masked'):.0%}",
        "servers alone": _number(alone.get("generation_samples_per_second"), ".1f"),
        "relative to the slower half": _number(result.get("efficiency"), ".2f"),
    }


def _steady_mean(result: Result, name: str) -> float:
    """Mean of a number from the tenth step on; 0 where older runs did not record it."""
    return statistics.mean(row.get(name, 0.0) for row in steps_of(result)[10:])


def _completions(command: Result) -> str:
    return str(command["tokens"]) if command["ends"] == 1 else f"long tail, up to {command['tokens']}"


def faults() -> list[Row]:
    """The cost of faults of servers and trainers."""
    return [row for result in _results("fault").values() for row in _faults(result)]


def _faults(result: Result) -> list[Row]:
    """A row for each fault of a run, from the steps between the previous and the next fault; none if the run ended
    soon after the fault."""
    command, steps = result["command"], steps_of(result)
    named = "faults" in command or isinstance(command["fault"], list)  # older runs of one fault have only its time
    strikes = [strike if named else {"fault": command["fault"], "time": strike} for strike in result["struck"]]
    times = [0.0, *(strike["time"] for strike in strikes), steps[-1]["time"] + 1]
    rows = []
    for strike, begin, end in zip(strikes, times, times[2:], strict=False):
        fault, struck = strike["fault"], strike["time"]
        step = fault.partition("@step=")[2] or strike.get("step") or sum(row["time"] < struck for row in steps)
        before = [row["seconds/step"] for row in steps if begin < row["time"] < struck][5:]
        after = [row for row in steps if struck < row["time"] < end]
        if len(after) <= RECOVERED:
            continue
        rows.append(
            {
                "model": command["shape"].upper(),
                "servers": str(command["servers"]),
                "fault": _fault_words(fault),
                "after step": str(step),
                "steps done": str(len(steps)),
                "attempts": str(1 + sum(strike["fault"] == "trainer" for strike in strikes)),
                "s from the fault to the next step": f"{after[0]['time'] - struck:.0f}",
                "s a step before": f"{statistics.mean(before):.2f}" if before else "–",
                "s a step after": f"{statistics.mean(row['seconds/step'] for row in after[RECOVERED:]):.2f}",
                "exit": str(result["exit"]),
                "MiB left on the GPUs": ", ".join(map(str, result.get("gpu_mib_left", ()))) or "–",
            }
        )
    return rows


def _fault_words(fault: str) -> str:
    """A planned fault such as `kill:inference@step=12`, or the name that older runs gave it, in words."""
    kind, _, rest = fault.partition(":")
    if not rest:
        return "trainer killed" if fault == "trainer" else f"server {fault}"
    role = rest.partition("@")[0].partition("[")[0]
    words = {"kill": "killed", "stop": "stopped", "exit": "exits with 1", "early": "exits with 0"}
    return f"{'server' if role == 'inference' else role} {words.get(kind, kind)}"


def weights() -> list[Row]:
    """Updates while a server generates."""
    return [_weights(result, result["under_updates"]) for result in _results("weights").values()]


def _weights(result: Result, rows: list[Result]) -> Row:
    return {
        "model": result["command"]["shape"].upper(),
        "servers": _servers(result["command"]),
        "GB": f"{result['bytes'] / 1e9:.2f}",
        "ms, idle server": f"{statistics.median(result['idle_update_ms']):.0f}",
        "ms, under load": f"{statistics.median(row['update_ms'] for row in rows):.0f}",
        "ms, worst": f"{max(row['update_ms_max'] for row in rows):.0f}",
        "updates": str(sum(row["updates"] for row in rows)),
        "tokens/s relative to undisturbed": ", ".join(f"{row['ratio']:.2f}" for row in rows),
        "checked tokens": f"{sum(row['tokens'] for row in rows):,}",
        "torn": str(result["torn"]),
    }


def _servers(command: Result) -> str:
    """The number of servers, their place unless they have separate GPUs, and the GPUs of each."""
    where = ", on the sender's GPU" if command.get("share") else ""
    where += ", from its host's memory" if command.get("host") else ""
    return f"{command['servers']}{where}" + (f" × {command['tensor']} GPUs" if command["tensor"] > 1 else "")


def long_rows() -> list[Row]:
    """Steps on long rows: one row for each case, GPU and choice of what is recomputed, with all its measurements."""
    alike = defaultdict[tuple[str, str, str], list[Result]](list)
    for name, row in [case for result in _results("long").values() for case in result.items()]:
        if "step_seconds" in row:
            alike[name, row["device"], row["recompute"]].append(row)
    return [_long_row(name, rows) for (name, _, _), rows in alike.items()]


def _long_row(name: str, rows: list[Result]) -> Row:
    best = max(row["tokens_per_second"] for row in rows)
    others = [f"{who} {rate:,.0f} ({best / rate:.2f})" for who, (rate, _) in (rows[0]["published"] or {}).items()]
    return {
        "case": name,
        "GPU": rows[0]["device"].removeprefix("NVIDIA "),
        "s a step": ", ".join(f"{row['step_seconds']:.2f}" for row in rows),
        "tokens/s": f"{best:,.0f}",
        "MFU": f"{max(row['mfu'] for row in rows):.2f}",
        "peak GiB": f"{max(row['peak_gib'] for row in rows):.1f}",
        "recomputed": rows[0]["recompute"],
        "published tokens/s (ours relative to it)": ", ".join(others) or "–",
    }


def generation() -> list[Row]:
    """The cost of log-probabilities."""
    return [_rate(result, row) for result in _results("generation").values() for row in result["rows"]]


def _rate(result: Result, row: Result) -> Row:
    return {
        "model": result["shape"].upper() + ("" if row["fast_logprobs"] else ", vLLM's serialization"),
        "API processes": str(result["api"]),
        "concurrent requests": str(row["requests"]),
        "tokens/s with log-probabilities": f"{row['with'] / 1e3:.1f}k",
        "without": f"{row['without'] / 1e3:.1f}k",
        "ratio": f"{row['ratio']:.2f}",
    }


def api() -> list[Row]:
    """Rates through the Tinker API relative to the rates without it."""
    return [
        _served(name, what, clients, rates, base)
        for name, result in _results("tinker").items()
        for what, base in (("training", "alone"), ("sampling", "raw"))
        for clients, rates in result.get(what, {}).items()
    ]


def _served(name: str, what: str, clients: str, rates: dict[str, float], base: str) -> Row:
    return {
        "raw file": name,
        "operation": what,
        "clients": clients,
        "tokens/s alone": f"{rates[base] / 1e3:.1f}k",
        "through the API": f"{rates['served'] / 1e3:.1f}k",
        "ratio": f"{rates['served'] / rates[base]:.2f}",
    }


def training() -> list[Row]:
    """Steps of the trainer and of a plain loop, in the order of each call."""
    return [
        _step(way, measured, next(iter(result.values())))
        for result in _results("speed").values()
        for way, measured in result.items()
    ]


def _step(way: str, measured: Result, first: Result) -> Row:
    return {
        "variant": way,
        "s a step": f"{measured['step_seconds']:.3f}",
        "tokens/s": f"{measured['tokens_per_second'] / 1e3:.0f}k",
        "MFU": f"{measured['mfu']:.2f}",
        "peak GiB": f"{measured['peak_bytes'] / 2**30:.1f}",
        "relative to the loop": f"{measured['tokens_per_second'] / first['tokens_per_second']:.2f}",
    }


def sharing() -> list[Row]:
    """Steps that compute shared prefixes once."""
    return [_shared(result, case) for result in _results("sharing").values() for case in result["cases"]]


def _shared(result: Result, case: Result) -> Row:
    packed, shared = (case["ways"][name] for name in (PACKED, SHARED))
    return {
        "model": result["command"]["shape"].upper(),
        "tokens of a prompt": str(case["prompt"]),
        "tokens of a completion": str(case["completion"]),
        "s a step, packed": f"{packed['step_seconds']:.2f}",
        "s a step, shared": f"{shared['step_seconds']:.2f}",
        "ratio": f"{shared['step_seconds'] / packed['step_seconds']:.2f}",
        "peak GiB, packed": f"{packed['peak_bytes'] / 2**30:.1f}",
        "peak GiB, shared": f"{shared['peak_bytes'] / 2**30:.1f}",
    }


def peers() -> list[Row]:
    """Whole runs and another framework on the same GPU."""
    return [row for result in _results("peers").values() for row in _peers(result)]


def _peers(result: Result) -> list[Row]:
    paced, command = paces(result), result["command"]
    names = {"ours": "Rollcall", "theirs": f"TRL {result['theirs']['trl']}"}
    return [
        {
            "": names[side],
            "model": command["shape"].upper(),
            "completions": str(command["tokens"]),
            "s a step": f"{pace.seconds:.2f}",
            "samples/s": f"{pace.samples:.1f}",
            "relative to TRL": f"{pace.samples / paced['theirs'].samples:.2f}",
            "reward, last ten steps": f"{pace.reward:.3f}",
        }
        for side, pace in paced.items()
    ]


def learning() -> list[Row]:
    """Rewards at equal numbers of samples, of whole runs and of one process."""
    return [
        {**_learning_row(result["command"], way), **dict(zip(STAGES, _shown(rewards), strict=True))}
        for result in _results("learns").values()
        for way, rewards in means(result["ways"])[1].items()
    ]


def _learning_row(command: Result, way: str) -> Row:
    where = f"{command['shape'].upper()}, {'GPU' if command['device'] == 'cuda' else 'CPU'}"
    return {"variant": _way(way), "model": where, "learning rate": f"{command['lr']:g}"}


def _way(way: str) -> str:
    """The variant with the keys that were the defaults of `grpo` at the time, where they have an effect."""
    if not way.startswith("max_lag=") or way == "max_lag=0":
        return way
    then = ("loss.old_logprobs=sampler", "loss.tis=none")
    return " ".join([way, *(key for key in then if key.partition("=")[0] not in way)])


def _shown(rewards: list[float]) -> list[str]:
    return [f"{reward:.3f}" for reward in rewards]


TABLES = {
    "loops": loops,
    "peers": peers,
    "learning": learning,
    "variants": lambda: variants(RAW),
    "training": training,
    "long rows": long_rows,
    "sharing": sharing,
    "staleness": staleness,
    "tails": tails,
    "faults": faults,
    "weights": weights,
    "generation": generation,
    "api": api,
}


def _results(kind: str) -> dict[str, Result]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RAW.glob(f"{kind}-*.json"))}


def _gpus(command: Result) -> str:
    if command["share"]:
        return f"{command['trainers']}, shared"
    servers = f"{command['servers']} × {command['tensor']}" if command["tensor"] > 1 else f"{command['servers']}"
    return f"{command['trainers']} + {servers}" + (f", {command['per_gpu']} a GPU" if command["per_gpu"] > 1 else "")


def _written(rows: Sequence[Row]) -> str:
    """A table; all columns but the first stand on the right."""
    lines = [list(rows[0]), ["---", *["---:"] * (len(rows[0]) - 1)], *(list(row.values()) for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _replaced(page: str, name: str, body: str) -> str:
    begin = BEGIN.format(name)
    before, _, rest = page.partition(begin)
    _, marker, after = rest.partition(END)
    if not marker:
        raise SystemExit(f"{PAGE}: expected a line {begin.strip()!r} and after it {END.strip()!r}")
    return before + begin + body + END + after


if __name__ == "__main__":
    sys.exit(main())
