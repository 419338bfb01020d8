"""`resources=machine` and `experiment=grpo`: a run that fits this machine, for the user's own questions and reward."""

import json
import os
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.topology.plan import make_plan
from slurm.agent.preflight import Gpu
from slurm.submission import machine_resources
from slurm.submission.compose_config import ConfigComposer, compose_config
from slurm.submission.machine_resources import machine_size
from slurm.submission.submission_checks import check_submission

MACHINE = ("name=test", "resources=machine")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine without GPUs, of six cores."""
    monkeypatch.setattr(machine_resources, "find_gpus", lambda visible: ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    return monkeypatch


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_each_gpu_has_a_process(gpus: int, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(machine_resources, "find_gpus", lambda visible: tuple(Gpu(index=index) for index in range(gpus)))
    config = compose_config(MACHINE)
    resources = config.resources
    assert (resources.device, resources.gpus_per_node, resources.colocate) == ("cuda", gpus, gpus == 1)
    processes = resources.trainer.processes * resources.trainer.gpus
    servers = resources.inference.servers * resources.inference.gpus
    assert processes + servers == (2 if gpus == 1 else gpus)
    assert servers - processes in (0, 1)
    make_plan(config)


@pytest.mark.parametrize(("gpus", "known"), [(1, "one_gpu"), (2, "gpus"), (4, "gpus_4"), (8, "gpus_8")])
def test_the_layouts_are_those_of_the_fixed_choices(gpus: int, known: str, machine: pytest.MonkeyPatch) -> None:
    machine.setattr(machine_resources, "find_gpus", lambda visible: tuple(Gpu(index=index) for index in range(gpus)))
    fixed, sized = compose_config(["name=test", f"resources={known}"]), compose_config(MACHINE)
    assert sized.resources == fixed.resources
    assert sized.inference == fixed.inference


def test_without_a_gpu_trainer_and_server_share_the_cores(machine: pytest.MonkeyPatch) -> None:
    resources = compose_config(MACHINE).resources
    assert (resources.device, resources.trainer.threads, resources.inference.threads) == ("cpu", 3, 3)
    assert machine_size(gpus=0, cores=1).threads == 1


def test_the_gpus_that_cuda_may_see_count(machine: pytest.MonkeyPatch) -> None:
    seen = list[str | None]()
    machine.setattr(machine_resources, "find_gpus", lambda visible: seen.append(visible) or ())
    machine.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    compose_config(MACHINE)
    assert seen == ["2,3"], "measured once, since nvidia-smi may take seconds"


@pytest.mark.parametrize(("resources", "prompts"), [("gpus_8", 32), ("three_nodes", 8)])
def test_on_a_cluster_the_chosen_nodes_decide(resources: str, prompts: int, machine: pytest.MonkeyPatch) -> None:
    config = compose_config(["experiment=grpo", "cluster=slurm", f"resources={resources}"])
    assert config.training.prompts_per_step == prompts


@pytest.mark.parametrize("compose", [compose_config, ConfigComposer().compose], ids=["one", "sweep"])
def test_on_a_cluster_the_machine_of_the_command_says_nothing(compose: object) -> None:
    assert callable(compose)
    with pytest.raises(ConfigError) as refused:
        compose([*MACHINE, "cluster=slurm"])
    assert str(refused.value) == (
        "resources='machine': expected the nodes of the job with cluster=slurm; such as resources=gpus_8"
    )


def test_own_questions_and_reward_would_start(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own_rewards.py").write_text("def exact(completions, answer):\n    return [0.0 for _ in completions]\n")
    machine.syspath_prepend(tmp_path)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(300)))
    given = ["experiment=grpo", f"output={tmp_path}", "model=tiny_text", "rollout.max_tokens=32"]
    given += [f"task.options.path={questions}", "reward.functions=[own_rewards:exact]"]
    config = compose_config(given)
    check_submission(config)
    assert (config.training.prompts_per_step, config.training.checkpoint_seconds) == (8, 600)
    with pytest.raises(ConfigError, match=r"reward\.functions"):
        check_submission(compose_config([word for word in given if not word.startswith("reward")]))
    with pytest.raises(ConfigError, match=r"task\.options\.path"):
        check_submission(compose_config([word for word in given if not word.startswith("task")]))
