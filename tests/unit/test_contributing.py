"""docs/contributing.md, "To add …": the files exist, and a change in exactly these files is usable.

A copy of the code gets a new loss, estimator, tracker, task, key and command. Then one process composes a config with
all of them, checks it, and uses each.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "contributing.md").read_text()
ROWS: dict[str, str] = dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.*?) \| .*\|$", PAGE, re.MULTILINE))
FILE = re.compile(r"`((?:pipeline|slurm|conf|launchers|tests)/[\w./<>-]+)`")

LOSS = """

@policy_loss("linear")
def linear(tokens: LossTokens, *, beta: float) -> Terms:
    return -beta * tokens.advantages_N * tokens.logprobs_N, {}
"""
ESTIMATOR = """

@advantage_estimator("group_median", "reward minus the group median")
def over_median(rewards: Rewards) -> list[float]:
    middle = statistics.median(rewards)
    return [reward - middle for reward in rewards]


def one_step(rewards, values, gamma, *, gae_lambda):
    return rewards, values


@advantage_estimator("one_step", "with a critic's values", within_group=False, of_tokens=one_step)
def first(rewards: Rewards) -> list[float]:
    return list(rewards)
"""
TRACKER = """
import json

from pipeline.tracking import tracker_protocol


class Tracker(tracker_protocol.Tracker):
    package = "json"

    def __init__(self, config, run_id, folder, mode):
        self._file = (folder / "lines.json").open("a")

    def log(self, row, number):
        print(json.dumps({"number": number, **tracker_protocol.numbers_of(row)}), file=self._file, flush=True)

    def finish(self):
        self._file.close()
"""
TASK = """
from pipeline.environments import Prompt, Task, user_prompt


class Echo(Task):
    def __len__(self):
        return 8

    def prompt(self, index):
        return user_prompt(f"Say {index}.")

    def held_out(self):
        return [user_prompt("Say nothing.")]

    def reward(self, prompt, completion):
        return 1.0
"""
KEY = """    greeting: str = Field("hello", description="The greeting of a new key.")

    @property
    def masked_finish"""
COMMAND = """
'''Greet somebody.'''

import sys
from pathlib import Path

MODULE = "greet_module"

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from entry import run

    sys.exit(run("greet"))
"""

GREET = """
def main(arguments):
    print("greetings", *arguments)
    return 0
"""

USE = """
import torch

from pipeline.algorithms.advantage_estimators import sample_advantages
from pipeline.config.cross_checks import check_config
from pipeline.errors import ConfigError
from pipeline.run.metrics_log import MetricSinks
from pipeline.run.paths import AttemptPaths
from pipeline.tracking.metric_sinks import tracking_sinks
from pipeline.train.total_loss import total
from pipeline.train.worker_spec import models_of
from pathlib import Path
from slurm.submission.compose_config import compose_config
from slurm.submission.submission_checks import check_inputs
from tests.fakes.run_directory import FakeRun
from tests.unit.train.losses_by_hand import N, tokens

chosen = ["name=new", "loss=linear", "loss.advantage_estimator=group_median", "tracking=lines", "task=echo"]
config = compose_config([*chosen, "training.greeting=hi", "training.steps=1", "training.prompts_per_step=1"])
check_config(config)
check_inputs(config)
for wrong in ("loss.ratio_cap=3", "loss.gae_lambda=0.5"):
    try:
        check_config(compose_config([*chosen, wrong]))
        raise AssertionError(f"{wrong} is not read, and was not refused")
    except ConfigError as error:
        assert "does not read it" in str(error), error
critic = compose_config([*chosen, "loss.advantage_estimator=one_step", "loss.gae_lambda=0.5", "critic.lr=0.1"])
check_config(critic)
print("models", *models_of(critic, "rl", critic.optim, 1))
print("key", config.training.greeting)
print("estimator", sample_advantages([0.0, 1.0, 5.0], config.loss.advantage_estimator))
torch.manual_seed(0)
t = tokens(advantages_N=torch.ones(N, dtype=torch.float64))
loss, _ = total(t, config.loss.model_copy(update={"tis": "none"}))
print("loss", (loss / (-0.5 * t.weights_N * t.logprobs_N).sum()).item())
run = FakeRun(Path("run"), config)
with MetricSinks(run.paths.metrics, "12-0", tracking_sinks(config, AttemptPaths(run.root, "new", "12-0"))) as sinks:
    sinks.log("train", "rl", 1, {"reward/mean": 0.25})
