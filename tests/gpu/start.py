"""Seconds from the command to the first step, and what they are spent on, beside `vllm serve` alone.

    python -m tests.gpu.start OUT.json [--shape 0.6b] [--order ours serve] [--starts cold warm] [--caches DIR]
    python -m tests.gpu.start OUT.json --device cpu --shape tiny --seconds 400

A run as a user starts it, with a trainer and a server that share a GPU, until its first step; and vLLM's server with
the same model and settings, without our plugin, until it has answered a request. Both have random weights. Of a run:
the seconds until its agents have met, the trainer is ready, the server answers, the server has the first weights, its
first token is sampled, the first evaluation is there, and the first step is trained.

A cold start finds no compiled code, in an empty folder of caches; a warm one finds that of the start before it. The
first start of a machine also reads everything from its disk, so make a second call with `--order serve ours`. All
starts together take at most `--seconds`; the result is written after each.
"""

import argparse
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.observability.run_history import attempt_names, read_attempt
from pipeline.run.paths import WORLD, RunPaths
from pipeline.utils.subprocesses import hold_port
from tests.bench.bench_start import time_of_log_line
from tests.bench.tables import markdown
from tests.gpu import children, loop
from tests.gpu.cold_starts import command_of, end_at_once, gpu_name, is_empty, seconds_of_first, with_caches
from tests.gpu.pulse import measures_of, servers_below
from tests.gpu.words import write_model
from tests.gpu.workload import WORKLOADS

WEIGHTS = {("ours", "cold"): 7, ("serve", "cold"): 5, ("ours", "warm"): 5, ("serve", "warm"): 4}
"""How the time that is left is divided over the starts that are left."""
MILESTONES = (
    *("agents met", "trainer ready", "server answers", "first weights", "first token", "first evaluation"),
    "first step",
)
ROLES = {"trainer.0": "trainer ready", "inference.0": "server answers"}
LOOK_SECONDS = 0.25
TOKENS = 64


