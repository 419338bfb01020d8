"""`launchers/evaluate.py`: which model is meant, and the run that evaluates it."""

import json
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.checkpoints import TrainerState
from pipeline.checkpoints.block_hashes import FileRecord
from pipeline.checkpoints.checkpoint_store import complete_checkpoint
from pipeline.checkpoints.fsspec_storage import Storage
from pipeline.config import RunConfig
from pipeline.config.model_directory import BUILT_IN
from pipeline.environments import load_task
from pipeline.errors import ConfigError
from pipeline.roles.inference import server_command
from pipeline.rollout.eval_rollouts import eval_sets
from pipeline.run.paths import RunPaths
from pipeline.topology.plan import Placement, make_plan
from pipeline.train.loop.evaluations import schedules_of
from pipeline.utils import shared_files
from pipeline.utils.waiting import wait_for
from slurm.submission import evaluate_model
from slurm.submission.compose_config import compose_over
from slurm.submission.evaluate_model import compose_evaluation, main, table_of
from tests.fakes.composed_config import compose_cached
from tests.fakes.inline_calls import InlineCalls
from tests.fakes.run_directory import FakeRun
from tests.patience import WAIT_SECONDS

SETS = ("evaluation.sets.p.samples=4", "evaluation.sets.p.temperature=0.8")


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """A finished run of SFT and RL with a model, kept as a submission keeps it."""
    config = compose_cached(["experiment=demo", "name=demo", f"output={tmp_path}", *SETS])
    made = FakeRun(tmp_path / "demo", config)
    a_model(made.paths.model)
    made.finish(150)
    return made


def composed(overrides: list[str]) -> RunConfig:
    """The config of an evaluation for which nothing has to be written first."""
    config, export = compose_evaluation(overrides)
    assert export is None
    return config


def a_commit(run: FakeRun, step: int) -> None:
    state, shard = TrainerState(job="rl", step=step), {"policy": FileRecord.of(b"x")}
    storage = Storage(str(run.paths.checkpoints))
    storage.put(f"rl-{step}/a/policy", b"x")
    complete_checkpoint(storage, state, "a", shard, world_size=1)


def a_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((BUILT_IN / "tiny_qwen3" / file).read_bytes())
    (folder / "model.safetensors").touch()
    return folder


def test_a_finished_run_is_evaluated_by_its_model_as_it_was_evaluated_in_training(run: FakeRun) -> None:
    config = composed([f"run={run.root}"])
    assert (config.name, config.directory) == ("demo-eval-model", run.root.with_name("demo-eval-model"))
    assert (config.model.path, config.model.init) == (str(run.paths.model), "pretrained")
    assert (config.evaluation.only, config.evaluation.step) == (True, 150)
    assert (config.evaluation.sets, config.task) == (run.config.evaluation.sets, run.config.task)
    assert {config.has_rollouts, config.has_sft, config.serve.enabled} == {False}


def test_keys_and_groups_are_laid_over_the_runs_own(run: FakeRun) -> None:
    config = composed([f"run={run.root}", "cluster=slurm", "cluster.partition=gpu", "evaluation.sets.p.samples=8"])
    assert (config.cluster.scheduler, config.cluster.partition) == ("slurm", "gpu")
    assert (config.evaluation.sets["p"].samples, config.evaluation.sets["p"].temperature) == (8, 0.8)
    assert config.model.path == str(run.paths.model)


def test_the_same_command_makes_another_evaluation_once_the_first_is_finished(run: FakeRun) -> None:
    FakeRun(run.root.with_name("demo-eval-model")).finish(150)
    assert composed([f"run={run.root}"]).name == "demo-eval-model-2"
    assert composed([f"run={run.root}", "name=mine"]).name == "mine"


def test_a_model_directory_is_evaluated_on_a_task_that_is_named(run: FakeRun, tmp_path: Path) -> None:
    config = composed([f"model={run.paths.model}", "task=countdown", f"output={tmp_path}"])
    assert (config.name, config.task.name, config.model.path) == ("eval-model", "countdown", str(run.paths.model))


def test_resources_and_tracking_are_the_users_to_change_for_a_run_and_for_a_directory(run: FakeRun) -> None:
    for meant in ([f"run={run.root}"], [f"model={run.paths.model}", "task=countdown"]):
        config = composed([*meant, "resources.nodes=2", "tracking.trackers=wandb"])
        assert (config.resources.nodes, config.tracking.trackers) == (2, ("wandb",))
        assert composed(meant).tracking.trackers == ()


def test_a_model_of_which_only_sets_are_asked_has_no_held_out_prompts_of_its_own(run: FakeRun) -> None:
    config = composed([f"model={run.paths.model}", "evaluation.sets.sums.task.name=arithmetic"])
    assert not config.evaluation.builtin_set
    task = load_task(config.task, 0)
    assert list(eval_sets(task, InlineCalls(task), config)) == ["sums"]
    assert list(schedules_of(config)) == ["sums"]


