"""The experiments of the tiny model to their ends: what is learned shows on held-out prompts. Minutes each."""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from pipeline.config import TaskConfig
from pipeline.environments import Prompt, load_task
from pipeline.inference.engine_protocol import POLICY
from pipeline.rollout.issue_loop import START_GROUPS
from pipeline.run.metrics_log import read_rows, series
from tests.bench import bench_replay
from tests.fakes.configs import make_config
from tests.support.runs.launched import ROOT
from tests.support.servers.vllm import SECRET, starting_of

ENVIRONMENTS = ROOT / "tests" / "support" / "tasks" / "vf_environments"
VERIFIERS = os.environ.get("VERIFIERS_PYTHON", "")
OPENENV = os.environ.get("OPENENV_PYTHON", "")

pytestmark = [pytest.mark.integration, pytest.mark.trial, pytest.mark.timeout(3600)]


def learned(
    tmp_path: Path, experiment: str, name: str = "eval/accuracy", words: Sequence[str] = (), folder: Path | None = None
) -> tuple[float, float]:
    """A number of the first held-out evaluation and of the last one; modules are found in `folder` too."""
    path = os.pathsep.join(filter(None, (str(folder or ""), os.environ.get("PYTHONPATH", ""))))
    argv = [sys.executable, "launchers/submit.py", f"experiment={experiment}", f"output={tmp_path}", *words]
    subprocess.run(argv, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=3600)
    values = [value for _, value in series(read_rows(tmp_path / experiment / "metrics.jsonl"), name)]
    return values[0], values[-1]


@pytest.mark.parametrize("experiment", ["countdown", "mix", "reasoning_gym"])
def test_held_out_accuracy_rises(experiment: str, tmp_path: Path) -> None:
    first, last = learned(tmp_path, experiment)
    assert last > first + 0.05


@pytest.mark.parametrize("experiment", ["gymnasium", "textarena"])
def test_games_are_played_better(experiment: str, tmp_path: Path) -> None:
    pytest.importorskip(experiment, reason=f"pip install -e '.[{experiment}]'")
    first, last = learned(tmp_path, experiment)
    assert first < 0.8 < 0.9 < last


@pytest.mark.skipif(not OPENENV, reason="set OPENENV_PYTHON to the python of a venv with openenv")
def test_a_server_of_openenv_is_played_better(tmp_path: Path) -> None:
    command = f'task.options.command=[{OPENENV},docs/examples/openenv_guess.py,"{{port}}"]'
    first, last = learned(tmp_path, "openenv", words=[command])
    assert first < 0.6 < 0.9 < last


