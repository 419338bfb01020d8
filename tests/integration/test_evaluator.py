"""A run that evaluates alone: the actor's process, servers over real HTTP, and what an attempt leaves to the next."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from pipeline.checkpoints import Fence
from pipeline.observability.sample_reader import Filter, read_samples
from pipeline.run.events import Events
from pipeline.run.metrics_log import MetricSinks, read_rows
from pipeline.run.paths import RunPaths
from pipeline.utils.subprocesses import Child
from pipeline.utils.waiting import wait_for
from tests.fakes.async_server import ADDRESS
from tests.fakes.configs import make_config
from tests.patience import WAIT_SECONDS
from tests.support.runs.attempts import Attempt, an_attempt
from tests.support.servers.policy_server import PolicyServer, a_policy_server

pytestmark = pytest.mark.integration

STEP = 7
SETS = {
    "sampled": {"samples": 4, "temperature": 0.8, "pass_at": [1, 4], "prompts": 6},
    "other": {"task": {"name": "arithmetic", "options": {"held_out": 3}}},
}
ASK = """
import json, os, sys, urllib.request
body = json.dumps({"model": sys.argv[2], "messages": []}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
assert os.environ["ROLLCALL_BASE_URL"] == sys.argv[1]
answer = urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/chat/completions", body, headers), timeout=20)
open(os.path.join(sys.argv[3], "answer.json"), "wb").write(answer.read())
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def echo(request: web.Request) -> web.StreamResponse:
    """What a server was asked, and by whom, in two parts."""
    response = web.StreamResponse()
    await response.prepare(request)
    told = json.dumps({"asked": await request.json(), "key": request.headers["Authorization"]}).encode()
    for part in (told[:5], told[5:]):
        await response.write(part)
    return response


def a_run(
    stack: ExitStack, root: Path, servers: int = 2, sets: Any = SETS, **evaluation: Any
) -> tuple[Attempt, list[PolicyServer]]:
    """An attempt to evaluate at `STEP`, whose servers say that their weights are of another version."""
    config = make_config(
        model={"path": "tiny_qwen3", "init": "random", "max_length": 64},
        task={"name": "arithmetic", "options": {"held_out": 8}},
        training={"steps": 0, "prompts_per_step": 1},
        rollout={"max_tokens": 8},
        evaluation={"only": True, "step": STEP, "sets": sets, **evaluation},
    )
    running = [stack.enter_context(a_policy_server({"/v1/chat/completions": echo})) for _ in range(servers)]
    attempt = stack.enter_context(an_attempt(root, config, tuple((ADDRESS, server.port) for server in running)))
    return attempt, running


def ended(child: Child) -> int:
    return int(
        wait_for("the actor to end", lambda: (child.poll(),) if child.poll() is not None else None, WAIT_SECONDS)[0]
    )


def test_every_set_is_measured_once_and_the_end_is_told(stack: ExitStack, tmp_path: Path) -> None:
    attempt, servers = a_run(stack, tmp_path)
    assert ended(attempt.start("actor")) == 0
    run = RunPaths(tmp_path)
    found = json.loads(run.evaluation.read_text())
    assert (found["step"], list(found["sets"])) == (STEP, ["held_out", "sampled", "other"])
    assert found["sets"]["held_out"]["accuracy"] == 1.0
    sampled = found["sets"]["sampled"]
    # Two of four samples are right: 1 − C(2, 1) / C(4, 1), and 1 − 0 for all four.
    assert (sampled["accuracy"], sampled["pass@1"], sampled["pass@4"], sampled["prompts"]) == (0.5, 0.5, 1.0, 6)
    assert (found["sets"]["other"]["prompts"], found["sets"]["other"]["version_min"]) == (3, STEP)
    rows = read_rows(run.metrics)
    assert [(row.get("set", ""), row["step"]) for row in rows] == [("", STEP), ("sampled", STEP), ("other", STEP)]
    assert Events(attempt.paths).get("training_finished")
    assert attempt.paths.checkpointed.exists()
    assert sum(server.requests for server in servers) == 8 + 6 + 3
    kept = read_samples(run)
    assert [len(kept.where(Filter(eval_set=name))) for name in ("held_out", "sampled", "other")] == [8, 24, 3]


def test_what_an_earlier_attempt_logged_is_not_measured_again(stack: ExitStack, tmp_path: Path) -> None:
    attempt, servers = a_run(stack, tmp_path)
    with MetricSinks(RunPaths(tmp_path).metrics, "6-0") as sinks:
        sinks.log("eval", "rl", STEP, {"eval/accuracy": 0.25, "eval/prompts": 8.0})
        sinks.log("eval", "rl", STEP, {"eval/sampled/accuracy": 0.5}, eval_set="sampled")
    assert ended(attempt.start("actor")) == 0
    assert sum(server.requests for server in servers) == 3, "the prompts of the set that was left"
    found = json.loads(RunPaths(tmp_path).evaluation.read_text())["sets"]
    assert (found["held_out"]["accuracy"], found["sampled"]["accuracy"]) == (0.25, 0.5)
    assert found["other"]["accuracy"] == 1.0


def test_an_attempt_that_is_told_to_end_in_the_middle_leaves_the_rest_to_the_next(
    stack: ExitStack, tmp_path: Path
) -> None:
    attempt, servers = a_run(stack, tmp_path, sets={"sampled": SETS["sampled"]})
    metrics = RunPaths(tmp_path).metrics
    for server in servers:
        server.hold.clear()
    child = attempt.start("actor")
    wait_for("requests in flight", lambda: any(server.in_flight for server in servers), WAIT_SECONDS)
    done = read_rows(metrics)
    assert child.stop(20) == 0
    assert not Events(attempt.paths).get("training_finished")
    assert read_rows(metrics) == done
    for server in servers:
        server.hold.set()
    assert ended(attempt.start("actor")) == 0
    assert sorted(row.get("set", "") for row in read_rows(metrics)) == ["", "sampled"]


def test_an_attempt_that_another_has_replaced_logs_nothing(stack: ExitStack, tmp_path: Path) -> None:
    attempt, servers = a_run(stack, tmp_path, sets={})
    for server in servers:
        server.hold.clear()
    child = attempt.start("actor")
    wait_for("requests in flight", lambda: any(server.in_flight for server in servers), WAIT_SECONDS)
    Fence(str(RunPaths(tmp_path).checkpoints), "8-0").claim("8")
    for server in servers:
        server.hold.set()
    assert ended(child) == 1
    assert not read_rows(RunPaths(tmp_path).metrics)
    assert not Events(attempt.paths).get("training_finished")


def test_a_command_asks_the_servers_through_one_address_and_is_done_once(stack: ExitStack, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASK, "{url}", "{model}", "{output}"]
    attempt, _ = a_run(stack, tmp_path, sets={}, command=command)
    assert ended(attempt.start("actor")) == 0
    answer = RunPaths(tmp_path).benchmark / "answer.json"
    told = json.loads(answer.read_text())
    assert told == {"asked": {"model": "policy", "messages": []}, "key": f"Bearer {attempt.world.password}"}
    answer.unlink()
    assert ended(attempt.start("actor")) == 0
    assert not answer.exists()


def test_a_command_that_fails_is_told_with_its_last_line(stack: ExitStack, tmp_path: Path) -> None:
    attempt, _ = a_run(stack, tmp_path, sets={}, command=[sys.executable, "-c", "raise SystemExit('no such task')"])
    child = attempt.start("actor")
    assert ended(child) == 1
    assert "evaluation.command exited with code 1: no such task" in child.log.read_text()
    assert not Events(attempt.paths).get("training_finished")


def test_a_command_that_does_not_end_is_ended_with_all_it_started(stack: ExitStack, tmp_path: Path) -> None:
    sleeping = "import subprocess; subprocess.run(['sleep', '4242'])"
    command = [sys.executable, "-c", sleeping]
    attempt, _ = a_run(stack, tmp_path, sets={}, command=command, command_seconds=1.0)
    child = attempt.start("actor")
    assert ended(child) == 1
    assert "evaluation.command" in child.log.read_text()
    left = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "4242"]]
    assert left == []
