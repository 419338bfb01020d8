"""The two scripts of a container, as processes: what a node and an image lack, and what the agent gets."""

import ast
import json
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from slurm.scheduler.slurm import container_entry, container_start

SIGNALS = ["SIGTERM", "SIGUSR1", "SIGUSR2"]
SHOW = """
import json, os, signal, sys
blocked = sorted(number.name for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
seen = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "pid": os.getpid(), "blocked": blocked}
print(json.dumps(seen))
"""


def start(words: list[str], *options: str, path: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-S", container_start.__file__, *options, "--", *words]
    return subprocess.run(command, env={"PATH": path, **variables}, capture_output=True, text=True, timeout=60)


def program(folder: Path, name: str, text: str) -> str:
    """A program on PATH; returns the PATH."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def shows(folder: Path, name: str) -> str:
    (folder.parent / "show.py").write_text(SHOW)
    return program(folder, name, f'exec {sys.executable} -I -S {folder.parent}/show.py "$@"')


def test_apptainer_replaces_the_start_and_gets_the_agents_signals_blocked(tmp_path: Path) -> None:
    path = shows(tmp_path / "bin", "apptainer")
    words = ["apptainer", "exec", "--bind", f"{tmp_path}:/x", "image", "python3", "entry"]
    command = [sys.executable, "-I", "-S", container_start.__file__, "--image=docker://image", "--", *words]
    with subprocess.Popen(command, env={"PATH": path}, stdout=subprocess.PIPE, text=True) as process:
        seen = json.loads(process.communicate(timeout=60)[0])
    assert seen["pid"] == process.pid
    assert seen["argv"] == words[1:]
    assert seen["blocked"] == SIGNALS


def test_the_nodes_own_temporary_folder_is_mounted_unless_it_is_below_tmp(tmp_path: Path) -> None:
    path, words = shows(tmp_path / "bin", "apptainer"), ["apptainer", "exec", "image", "python3"]
    for folder, mounted in (("/usr", ["--bind", "/usr:/usr"]), ("/tmp", []), ("/no/such", []), ("", [])):
        seen = json.loads(start(words, "--image=docker://image", path=path, TMPDIR=folder).stdout)
        assert seen["argv"] == ["exec", *mounted, "image", "python3"]
    assert container_start.with_temporary_folder(["enroot", "start", "x"], {"TMPDIR": "/usr/"}) == [
        *("enroot", "start", "--mount", "/usr:/usr:none:x-create=dir,rbind", "x")
    ]


@pytest.mark.parametrize(
    ("image", "mount", "installed", "reason"),
    [
        ("docker://x", "/usr", False, "apptainer is not on PATH; load it in cluster.setup, exclude the node"),
        ("/no/such.sif", "/usr", True, "no /no/such.sif; move the image to a file system of all nodes"),
        ("docker://x", "/no/such", True, "no /no/such, which the container mounts; mount only paths that all nodes"),
    ],
)
def test_what_a_node_lacks_is_one_line(image: str, mount: str, installed: bool, reason: str, tmp_path: Path) -> None:
    path = program(tmp_path / "bin", "apptainer" if installed else "other", "true")
    ended = start(["apptainer", "exec", "--bind", f"{mount}:/x", image, "python3"], f"--image={image}", path=path)
    assert (ended.returncode, ended.stdout) == (container_start.MISSING, "")
    assert ended.stderr.startswith("rollcall: container: node ")
    assert reason in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_users_mount_in_the_other_syntax_of_apptainer_is_left_to_apptainer(tmp_path: Path) -> None:
    path = program(tmp_path / "bin", "apptainer", "true")
    words = ["apptainer", "exec", "--mount", "type=bind,src=/usr,dst=/x", "docker://x", "python3"]
    ended = start(words, "--image=docker://x", path=path)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_cache_is_created_on_a_node_that_lacks_it_or_the_reason_is_given(tmp_path: Path) -> None:
    path, words = program(tmp_path / "bin", "apptainer", "true"), ["apptainer", "exec", "x"]
    assert start(words, "--image=x", f"--cache={tmp_path}/home/.cache", path=path).returncode == 0
    assert (tmp_path / "home" / ".cache").is_dir()
    (tmp_path / "file").touch()
    ended = start(words, "--image=x", f"--cache={tmp_path}/file/cache", path=path)
    assert f"{tmp_path}/file/cache cannot be created: Not a directory; set XDG_CACHE_HOME" in ended.stderr


ENROOT = """echo "$@" >>{calls}
case "$1" in
  create) exit {create};;
  start) exec {python} -I -S {show} "$@";;