def test_tasks_of_harbor_are_solved(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    subprocess.run([sys.executable, "docs/examples/make_harbor_tasks.py", str(tasks)], cwd=ROOT, check=True, timeout=60)
    first, last = learned(tmp_path, "harbor", words=[f"task.options.path={tasks}"])
    assert first < 0.5 < 0.8 < last


def test_a_calculator_is_called_more_often_as_it_pays(tmp_path: Path) -> None:
    first, last = learned(tmp_path, "tools", "eval/tools/calculator")
    assert last > first
    accuracies = [value for _, value in series(read_rows(tmp_path / "tools" / "metrics.jsonl"), "eval/accuracy")]
    assert accuracies[-1] > accuracies[0] + 0.05


SUMS = [
    "model=tiny_text",
    "model.max_length=64",
    "training.steps=60",
    "training.eval_every=20",
    "training.checkpoint_every=60",
    "training.max_lag=2",
    "training.sft.steps=400",
    "training.sft.batch=128",
    "training.sft.lr=1.5e-3",
    "rollout.max_tokens=8",
    "rollout.concurrency=64",
    "optim.lr=1e-4",
]


LOG = "service.log"
AGENT = ["-m", "tests.support.tasks.protocol_agents"]


@pytest.mark.parametrize(
    "service",
    [
        ["docs/examples/agent_service.py"],
        [*AGENT, "messages"],
        [*AGENT, "responses"],
    ],
    ids=["page", "messages", "responses"],
)
def test_an_agent_learns(service: Sequence[str], tmp_path: Path) -> None:
    """The service of docs/agents.md, or one over another protocol, on sums of a teacher who forgets to carry."""
    of = "task.options.of={name: arithmetic, options: {last_digit_first: true, demonstration_error_rate: 0.6}}"
    with serving(tmp_path, *service) as address:
        first, last = learned(tmp_path, "agent", words=[*SUMS, *address, of])
        assert last > first + 0.05, (tmp_path / LOG).read_text()[-4000:]


@contextmanager
def serving(tmp_path: Path, *service: str) -> Iterator[list[str]]:
    """The keys of an agent's service that runs meanwhile, and whose output is in `LOG`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (tmp_path / LOG).open("wb") as output:
        process = subprocess.Popen([sys.executable, *service, str(port)], cwd=ROOT, stdout=output, stderr=output)
    try:
        yield ["task.options.command=[]", f"task.options.service=http://127.0.0.1:{port}"]
    finally:
        process.terminate()
        process.wait(60)


def test_an_agent_of_several_turns_learns_while_the_groups_in_flight_follow_the_load(tmp_path: Path) -> None:
    example = "docs/examples/guess_agent.py"
    subprocess.run([sys.executable, example, "data", str(tmp_path / "guess")], cwd=ROOT, check=True, timeout=60)
    words = [
        *("rollout.concurrency=64", "rollout.adaptive_concurrency=true"),
        f"task.options.of.options.path={tmp_path}/guess/games.jsonl",
        f"data.path={tmp_path}/guess/random-play.jsonl",
    ]
    with serving(tmp_path, example, "serve") as address:
        first, last = learned(tmp_path, "agent_guess", words=[*words, *address])
        assert first < 0.6 < 0.9 < last, (tmp_path / LOG).read_text()[-4000:]
    rows = read_rows(tmp_path / "agent_guess" / "metrics.jsonl")
    limits, in_flight = (dict(series(rows, f"concurrency/{name}")) for name in ("limit", "in_flight"))
    assert START_GROUPS < limits[max(limits)] <= 64, "its conversations are shorter than a block"
    # After a cut more groups are in flight, until some end.
    highest = accumulate((limits[step] for step in sorted(limits)), max)
    assert all(in_flight[step] <= limit for step, limit in zip(sorted(limits), highest, strict=True))


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def talk(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def sft_model(tmp_path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """The key that has these conversations imitated first."""
    return f"data.path={write_rows(tmp_path / 'conversations.jsonl', rows)}"


@pytest.mark.skipif(not VERIFIERS, reason="set VERIFIERS_PYTHON to the python of a venv with verifiers")
def test_an_environment_of_verifiers_is_learned(tmp_path: Path) -> None:
    """The sums of that teacher, asked and scored by an environment of the library in a process of its own."""
    sums = load_task(
        TaskConfig(
            name="arithmetic", options={"last_digit_first": True, "demonstration_error_rate": 0.6, "held_out": 192}
        ),
        0,
    )

    def row(prompt: Prompt) -> dict[str, Any]:
        return {"question": prompt.messages[0]["content"], "answer": prompt.answer}

    asked = [*map(row, map(sums.prompt, range(2000))), *map(row, sums.held_out())]
    shown = map(sums.demonstration, range(8000))
    words = [
        sft_model(tmp_path, (talk(str(each.prompt.messages[0]["content"]), each.answer) for each in shown)),
        "task.options.id=vf-questions",
        f"task.options.python={VERIFIERS}",
        f"task.options.taskset.path={write_rows(tmp_path / 'questions.jsonl', asked)}",
        "task.options.eval_rows=192",
    ]
    first, last = learned(tmp_path, "verifiers", words=[*SUMS, *words], folder=ENVIRONMENTS)
    assert last > first + 0.05


@pytest.mark.skipif(not VERIFIERS, reason="set VERIFIERS_PYTHON to the python of a venv with verifiers")
def test_a_game_of_verifiers_is_played_better(tmp_path: Path) -> None:
    """The environment of docs/agents.md: several turns, and SFT on random play."""
    examples, talks = ROOT / "docs" / "examples", tmp_path / "random-play.jsonl"
    subprocess.run([VERIFIERS, str(examples / "vf_guess.py"), str(talks)], check=True, timeout=120)
    words = [f"task.options.python={VERIFIERS}", f"data.path={talks}"]
    first, last = learned(tmp_path, "verifiers_guess", words=words, folder=examples)
    assert first < 0.6 < 0.9 < last


RIGHT = {"plus": "lambda x:x+{n}", "minus": "lambda x:x-{n}", "times": "lambda x:x*{n}"}
WRONG = {"plus": "lambda x:x*{n}", "minus": "lambda x:{n}-x", "times": "lambda x:x+{n}"}
SLIPS = 0.6


def test_programs_that_pass_their_tests_are_learned_from_files(tmp_path: Path) -> None:
    """SFT, then RL, from JSONL: a teacher who mistakes operators, and tests that are run in the sandbox."""
    draw = random.Random(0)
    asked = [(word, number) for word in RIGHT for number in range(2, 100)]
    draw.shuffle(asked)
    held_out = 64

    def shown() -> dict[str, Any]:
        word, number = draw.choice(asked[:-held_out])
        form = (WRONG if draw.random() < SLIPS else RIGHT)[word]
        return talk(f"x {word} {number}", f"f={form.format(n=number)}")

    def tested(word: str, number: int) -> dict[str, Any]:
        value = eval(RIGHT[word].format(n=number))
        return {"prompt": f"x {word} {number}", "tests": f"assert [f(x) for x in (3, 7)] == {[value(3), value(7)]}"}

    words = [
        sft_model(tmp_path, (shown() for _ in range(4000))),
        f"task.options.path={write_rows(tmp_path / 'tests.jsonl', [tested(*each) for each in asked])}",
        f"task.options.eval_rows={held_out}",
        "task.options.system=''",
        "training.steps=40",
        "training.prompts_per_step=16",
        "rollout.max_tokens=24",
    ]
    first, last = learned(tmp_path, "code", words=[*SUMS, *words])
    assert last > first + 0.05


@pytest.mark.parametrize("likely", [[], ["teacher.top_k=16", "loss.kl_in=loss"]], ids=["sampled", "likeliest"])
def test_a_policy_comes_closer_to_the_teacher_who_is_served(likely: list[str], tmp_path: Path) -> None:
    """A teacher who carries, and a policy that learned from one who forgets to; nobody pays the samples. The sampled
    tokens are compared, or the teacher's likeliest ones too."""
    start = [word for word in SUMS if not word.startswith("training.steps")]
    words = [
        "model.init=random",
        "training.steps=0",
        "task.options.demonstration_error_rate=0",
        "name=teacher",
        f"output={tmp_path}",
    ]
    argv = [sys.executable, "launchers/submit.py", "experiment=demo", *start, *words]
    subprocess.run(argv, cwd=ROOT, check=True, timeout=1200)
    served = make_config(
        model={"path": str(tmp_path / "teacher" / "model"), "max_length": 64},
        training={"steps": 0, "prompts_per_step": 1},
        evaluation={"only": True, "command": ["true"]},
    )
    (tmp_path / "key").write_text(SECRET)
    with starting_of(served, "127.0.0.1") as ready:
        teacher = {"url": f"http://{ready().endpoint}/v1", "model": POLICY, "key_file": tmp_path / "key"}
        words = [
            *(f"teacher.{key}={value}" for key, value in teacher.items()),
            "task=arithmetic",
            "+task.options={last_digit_first: true, demonstration_error_rate: 0.6}",
            "evaluation.builtin_set=false",
            "+evaluation.sets.sums={task: {name: arithmetic, options: {last_digit_first: true}}}",
        ]
        first, last = learned(tmp_path, "distillation", "eval/sums/accuracy", [*SUMS, *words, *likely])
    assert last > first + 0.05
    far = [value for _, value in series(read_rows(tmp_path / "distillation" / "metrics.jsonl"), "reference_kl")]
    assert fmean(far[-5:]) < fmean(far[:5]) / 2


def test_a_mixture_that_replays_experts_is_at_least_twice_as_near_to_its_servers() -> None:
    assert bench_replay.main(["optim.lr=1e-5"]) == 0