def test_a_run_of_sft_alone_is_asked_what_is_named(tmp_path: Path) -> None:
    overrides = ["experiment=demo", "name=sft", f"output={tmp_path}", "training.steps=0"]
    tuned = FakeRun(tmp_path / "sft", compose_cached(overrides))
    a_model(tuned.paths.model)
    tuned.finish(400)
    with pytest.raises(ConfigError, match="a task as well"):
        composed([f"run={tuned.root}"])
    assert composed([f"run={tuned.root}", "task=countdown"]).evaluation.step == 400


def test_settings_of_the_steps_of_a_run_are_not_those_of_its_evaluation(tmp_path: Path) -> None:
    keys = ["training.routing_replay=rollout", "faults=kill:trainer@save", "debug.profile_steps=[2,3]"]
    overrides = ["experiment=demo", "name=mixture", f"output={tmp_path}", *keys]
    trained = FakeRun(tmp_path / "mixture", compose_cached(overrides))
    a_model(trained.paths.model)
    trained.finish(150)
    evaluated = composed([f"run={trained.root}"])
    assert (evaluated.training.routing_replay, evaluated.faults) == ("none", ())
    assert evaluated.debug.profile_steps == ()
    assert composed([f"run={trained.root}", "faults=kill:actor@9s"]).faults == ("kill:actor@9s",)


def test_its_plan_has_servers_and_an_actor_and_no_trainer(run: FakeRun) -> None:
    plan = make_plan(composed([f"run={run.root}", "resources=four_nodes"]))
    assert [seat.name for seat in plan.bundles] == ["inference.0", "inference.1 + actor.0"]
    shared = composed([f"run={run.root}", "resources=one_gpu"])
    assert [seat.name for seat in make_plan(shared).bundles] == ["inference.0 + actor.0"]


def test_its_servers_load_the_model_from_disk(run: FakeRun) -> None:
    config = composed([f"run={run.root}"])
    place = Placement(role="inference", index=0, rank=0, address="127.0.0.2", ports=(8000,))
    command = server_command(config, place)
    assert command[command.index("--model") + 1] == str(run.paths.model)
    assert command[command.index("--served-model-name") + 1] == "policy"
    assert not {"--load-format", "--weight-transfer-config"} & set(command)
    with_command = composed([f"run={run.root}", "evaluation.command=[echo]"])
    assert "--tokens-only" not in server_command(with_command, place)


def test_an_adapter_is_served_on_the_base_that_it_was_trained_on(run: FakeRun, tmp_path: Path) -> None:
    base = a_model(tmp_path / "base")
    config = compose_cached(
        ["experiment=demo", "name=lora", f"model.path={base}", "model.init=pretrained", "model.lora.rank=4"]
    )
    adapted = FakeRun(tmp_path / "lora", config)
    adapted.paths.model.mkdir()
    adapted.finish(5)
    config = composed([f"run={adapted.root}"])
    assert (config.model.path, config.model.lora.adapter) == (str(base), str(adapted.paths.model))
    place = Placement(role="inference", index=0, rank=0, address="127.0.0.2", ports=(8000,))
    command = server_command(config, place)
    assert command[command.index("--lora-modules") + 1] == f"policy={adapted.paths.model}"