esac"""


def enroot(tmp_path: Path, *, create: int = 0) -> tuple[str, Path]:
    (tmp_path / "show.py").write_text(SHOW)
    calls = tmp_path / "calls"
    text = ENROOT.format(calls=calls, create=create, python=sys.executable, show=tmp_path / "show.py")
    return program(tmp_path / "bin", "enroot", text), calls


def test_enroot_creates_starts_and_removes_a_container_named_by_job_and_rank(tmp_path: Path) -> None:
    path, calls = enroot(tmp_path)
    image = tmp_path / "image.sqsh"
    image.touch()
    words = ["enroot", "start", "--mount", "/usr:/usr:none:rbind", str(image), "python3", "entry"]
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "3",
        "TOKEN": "a secret",
        "LINES": "a\nb",
        "ENROOT_DATA_PATH": "/d",
    }
    ended = start(words, f"--image={image}", path=path, **variables)
    assert ended.returncode == 0, ended.stderr
    assert "enroot cannot pass LINES, whose values have several lines" in ended.stderr
    seen = json.loads(ended.stdout)
    assert seen["blocked"] == SIGNALS
    script, *rest = seen["argv"][2:]
    passed = {value for option, value in pairwise(rest) if option == "--env"}
    assert seen["argv"][:2] == ["start", "--rc"]
    assert not Path(script).exists(), "removed at the end"
    assert passed - {"LC_CTYPE"} == {"SLURM_JOB_ID", "SLURM_PROCID", "TOKEN"}, "Python sets LC_CTYPE"
    assert rest[-5:] == ["--mount", "/usr:/usr:none:rbind", "rollcall-7-3", "python3", "entry"]
    first, second, third = calls.read_text().splitlines()
    assert first == f"create --force --name rollcall-7-3 {image}"
    assert "secret" not in second
    assert third == "remove --force rollcall-7-3"


def test_an_image_of_a_registry_is_imported_once_on_each_node(tmp_path: Path) -> None:
    path, calls = enroot(tmp_path)
    ended = start(["enroot", "start", "docker://a", "python3"], "--image=docker://a", path=path, SLURM_JOB_ID="7")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    first, second, *_ = calls.read_text().splitlines()
    assert first.startswith("import --output /")
    assert first.endswith("/image.sqsh docker://a")
    assert second.split()[:4] == ["create", "--force", "--name", "rollcall-7-0"]


def test_an_image_that_enroot_refuses_is_one_line_with_its_reason(tmp_path: Path) -> None:
    path, calls = enroot(tmp_path, create=1)
    text = (tmp_path / "bin" / "enroot").read_text().replace("exit 1", "echo '[ERROR] Invalid image' >&2; exit 1")
    (tmp_path / "bin" / "enroot").write_text(text)
    ended = start(["enroot", "start", "/usr", "python3"], "--image=/usr", path=path)
    assert ended.returncode == container_start.MISSING
    assert ended.stderr.endswith(": enroot create failed: [ERROR] Invalid image\n")
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["create", "remove"]


def test_a_root_file_system_that_enroot_could_not_finish_is_removed(tmp_path: Path) -> None:
    roots = tmp_path / "roots"
    text = f"""case "$1" in
      create) mkdir -p {roots}/"$4"; echo 'Write on output file failed because No space left on device' >&2; exit 1;;
      remove) rm -r {roots}/"$3";;
    esac"""
    path = program(tmp_path / "bin", "enroot", text)
    ended = start(["enroot", "start", "/usr", "python3"], "--image=/usr", path=path)
    assert ended.returncode == container_start.MISSING
    assert ended.stderr.endswith("No space left on device\n")
    assert list(roots.iterdir()) == []


def test_the_exit_code_is_the_agents_also_after_a_signal(tmp_path: Path) -> None:
    path, _ = enroot(tmp_path)
    for end, code in (("exit 3", 3), ("kill -9 $$", 137)):
        program(tmp_path / "bin", "enroot", f'case "$1" in start) {end};; esac')
        assert start(["enroot", "start", "/usr", "python3"], "--image=/usr", path=path).returncode == code


RECEIVE = """
import signal, time
number = signal.sigwait({signal.SIGUSR2, signal.SIGTERM})
print("received", number.name, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_the_agent_in_enroot_gets_a_signal_that_only_the_task_of_slurm_gets(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "receive.py").write_text(RECEIVE)
    text = f'case "$1" in start) echo begun; exec {sys.executable} -I -S {tmp_path}/receive.py;; esac'
    path = program(tmp_path / "bin", "enroot", text)
    command = [sys.executable, "-I", "-S", container_start.__file__, "--image=/usr", "--", "enroot", "start", "/usr"]
    with subprocess.Popen(command, env={"PATH": path}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        said, _ = process.communicate(timeout=60)
    assert (said, process.returncode) == (f"received {number.name}\n", 0)


def enter(code: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", container_entry.__file__, str(code), str(code.parent), *words]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)


def test_the_agent_gets_the_runs_code_first_and_its_directory(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    seen = json.loads(enter(code, "-c", SHOW, "word", PYTHONPATH=f"/image:{code}:/more", TOKEN="t").stdout)
    assert seen["argv"] == ["word"]
    assert seen["cwd"] == str(tmp_path)
    assert seen["blocked"] == SIGNALS
    assert seen["env"]["PYTHONPATH"] == f"{code}:/image:/more"
    assert {seen["env"][name] for name in ("PYTHONSAFEPATH", "PYTHONNOUSERSITE")} == {"1"}
    assert (seen["env"]["SUBMITIT_EXECUTOR"], seen["env"]["TOKEN"]) == ("slurm", "t")


def test_an_image_without_the_runs_code_or_packages_is_one_line(tmp_path: Path) -> None:
    ended = enter(tmp_path / "code", "-c", SHOW)
    assert (ended.returncode, ended.stdout) == (2, "")
    expected = f"rollcall: container: {tmp_path}/code is not in the container; do not mount another directory over it\n"
    assert ended.stderr == expected
    paths = [str(tmp_path)]
    assert container_entry.problem_of(str(tmp_path), paths) == (
        f"{sys.executable} of the image has no cloudpickle, msgspec, psutil, pydantic, submitit, torch; install "
        "Rollcall's packages in the image, or set cluster.container.python"
    )
    assert "of the image is Python 3." in container_entry.problem_of(str(tmp_path), paths, (3, 99))


def test_the_scripts_are_written_for_pythons_that_an_image_may_have() -> None:
    ast.parse(Path(container_entry.__file__).read_text(), feature_version=(3, 8))
    assert container_entry.SIGNALS == container_start.SIGNALS == (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    assert container_entry.PREFIX == container_start.PREFIX
