"""What is said before a start of things beside the config: templates, programs, services, cores."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.dtype_checks import check_dtype
from pipeline.errors import ConfigError
from slurm.submission import submission_checks, submit_run
from slurm.submission.submission_warnings import (
    _idle_curriculum,
    _tiny_settings,
    _unread_preference,
    _unstable_dtype,
    check_agents,
    warnings_of,
)
from tests.fakes.chat_models import CHATML, make_chat_model
from tests.fakes.composed_config import compose_cached
from tests.fakes.configs import make_config
from tests.fakes.http_server import HttpServer, Request

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
DEAF = CHATML.replace("if tools", "if no_tools")
JUDGED: dict[str, Any] = {"functions": ("pipeline.environments.llm_judge:judge",)}


class Models(HttpServer):
    """Lists one model, for who has the key."""

    def respond(self, request: Request) -> tuple[int, bytes]:
        if request.headers.get("Authorization") != "Bearer sesame":
            return 401, b"{}"
        return 200, json.dumps({"data": [{"id": "qwen"}]}).encode()


def rows_with_tools(tmp_path: Path, template: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages, "tools": TOOLS}) + "\n")
    return {
        "model": {"path": str(make_chat_model(tmp_path / "model", template)), "init": "random", "max_length": 256},
        "data": {"path": str(tmp_path / "rows.jsonl")},
        "training": {"steps": 0, "prompts_per_step": 1, "sft": {"epochs": 1}},
    }


def test_a_template_that_ignores_the_tools_of_a_dataset_is_warned_of(tmp_path: Path) -> None:
    (said,) = warnings_of(make_config(**rows_with_tools(tmp_path, DEAF)))
    assert "ignores `tools`, which row 0 of data.path has" in said
    assert warnings_of(make_config(**rows_with_tools(tmp_path, CHATML))) == []


def test_a_template_that_ignores_the_tools_of_a_task_is_warned_of(tmp_path: Path) -> None:
    for template, warned in ((DEAF, True), (CHATML, False)):
        model = {"path": str(make_chat_model(tmp_path / "model", template)), "init": "random"}
        said = warnings_of(make_config(model=model, task={"name": "tools", "options": {"tools": ["calculator"]}}))
        assert ["ignores `tools`, which task.name=tools has" in line for line in said] == [True] * warned


def test_a_vision_tower_without_torchvision_is_warned_of_where_servers_have_to_load_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    sft = make_config(**rows_with_tools(tmp_path, CHATML))
    rl = make_config(model={"path": sft.model.path, "init": "random"})
    assert warnings_of(rl) == []
    file = Path(sft.model.path) / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "vision_config": {"depth": 1}, "text_config": settings}))
    (said,) = warnings_of(rl)
    assert said.startswith(f"{sft.model.path} has a vision tower, and torchvision is not installed here")
    assert warnings_of(sft) == [], "it has no servers"
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision")
    assert warnings_of(rl) == []


def a_model_of_the_users(folder: Path) -> Path:
    """With weights in bfloat16, for up to 4096 positions."""
    model = make_chat_model(folder, CHATML)
    settings = json.loads((model / "config.json").read_text())
    own = {"torch_dtype": "bfloat16", "max_position_embeddings": 4096}
    (model / "config.json").write_text(json.dumps({**settings, **own, "dtype": "bfloat16"}))
    (model / "model.safetensors").touch()
    return model


def test_a_model_of_the_users_is_not_trained_with_the_tiny_models_length_and_dtype_without_a_word(
    tmp_path: Path,
) -> None:
    asked = ["experiment=sft", "data.path=rows.jsonl", f"model.path={a_model_of_the_users(tmp_path)}"]
    (said,) = _tiny_settings(compose_cached(asked))
    assert said == (
        "model.max_length=64 and model.dtype=float32 come from the default model=tiny_qwen3, not from "
        f"{tmp_path} (4096 positions and dtype bfloat16): set model.max_length to the longest sample in tokens and "
        "model.dtype=bfloat16"
    )
    for named in (["model.max_length=512"], ["model.dtype=bfloat16"]):
        assert [*_tiny_settings(compose_cached([*asked, *named]))] == []
    assert [*_tiny_settings(compose_cached(["experiment=demo"]))] == []


@pytest.mark.parametrize(
    ("family", "refused"),
    [
        *((family, True) for family in ("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4", "gpt_oss")),
        *((family, False) for family in ("qwen3", "llama", "glm4_moe", "gemma")),
    ],
)
def test_float16_is_refused_for_families_whose_activations_overflow(family: str, refused: bool, tmp_path: Path) -> None:
    path = a_model_of_the_users(tmp_path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, "text_config": {**settings, "model_type": family}}))
    asked = ["experiment=sft", "data.path=rows.jsonl", f"model.path={path}"]
    check_dtype(compose_cached([*asked, "model.dtype=bfloat16"]).model)
    half = compose_cached([*asked, "model.dtype=float16"])
    if not refused:
        check_dtype(half.model)
        return
    with pytest.raises(ConfigError) as caught:
        submission_checks.check_submission(half)
    assert str(caught.value) == (
        f"model.dtype='float16': expected bfloat16 or float32 for {family}, whose activations exceed the range of "
        "float16; set model.dtype=bfloat16"
    )


def test_a_base_of_clients_is_refused_in_float16_by_its_own_name(tmp_path: Path) -> None:
    path = a_model_of_the_users(tmp_path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, "model_type": "gemma3_text"}))
    base = {"model": {"path": "tiny_text", "init": "random", "dtype": "float16"}, "serve": {"bases": {"g": str(path)}}}
    with pytest.raises(ConfigError, match=r"^serve\.bases\.g='.*': expected bfloat16 or float32 for gemma3_text"):
        submission_checks._check_dtypes(make_config(**base))


@pytest.mark.parametrize(
    ("family", "dtype", "warned"),
    [
        ("qwen3_5_text", "float16", True),
        ("qwen3_next", "float16", True),
        ("qwen3_5_text", "bfloat16", False),
        ("qwen3", "float16", False),
    ],
)
def test_a_family_whose_float16_gradients_were_not_finite_is_warned_of(
    family: str, dtype: str, warned: bool, tmp_path: Path
) -> None:
    path = a_model_of_the_users(tmp_path)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, "model_type": family}))
    config = compose_cached(["experiment=sft", "data.path=rows.jsonl", f"model.path={path}", f"model.dtype={dtype}"])
    said = [*_unstable_dtype(config)]
    assert len(said) == warned
    assert all(line.startswith(f"gradients of {family} were seen to be not finite in float16") for line in said)


def test_a_length_beyond_the_models_positions_is_refused_at_submission(tmp_path: Path) -> None:
    model = a_model_of_the_users(tmp_path)
    config = compose_cached(["experiment=sft", "data.path=rows.jsonl", f"model.path={model}", "model.max_length=4097"])
    with pytest.raises(ConfigError, match=r"model.max_length=4097: expected at most 4096, .*set model.max_length=4096"):
        submission_checks.check_submission(config)


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        (["no-such-program"], "there is no program 'no-such-program' in PATH"),
        (["/no/such/agent", "{prompt}"], "'/no/such/agent' is not a program"),
        ([sys.executable, "no_such_agent.py"], "there is no file 'no_such_agent.py'"),
    ],
)
def test_an_agent_that_is_not_there_is_refused_here_and_warned_of_elsewhere(command: list[str], fault: str) -> None:
    task = {"name": "agent", "options": {"command": command, "of": {"name": "arithmetic"}}}
    with pytest.raises(ConfigError) as caught:
        check_agents(make_config(task=task))
    assert str(caught.value).startswith("task.options.command=")
    assert fault in str(caught.value)
    elsewhere = make_config(model={"path": "tiny_text", "init": "random"}, cluster={"scheduler": "slurm"}, task=task)
    check_agents(elsewhere)
    (said,) = warnings_of(elsewhere)
    assert said == f"task.options.command: {fault}: each sample fails if the nodes of the job lack it too"


def test_an_agent_that_is_there_is_not_spoken_of() -> None:
    for command in ([sys.executable, "docs/examples/agent.py"], [sys.executable, "-m", "agent"], ["cat", "{prompt}"]):
        check_agents(make_config(task={"name": "agent", "options": {"command": command}}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "qwen", "key": "sesame"}, ""),
        ({"model": "gwen", "key": "sesame"}, "has no model 'gwen', but qwen"),
        ({"model": "qwen", "key": "other"}, "refuses the key (status 401)"),
        ({"model": "qwen", "url": "http://127.0.0.1:9/v1", "key": "sesame"}, "no answer from http://127.0.0.1:9/v1"),
        ({"model": "qwen", "url": "127.0.0.1", "key": "sesame"}, "it is not a URL"),
        ({"model": "qwen"}, "there is no key_file"),
    ],
)
def test_a_judge_that_is_not_there_is_warned_of(options: dict[str, str], said: str, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    if key := options.pop("key", ""):
        key_file.write_text(key)
    with Models() as server:
        judge = {"url": f"http://{server.endpoint}/v1", "key_file": str(key_file), **options}
        reward = JUDGED | {"options": {"judge": judge}}
        found = warnings_of(make_config(model={"path": "tiny_qwen3", "init": "random"}, reward=reward))
    assert [said in line and line.startswith("reward.options.judge: ") for line in found] == [True] * bool(said)


def test_more_processes_than_cores_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cores = len(os.sched_getaffinity(0))
    model = {"path": "tiny_qwen3", "init": "random"}
    is_near_budget = make_config(
        model=model, resources={"trainer": {"processes": 4 * cores}}, task={"name": "arithmetic"}
    )
    (said,) = warnings_of(is_near_budget)
    assert said.startswith(f"this machine has {cores} cores for {4 * cores + 1} threads of trainers and servers")
    workers = make_config(model=model, task={"name": "arithmetic", "processes": 9 * cores})
    (said,) = warnings_of(workers)
    assert said.startswith(f"this machine has {cores} cores for {9 * cores} processes of the task")
    asked = ["experiment=demo", f"output={tmp_path}", f"task.processes={9 * cores}", "--dry-run"]
    assert submit_run.main(asked) == 0
    assert f"warning: {said}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "is_warned"),
    [(2400, True), (2399, False)],  # 4800 groups; a prompt that was tried twice comes a third time
)
def test_a_curriculum_whose_prompts_never_come_again_is_warned_of(size: int, is_warned: bool) -> None:
    keys = ["experiment=demo", f"task.options.size={size}"]
    said = [*_idle_curriculum(compose_cached([*keys, "rollout.curriculum.weight=0.2"]))]
    assert ["has no effect" in line and "at most 2 epochs" in line for line in said] == [True] * is_warned
    assert [*_idle_curriculum(compose_cached(keys))] == []


@pytest.mark.parametrize(("size", "is_warned"), [(800, True), (799, False)])
def test_the_smallest_task_of_a_mix_counts_by_its_share(size: int, is_warned: bool) -> None:
    keys = [f"task.tasks.0.options.size={size}", "rollout.curriculum.weight=0.2"]  # half of 3200 groups
    assert bool([*_idle_curriculum(compose_cached(["experiment=mix", *keys]))]) == is_warned


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ["experiment=demo", "preference.loss=simpo"],
            ["preference.loss=simpo has no effect without preference train"],
        ),
        (["experiment=dpo", "data.path=x", "preference.loss=simpo"], []),
        (["experiment=demo"], []),
    ],
)
def test_changed_keys_of_preference_training_that_nothing_reads_are_warned_of(keys: list[str], said: list[str]) -> None:
    lines = [*_unread_preference(compose_cached(keys))]
    assert [line[: len(text)] for line, text in zip(lines, said, strict=True)] == said
