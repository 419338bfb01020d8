"""docs/evaluation.md and docs/rollouts.md word by word, as far as that needs no servers; with a harness, all of it."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.config import load_config
from pipeline.config.evaluation_keys import EvalSetConfig
from pipeline.environments import load_task
from pipeline.observability.samples_command import _parser
from pipeline.rollout.eval_rollouts import eval_sets
from pipeline.rollout.sample_store import COLUMNS
from pipeline.run.paths import RunPaths
from slurm.submission.compose_config import compose_config
from slurm.submission.submission_checks import check_submission
from tests.fakes.inline_calls import InlineCalls

ROOT = Path(__file__).parents[2]
EVALUATION = (ROOT / "docs" / "evaluation.md").read_text()
ROLLOUTS = (ROOT / "docs" / "rollouts.md").read_text()
INSPECT = os.environ.get("INSPECT", "")
"""The harness's program, in an environment of its own."""


def command_with(page: str, words: str, launcher: str) -> list[str]:
    told = next(line for line in page.splitlines() if words in line and f"launchers/{launcher}" in line)
    return shlex.split(told.partition(f"launchers/{launcher}")[2], comments=True)


def test_the_sets_of_the_page_would_start_and_are_asked_as_they_say(tmp_path: Path) -> None:
    config = compose_config([*command_with(EVALUATION, "name=sets", "submit.py"), f"output={tmp_path}"])
    check_submission(config)
    task = load_task(config.task, config.seed)
    sets = eval_sets(task, InlineCalls(task), config)
    assert list(sets) == ["", "sampled", "long"]
    assert (sets["sampled"].samples, sets["sampled"].pass_at, sets["sampled"].sampling.temperature) == (
        8,
        (1, 4, 8),
        0.8,
    )
    assert sets["sampled"].prompts == sets[""].prompts
    assert (
        sets["long"].prompts[0].messages[0]["content"].count("+")
        + sets["long"].prompts[0].messages[0]["content"].count("-")
        == 2
    )


def test_the_yaml_of_the_page_is_those_sets(tmp_path: Path) -> None:
    tree = yaml.safe_load(EVALUATION.split("```yaml")[1].split("```")[0])
    base = compose_config(["experiment=demo"]).model_dump(mode="json")
    sets = load_config({**base, **tree}).evaluation.sets
    assert (sets["sampled"].pass_at, sets["long"].every) == ((1, 4, 8), 50)


def test_the_page_names_every_key_of_a_set() -> None:
    table = EVALUATION.partition("## A set")[2].partition("```yaml")[0]
    assert [name for name in EvalSetConfig.model_fields if f"`{name}`" not in table] == []


def test_every_command_that_reads_samples_is_understood() -> None:
    commands = [shlex.split(line.split("#")[0]) for line in ROLLOUTS.splitlines() if line.startswith("    python ")]
    assert len(commands) > 5
    for words in commands:
        words = words[: words.index("|")] if "|" in words else words
        _, rest = _parser().parse_known_args(words[2:])
        assert rest == ["run=demo"]


def test_the_page_of_samples_names_every_filter() -> None:
    options = {text for action in _parser()._actions for text in action.option_strings if text.startswith("--")}
    assert {option for option in options - {"--help"} if option not in ROLLOUTS} == set()
    assert "failure" in COLUMNS


@pytest.mark.trial
@pytest.mark.skipif(not INSPECT, reason="set INSPECT to the program of pip install inspect_ai openai")
def test_the_benchmark_of_the_page_is_run_against_the_servers(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shape = ROOT / "conf" / "models" / "tiny_text"  # its vocabulary has what vLLM tries out when it serves text
    base = [sys.executable, "-m", "pipeline.train.service.random_base", str(shape), str(model), "0"]
    subprocess.run(base, cwd=ROOT, check=True, timeout=300)
    (tmp_path / "sums.py").write_text(EVALUATION.split("```python")[1].split("```")[0])
    words = command_with(EVALUATION, "evaluation.command", "evaluate.py")
    words = [word.replace("harness/bin/inspect", INSPECT) for word in words]
    small = ["task.options.held_out=8", "rollout.max_tokens=8", "model.max_length=64", "resources.inference.nodes=1"]
    place = [f"model={model}", "task=arithmetic", f"output={tmp_path / 'runs'}", "name=b", *small]
    command = [
        sys.executable,
        str(ROOT / "launchers" / "evaluate.py"),
        *place,
        *(word for word in words if word != "run=demo"),
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (log,) = RunPaths(tmp_path / "runs" / "b").benchmark.glob("*.json")
    results = json.loads(log.read_text())
    assert (results["status"], results["results"]["completed_samples"]) == ("success", 24)