def main(arguments: Sequence[str] | None = None) -> int:
    given = asked_for(arguments)
    began = time.monotonic()
    result: dict[str, Any] = {"command": command_of(given), "gpu": gpu_name(), "starts": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", WORKLOADS[given.shape])
        caches = (given.caches or folder / "caches").resolve()
        plan = [(side, start) for start in given.starts for side in given.order]
        for number, (side, start) in enumerate(plan):
            here, own = folder / str(number), caches / side
            here.mkdir()
            (here / "model").symlink_to(folder / "model")
            left = given.seconds - (time.monotonic() - began)
            seconds = seconds_of_first(left, [WEIGHTS[each] for each in plan[number:]])
            start_record = {"side": side, "start": start, "cold": is_empty(own), "deadline": seconds}
            run = run_ours if side == "ours" else run_serve
            result["starts"].append(start_record | run(here, own, given, seconds))
            given.out.write_text(json.dumps(result, indent=1))
            print(report(result["starts"]), flush=True)
    reached = [start["seconds"].get("first step", start["seconds"].get("first token")) for start in result["starts"]]
    return int(None in reached)


def asked_for(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--starts", nargs="+", default=["cold", "warm"], choices=("cold", "warm"))
    parser.add_argument("--order", nargs="+", default=["ours", "serve"], choices=("ours", "serve"))
    parser.add_argument("--caches", type=Path, help="folder for compiled code, kept; absent: a new one")
    parser.add_argument("--api", type=int, default=4, help="processes of a server that answer HTTP")
    parser.add_argument("--seconds", type=float, default=560, help="for all starts together")
    parser.add_argument("--logs", type=Path, help="folder for the logs of each start")
    parser.add_argument("overrides", nargs="*", help="further keys of the run's config")
    return parser.parse_intermixed_args(arguments)


def run_ours(here: Path, caches: Path, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """A run until its first step."""
    asked = [str(given.out), "--shape", given.shape, "--device", given.device, "--share", "--steps", "1000"]
    chosen = loop.asked_for([*asked, "--tokens", str(TOKENS), "--api", str(given.api), *given.overrides])
    command = [sys.executable, "launchers/submit.py", *loop.overrides(here, chosen)]
    run, began, reached, code = here / "runs" / "loop", time.time(), dict[str, float](), None
    with children.started(command, environment=with_caches(caches)) as process:
        while code is None and "first step" not in reached and time.time() - began < seconds:
            code = children.wait(process, LOOK_SECONDS)
            reached = milestones(run, began) | reached
            if "server answers" in reached and "first token" not in reached and has_sampled(process.pid):
                reached["first token"] = time.time() - began
        end_at_once(process)
    rows = [row for row in loop.trained(here) if row["job"] == "rl"]
    keep_logs(given, f"ours-{here.name}", loop.logs_of(run))
    return {
        "exit": code,
        "seconds": reached,
        "roles": loop.starts_of(run, began),
        "first_row": {name: value for name, value in rows[0].items() if isinstance(value, int | float)} if rows else {},
    }


def milestones(run: Path, began: float) -> dict[str, float]:
    """The seconds from `began` to what a run's first attempt has reached."""
    paths = RunPaths(run)
    names = attempt_names(paths)[:1]
    if not names:
        return {}
    attempt = paths.attempt("", names[0])
    times: dict[str, float] = {}
    if worlds := [*paths.rendezvous.glob(f"*/{names[0]}/{WORLD}")]:
        times["agents met"] = worlds[0].stat().st_mtime
    ready = {change.role: change.time for change in read_attempt(attempt).transitions if change.state == "ready"}
    times |= {name: ready[role] for role, name in ROLES.items() if role in ready}
    for log in run.glob("attempts/*/logs/trainer.0.log"):
        sent = [line for line in log.read_text(errors="replace").splitlines() if " weights 0 on " in line]
        times |= {"first weights": time_of_log_line(sent[0])} if sent else {}
    for row in loop.rows_of(run / "metrics.jsonl"):
        if row["job"] == "rl":
            times.setdefault("first step" if row["kind"] == "train" else "first evaluation", row["time"])
    return {name: moment - began for name, moment in times.items()}


def has_sampled(pid: int) -> bool:
    """Whether a server below this process has sampled a token."""
    for endpoint in servers_below(pid):
        try:
            if measures_of(endpoint)["tokens"]:
                return True
        except (OSError, urllib.error.URLError):
            continue  # it does not answer yet
    return False


def run_serve(here: Path, caches: Path, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """vLLM's server alone, until it has answered a request."""
    with hold_port() as holder:
        port = holder.getsockname()[1]
    endpoint, began, reached, code = f"http://127.0.0.1:{port}", time.time(), dict[str, float](), None
    environment = with_caches(caches) | {"VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1"}
    command, file = serve_command(here / "model", port, given), here / "serve.log"
    with file.open("wb") as log, children.started(command, log, environment) as process:
        while code is None and "first token" not in reached and time.time() - began < seconds:
            code = children.wait(process, LOOK_SECONDS)
            if "server answers" not in reached and answers(f"{endpoint}/health"):
                reached["server answers"] = time.time() - began
            if "server answers" in reached and answers(f"{endpoint}/v1/completions", REQUEST):
                reached["first token"] = time.time() - began
    keep_logs(given, f"serve-{here.name}", {"serve": file.read_text(errors="replace")})
    return {"exit": code, "seconds": reached}


REQUEST = {"model": "policy", "prompt": [5, 6, 7, 8], "max_tokens": 4}


def serve_command(model: Path, port: int, given: argparse.Namespace) -> list[str]:
    """The server of the run as one would start it by hand."""
    longest = min(TOKENS + 64, WORKLOADS[given.shape].model["max_position_embeddings"])
    common = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy", "--load-format", "dummy"]
    common += ["--max-model-len", str(longest), "--max-num-seqs", "512"]
    if given.device == "cuda":
        program = ["vllm.entrypoints.cli.main", "serve", str(model), "--dtype", "bfloat16"]
        common += ["--gpu-memory-utilization", "0.4", "--api-server-count", str(given.api)]
    else:
        program = ["vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32", "--enforce-eager"]
        common += ["--kv-cache-memory-bytes", str(1 << 26), "--gpu-memory-utilization", "0.05"]
    return [sys.executable, "-m", *program, *common]


def answers(url: str, body: dict[str, Any] | None = None) -> bool:
    """Whether a server answers a request with success."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def keep_logs(given: argparse.Namespace, name: str, logs: dict[str, str]) -> None:
    if given.logs:
        given.logs.mkdir(parents=True, exist_ok=True)
        (given.logs / f"{name}.log").write_text("".join(f"--- {title}\n{log}\n" for title, log in logs.items()))


def report(starts: Sequence[dict[str, Any]]) -> str:
    rows = [
        (f"{start['side']}, {start['start']}", *(start["seconds"].get(name, "") for name in MILESTONES))
        for start in starts
    ]
    return markdown(("seconds from the command", *MILESTONES), rows)


if __name__ == "__main__":
    sys.exit(main())