print("tracker", (run.paths.tracking / "lines.json").read_text().strip())
"""


class Copy:
    """A copy of the code that remembers what was changed in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.changed: dict[str, set[str]] = {}
        for name in ("pipeline", "slurm", "conf", "launchers"):
            shutil.copytree(ROOT / name, root / name)

    def add(self, row: str, file: str, text: str) -> None:
        """A new file."""
        assert not (self.root / file).exists()
        self._write(row, file, text.lstrip("\n"))

    def append(self, row: str, file: str, text: str) -> None:
        self._write(row, file, (self.root / file).read_text() + text)

    def replace(self, row: str, file: str, old: str, new: str) -> None:
        text = (self.root / file).read_text()
        assert text.count(old) == 1
        self._write(row, file, text.replace(old, new))

    def run(self, *arguments: str) -> str:
        ended = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.root,
            env={"PYTHONPATH": f"{self.root}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(self.root)},
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def _write(self, row: str, file: str, text: str) -> None:
        (self.root / file).write_text(text)
        self.changed.setdefault(row, set()).add(file)


@pytest.fixture(scope="module")
def changed_copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    copy = Copy(tmp_path_factory.mktemp("copy"))
    copy.append("a loss", "pipeline/algorithms/policy_losses.py", LOSS)
    copy.add("a loss", "conf/loss/linear.yaml", "name: linear\nbeta: 0.5\n")
    formulas = "pipeline/algorithms/advantage_estimators.py"
    copy.replace("an advantage estimator", formulas, "from math import", "import statistics\nfrom math import")
    copy.append("an advantage estimator", formulas, ESTIMATOR)
    copy.add("a tracker", "pipeline/tracking/trackers/lines.py", TRACKER)
    copy.add("a tracker", "conf/tracking/lines.yaml", "trackers: [lines]\n")
    copy.add("a task", "conf/task/echo.yaml", "name: echo_task:Echo\n")
    copy.replace("a key", "pipeline/config/training_keys.py", "    @property\n    def masked_finish", KEY)
    copy.add("a CLI command", "launchers/greet.py", COMMAND)
    # Modules of the user, wherever Python finds them.
    (copy.root / "echo_task.py").write_text(TASK)
    (copy.root / "greet_module.py").write_text(
        "def main(arguments):\n    print('greetings', *arguments)\n    return 0\n"
    )
    return copy


def test_at_least_twenty_changes_are_listed_with_their_files() -> None:
    assert len(ROWS) >= 20
    for name, touched in ROWS.items():
        files = FILE.findall(touched)
        assert files, name
        for file in files:
            known = file.partition("<")[0].rpartition("/")[0] if "<" in file else file
            assert (ROOT / known).exists(), f"{name}: {file}"


def test_each_change_touches_the_listed_files_and_no_other(changed_copy: Copy) -> None:
    for row, changed in changed_copy.changed.items():
        listed = [re.escape(file.rstrip("/")) for file in FILE.findall(ROWS[row])]
        patterns = [re.sub(r"<\w+>", r"\\w+", file) + r"(/\w+\.py)?" for file in listed]
        unlisted = [file for file in changed if not any(re.fullmatch(pattern, file) for pattern in patterns)]
        assert unlisted == [], row
    files = {row: len(changed) for row, changed in changed_copy.changed.items()}
    assert (files["a loss"], files["an advantage estimator"], files["a tracker"]) == (2, 1, 2)


def test_what_was_added_composes_and_works(changed_copy: Copy) -> None:
    results = dict(line.split(" ", 1) for line in changed_copy.run("-c", USE).splitlines() if " " in line)
    assert results["models"] == "policy critic"
    assert results["key"] == "hi"
    assert results["estimator"] == "[-1.0, 0.0, 4.0]"
    assert float(results["loss"]) == pytest.approx(1)
    assert results["tracker"] == '{"number": 0, "reward/mean": 0.25, "step": 1}'


def test_an_added_command_runs(changed_copy: Copy) -> None:
    assert changed_copy.run("launchers/greet.py", "you") == "greetings you\n"