def test_a_merged_adapter_is_served_as_the_whole_model_that_was_exported(run: FakeRun, tmp_path: Path) -> None:
    base, adapter = a_model(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    lora = ["model.lora.rank=4", "model.lora.merge=true", f"model.lora.adapter={adapter}"]
    config = compose_cached(["experiment=demo", "name=lora", f"model.path={base}", "model.init=pretrained", *lora])
    merged = FakeRun(tmp_path / "lora", config)
    merged.paths.model.mkdir()
    merged.finish(5)
    config = composed([f"run={merged.root}"])
    command = server_command(config, Placement(role="inference", index=0, rank=0, address="127.0.0.2", ports=(8000,)))
    assert command[command.index("--model") + 1] == str(merged.paths.model)
    assert "--enable-lora" not in command


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "run=None: expected a run or a model directory to evaluate"),
        (["run={run}", "model={run}/model"], "expected a run or a model directory to evaluate"),
        (
            ["run={run}", "checkpoint=rl-7"],
            "checkpoint='rl-7': expected a checkpoint of the run; demo has no commit rl-7",
        ),
        (["run={run}", "checkpoint=best"], "checkpoint='best': expected a run that has one"),
        (["run=a", "run=b"], "run='b': expected one value; run=a is set too"),
        (["run=nobody"], "run='nobody': expected a run directory"),
        (["model={run}", "task=countdown"], "expected a model; this directory is a run; evaluate the run: run="),
        (["model={run}/jobs", "task=countdown"], "expected a directory with a Hugging Face model"),
        (["model={run}/model"], "expected a task as well, whose prompts the model gets; name it: task=countdown"),
        (["model={run}/model", "checkpoint=latest", "task=countdown"], "expected no checkpoint= together with model=…"),
        (["run={run}", "experiment=countdown"], "experiment='countdown': expected a group without a defaults list"),
        (["run={run}", "evaluation.sets.p.smaples=3"], "did you mean evaluation.sets.<name>.samples?"),
        (["run={run}", "evaluation.only=false", "training.steps=4", "--dry-run"], ""),
    ],
)
def test_what_cannot_be_evaluated_is_one_line_and_nothing_is_started(
    run: FakeRun, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    before = set(run.root.parent.iterdir())
    code = main([argument.format(run=run.root) for argument in arguments])
    shown = capsys.readouterr()
    if told:
        assert (code, shown.err.count("\n")) == (2, 1)
        assert told in shown.err
    else:
        assert (code, "evaluation of" in shown.out) == (0, True), "what makes it an evaluation is not to be undone"
    assert set(run.root.parent.iterdir()) == before


def test_a_commit_that_was_pruned_is_evaluated_by_the_model_that_was_written_of_it(run: FakeRun) -> None:
    a_commit(run, 50)
    config, export = compose_evaluation([f"run={run.root}", "checkpoint=rl-50"])
    assert export is not None
    a_model(export.target)
    shutil.rmtree(run.paths.checkpoints)
    assert composed([f"run={run.root}", "checkpoint=rl-50"]) == config
    assert (config.evaluation.step, config.model.path) == (50, str(run.paths.exports / "rl-50"))


@pytest.mark.parametrize("option", ["--dry-run", "--cfg"])
def test_who_only_looks_writes_no_model(run: FakeRun, capsys: pytest.CaptureFixture[str], option: str) -> None:
    a_commit(run, 50)
    assert main([f"run={run.root}", "checkpoint=latest", option]) == 0
    shown = capsys.readouterr().out
    assert str(run.paths.exports / "rl-50") in shown
    assert not run.paths.exports.exists()


def test_an_interrupted_writing_of_a_model_leaves_nothing_of_it(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    a_commit(run, 50)
    slow = ("import os, sys, time; from pathlib import Path; from pipeline.utils import atomic_dirs as folders\n"
            "folders.unfinished(Path(sys.argv[1]), str(os.getpid())).mkdir(); time.sleep(600)")  # fmt: skip
    monkeypatch.setattr(
        evaluate_model, "export_command", lambda _run, _name, target: [sys.executable, "-c", slow, str(target)]
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run in the background
    interrupt = threading.Thread(target=_interrupt_when, args=(lambda: list(run.paths.exports.glob(".rl-50.part-*")),))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        main([f"run={run.root}", "checkpoint=rl-50"])
    interrupt.join()
    assert list(run.paths.exports.iterdir()) == []


def _interrupt_when(seen: Callable[[], object]) -> None:
    wait_for("what is interrupted", lambda: bool(seen()), WAIT_SECONDS)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_an_adapter_alone_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="evaluate the run that trained it"):
        composed([f"model={tmp_path}", "task=countdown"])


def test_a_command_is_refused_in_a_run_that_trains(tmp_path: Path) -> None:
    from pipeline.config.cross_checks import check_run

    with pytest.raises(ConfigError, match=r"evaluation\.command='echo': expected nothing in a run that trains"):
        check_run(compose_cached(["experiment=demo", "evaluation.command=[echo]"]))


def test_overrides_upon_a_tree_keep_what_they_do_not_name() -> None:
    tree = compose_cached(["experiment=demo", "task.options.held_out=7"]).model_dump(mode="json")
    laid = compose_over(tree, ["loss=gspo", "optim.lr=0.5", "resources=one_gpu", "task.options.more={a: [1, 'x y']}"])
    assert (laid["loss"]["name"], laid["optim"]["lr"]) == ("gspo", 0.5)
    assert (laid["resources"]["device"], laid["inference"]["gpu_memory"]) == ("cuda", 0.4)
    assert laid["task"]["options"] == tree["task"]["options"] | {"more": {"a": [1, "x y"]}}


def test_the_table_has_a_line_for_each_set_and_a_column_for_each_k() -> None:
    numbers: dict[str, dict[str, Any]] = {
        "held_out": {"accuracy": 0.5, "stderr": 0.1, "prompts": 32.0, "failed": 0.0, "seconds": 1.25},
        "hard": {"accuracy": 0.25, "prompts": 8.0, "samples": 16.0, "pass@16": 0.75, "pass@8": None, "failed": 3.0},
        "down": {"prompts": 8.0, "samples": 1.0, "failed": 8.0, "timed_out": 8.0},
    }
    console = Console(width=120, record=True, file=StringIO())
    console.print(table_of(numbers))
    head, *lines = (line.split() for line in console.export_text().splitlines())
    assert head == ["set", "prompts", "samples", "accuracy", "pass@8", "pass@16", "failed", "seconds"]
    assert lines[0] == ["held_out", "32", "1", "0.5000", "±", "0.1000", "—", "—", "0", "1.2"]
    assert lines[1] == ["hard", "8", "16", "0.2500", "—", "0.7500", "3", "0.0"]
    assert lines[2] == ["down", "8", "1", "—", "—", "—", "8", "0.0"]


def test_what_was_found_is_printed_from_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from slurm.submission.evaluate_model import show

    found = RunPaths(tmp_path).evaluation
    shared_files.write_atomic(
        found, json.dumps({"model": "m", "step": 5, "sets": {"hard": {"accuracy": 0.25}}}).encode()
    )
    show(found)
    assert "0.2500" in capsys.readouterr().out
