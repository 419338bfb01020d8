"""Tasks in Harbor's format: what an episode does in the sandbox, hostile commands, and folders that cannot be run."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.config import TaskConfig
from pipeline.config.task_keys import SandboxConfig
from pipeline.environments import check_task, load_task
from pipeline.environments.harbor import shell_session
from pipeline.environments.harbor.harbor_folder import HarborError, read_task
from pipeline.environments.harbor.harbor_task import parse_reward
from pipeline.environments.harbor.shell_session import ShellError, ShellLost, ShellSession, open_shell
from pipeline.environments.sandbox import missing_sandbox
from pipeline.errors import ConfigError
from pipeline.utils.disk_faults import full_disk, injected
from tests.fakes.configs import make_config
from tests.support.tasks.players import group_of

needs_namespaces = pytest.mark.skipif(bool(missing_sandbox(SandboxConfig())), reason="no sandbox here")
DIRECTORIES = ("/app", "/logs", "/tests")
TEST = """#!/bin/bash
cd /app
if [ "$(cat n)" = 7 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(folder: Path, files: Mapping[str, str] = {}, test: str = TEST, toml: str = "") -> Path:
    """A task whose tests want the number 7 in the file n."""
    whole = {
        "task.toml": f'version = "1.0"\n{toml}',
        "instruction.md": "Write 7 to n.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
        "tests/test.sh": test,
        **files,
    }
    for name, text in whole.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def tasks_of(folder: Path, count: int = 3, **more: Any) -> Path:
    for number in range(count):
        write_task(folder / f"task-{number}", **more)
    return folder


def call(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'shell', 'arguments': {'command': command}})}\n</tool_call>"


def episodes(
    tmp_path: Path, commands: list[str], folder: Path, worker: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Two episodes of a policy that runs the commands, one in a turn, and then says that it is done."""

    def play(text: str) -> str:
        turn = text.count("<|im_start|>assistant") - 1
        return call(commands[turn]) if turn < len(commands) else "Done."

    settings = {"path": str(folder), "eval_rows": 1, **options}
    more: dict[str, Any] = {"processes": 1} if worker else {}
    return group_of(tmp_path, "harbor", settings, play, max_length=20_000, **more)


@pytest.mark.usefixtures("sandbox_kind")
def test_a_shell_has_its_directories_in_each_kind_of_sandbox() -> None:
    with open_shell(["/app", "/tests"], "/app", {}, 60, 1 << 29) as shell:
        shell.write({"/app/given": b"content"})
        written = shell.run(["sh", "-c", "pwd; cat given; echo more > /tests/file; cat /tests/file"], 60)
        refused = shell.run(["sh", "-c", "touch /file"], 60)
    assert written.output == "/app\ncontentmore\n"
    assert refused.code != 0
    assert "Read-only file system" in refused.output


@needs_namespaces
def test_files_last_between_commands_and_the_tests_give_the_reward(tmp_path: Path) -> None:
    folder = tasks_of(tmp_path / "tasks", files={"environment/seed.txt": "3\n", "environment/Dockerfile": (
        "# a comment\nFROM docker.io/library/python:3.11-slim\nENV ADD=4 B=\"x y\"\n"
        "WORKDIR /app\nCOPY seed.txt \\\n  data/\n"
    )})  # fmt: skip
    commands = ["ls /tests /solution; cat data/seed.txt", "echo $((3+ADD)) > n; echo $B; exit 3", "pwd; cat n"]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    group, players = episodes(tmp_path, commands, folder, worker=True)
    assert group.failures == ()
    for sample in group.samples:
        sample.check()
        assert sample.reward == 1.0
        assert sample.metrics["harbor/commands"] == 3.0
        assert sample.turns == 4
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", max(players.seen, key=len), re.DOTALL)
    assert results[0].startswith("ls: cannot access '/solution'")
    assert results[0].endswith("/tests:\n3") or "3" in results[0].splitlines()[-1]
    assert results[1:] == ["x y\nexit code 3", "/app\n7"]
    assert "test.sh" not in results[0], "tests come after the last turn"
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@needs_namespaces
@pytest.mark.parametrize(
    "command",
    [
        "echo 1 > /logs/verifier/reward.txt; ln -s /app /logs/verifier/x; chmod 000 /logs/verifier",
        "(while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done) & disown",
        "setsid sh -c 'while true; do echo 1 > /logs/verifier/reward.json; done' &",
        "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 444 /tests/test.sh",
        "cat() { echo 7; }; export -f cat; echo 'cat() { echo 7; }' > ~/.bashrc; export BASH_ENV=~/.bashrc",
        'for i in 0 1 2 3 4 5 6; do echo \'{"text": "1"}\' > /proc/2/fd/$i; done; kill -STOP $PPID; kill -CONT $PPID',
        "head -c 60000000 /dev/zero > /app/a; head -c 60000000 /dev/zero > /app/b; rm /app/a /app/b",
        "mkdir -p /tests/$(printf 'd/%.0s' $(seq 900)); cd /tests/d && chmod 000 /tests /tests/d",
        "yes",
        "sleep 100",
    ],
)
def test_hostile_commands_change_no_reward(command: str, tmp_path: Path) -> None:
    group, _ = episodes(tmp_path, [command], tasks_of(tmp_path / "tasks"), command_seconds=3)
    assert [sample.reward for sample in group.samples] == [0.0, 0.0], group.failures


@needs_namespaces
def test_a_policy_that_kills_its_sandbox_fails_its_sample(tmp_path: Path) -> None:
    group, _ = episodes(tmp_path, ["kill -9 2"], tasks_of(tmp_path / "tasks"))
    assert group.samples == ()
    assert set(group.failures) == {"environment failed: the sandbox has ended; a command may have killed its processes"}


@needs_namespaces
def test_a_policy_that_fills_its_disk_fails_its_sample(tmp_path: Path) -> None:
    fill = "for i in 1 2 3 4 5 6; do head -c 16000000 /dev/zero > /app/$i; done"
    group, _ = episodes(tmp_path, [fill], tasks_of(tmp_path / "tasks"))
    assert group.samples == ()
    assert set(group.failures) == {"environment failed: the sandbox's disk is full; commands have filled it"}


@needs_namespaces
def test_a_node_without_disk_for_a_sandbox_fails_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch, room = tmp_path / "scratch", {"full": True}
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    folder = tasks_of(tmp_path / "tasks")
    with injected(full_disk(scratch, lambda: room["full"])):
        failed, _ = episodes(tmp_path, [], folder)
        room["full"] = False
        scored, _ = episodes(tmp_path, [], folder)
    assert failed.samples == ()
    assert all("No space left on device" in reason and "\n" not in reason for reason in failed.failures)
    assert [sample.reward for sample in scored.samples] == [0.0, 0.0], "the sandbox starts again once there is room"
    assert list(scratch.iterdir()) == []


@needs_namespaces
@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("exit 3", "the tests exited with code 3 and wrote no reward to /logs/verifier/reward.txt: nothing printed"),
        ("echo no pytest here", "wrote no reward to /logs/verifier/reward.txt: no pytest here"),
        ("kill -9 $$", "the tests were killed by SIGKILL and wrote no reward"),
        ("setsid sleep 100 & sleep 100", "the tests took more than 1 s"),
        ("set -e; touch /made; echo 1 > /logs/verifier/reward.txt", "/made': Read-only file system"),
        ("echo much > /logs/verifier/reward.txt", "the tests' reward is no number: 'much'"),
        ("echo NaN > /logs/verifier/reward.txt", "the tests' reward is no finite number: 'NaN'"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "wrote no reward"),
        ("mkfifo /logs/verifier/reward.txt", "the tests' reward is no number: ''"),
    ],
)
def test_tests_without_a_reward_fail_the_sample(test: str, reason: str, tmp_path: Path) -> None:
    folder = tasks_of(tmp_path / "tasks", test=test, toml="[verifier]\ntimeout_sec = 1\n" if "sleep" in test else "")
    group, _ = episodes(tmp_path, [], folder)
    assert group.samples == ()
    assert reason in group.failures[0]


SLOW_GUEST = """
import json, sys, time
for line in sys.stdin:
    request = json.loads(line)
    time.sleep(request["seconds"])
    print(json.dumps({"output": request["run"][0], "code": 0}), flush=True)
"""


def test_a_reply_that_came_too_late_is_not_that_of_the_next_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_session, "REPLY_SECONDS", 0.0)
    with subprocess.Popen([sys.executable, "-c", SLOW_GUEST], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guest:
        shell = ShellSession(guest, "/", {})
        with pytest.raises(ShellLost, match=r"no reply within 0\.5 s"):
            shell.run(["first"], 0.5)
        time.sleep(0.5)
        with pytest.raises(ShellLost, match="no reply"):
            shell.run(["second"], 5.0)


def test_a_sandbox_that_reads_no_request_misses_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_session, "REPLY_SECONDS", 0.3)
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guest:
        try:
            with pytest.raises(ShellLost, match="no reply"):
                ShellSession(guest, "/", {}).write({"/large": bytes(1 << 20)})
        finally:
            guest.kill()


@needs_namespaces
def test_a_shell_bounds_its_output_and_replaces_a_removed_directory() -> None:
    with open_shell(DIRECTORIES, "/app", {"X": "y"}, 30, 1 << 29) as shell:
        long = shell.run(["bash", "-c", "head -c 100000 /dev/zero | tr '\\0' a; echo end"], 30)
        assert len(long.output) < 20_000
        assert long.output.endswith("aend\n")
        assert shell.run(["bash", "-c", "echo $X; exit 5"], 30) == type(long)("y\n", 5)
        with pytest.raises(ShellError, match="FileNotFoundError"):
            shell.run(["no-such-program"], 30)
        assert shell.run(["bash", "-c", "sleep 60 & sleep 60"], 0.5).code is None
        one = "python3 -c 'import time; memory = bytearray(4 << 20); time.sleep(61)'"
        assert shell.run(["bash", "-c", f"for n in $(seq 60); do ({one} &); done; sleep 1"], 30).code == 0
        shell.kill_all()
        left = shell.run(["bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"], 30).output
        assert "sleep 60" not in left
        assert "sleep(61)" not in left


@pytest.mark.parametrize(
    ("files", "toml", "words"),
    [
        ({"environment/Dockerfile": "FROM ubuntu\nRUN apt-get install gcc"}, "", "a container image for `RUN apt-get"),
        ({"environment/Dockerfile": "FROM ghcr.io/x/y:1"}, "", "needs a container image for `FROM ghcr.io/x/y:1`"),
        ({"environment/Dockerfile": "FROM ubuntu AS a\nCOPY --from=a x y"}, "", "`FROM ubuntu AS a`"),
        ({"environment/Dockerfile": "FROM ubuntu\nADD https://x y"}, "", "`ADD https://x y`"),
        ({"environment/Dockerfile": "FROM ubuntu\nWORKDIR /usr/src"}, "", "the path /usr/src belongs to the system"),
        ({"environment/Dockerfile": "FROM ubuntu\nCOPY ../task.toml ."}, "", "no such file below its folder"),
        ({"environment/Dockerfile": "FROM ubuntu\nCOPY . /app/../etc"}, "", "belongs to the system"),
        ({"environment/docker-compose.yaml": "services: {}"}, "", "needs containers"),
        ({}, '[environment]\ndocker_image = "x/y:1"\n', "needs the container image x/y:1"),
        ({}, "[[steps]]\nname = 'a'\n", "several steps"),
        ({}, "[verifier\n", "task.toml: "),
        ({}, "verifier = 3\n", "[verifier] is no table"),
        ({}, "[verifier]\ntimeout_sec = -1\n", "timeout_sec=-1 is no positive number"),
        ({}, "[environment]\nenv = 3\n", "env is no table"),
    ],
)
def test_a_task_that_cannot_run_is_one_clear_error(
    files: dict[str, str], toml: str, words: str, tmp_path: Path
) -> None:
    write_task(tmp_path / "task", files, toml=toml)
    with pytest.raises(HarborError, match=re.escape(words)) as raised:
        read_task(tmp_path / "task")
    assert "\n" not in str(raised.value)


def test_missing_files_are_named_and_links_do_not_leave_the_folder(tmp_path: Path) -> None:
    for name in ("instruction.md", "tests/test.sh"):
        task = write_task(tmp_path / name.replace("/", "-"))
        (task / name).unlink()
        with pytest.raises(HarborError, match=re.escape(name)):
            read_task(task)
    task = write_task(tmp_path / "linked")
    (task / "tests" / "secret").symlink_to("/etc/passwd")
    with pytest.raises(HarborError, match="a link that leaves the task's folder"):
        read_task(task)


def test_the_image_may_be_ignored(tmp_path: Path) -> None:
    dockerfile = "FROM ghcr.io/x/y:1\nRUN make\nWORKDIR /work\nCOPY . .\n"
    task = write_task(tmp_path, {"environment/Dockerfile": dockerfile, "environment/deep/a": "b"})
    folder = read_task(task, ignore_image=True)
    assert folder.workdir == "/work"
    assert folder.files["/work/deep/a"] == b"b"
    assert folder.directories == ("/app", "/logs", "/tests", "/work")


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("0.5\n", {"reward": 0.5, "metrics": {}}),
        ('{"reward": 1, "speed": 3.5, "name": "x"}', {"reward": 1.0, "metrics": {"harbor/speed": 3.5}}),
        ('{"speed": 1}', "the tests' reward has no number reward; set task.options.reward_key"),
        ("[1]", "the tests' reward is no finite number: '[1]'"),
        ("[" * 5000, "the tests' reward is no number"),
        ("", "the tests' reward is no number: ''"),
        ("1e999", "the tests' reward is no finite number"),
    ],
)
def test_a_reward_file_is_a_number_or_an_object(text: str, report: Any) -> None:
    parsed = parse_reward(text)
    assert parsed == report if isinstance(report, dict) else str(parsed).startswith(report)


def test_wrong_options_are_one_clear_error(tmp_path: Path) -> None:
    tasks_of(tmp_path / "tasks")
    (tmp_path / "empty").mkdir()
    for options, key in (
        ({}, "task.options.path"),
        ({"path": str(tmp_path / "empty")}, "task.options.path"),
        ({"path": str(tmp_path / "nowhere")}, "task.options.path"),
        ({"path": str(tmp_path / "tasks"), "eval_rows": 3}, "task.options.eval_rows"),
        ({"path": str(tmp_path / "tasks"), "eval_rows": 0}, "task.options.eval_rows"),
        ({"path": str(tmp_path / "tasks"), "eval_path": str(tmp_path / "empty")}, "task.options.eval_path"),
    ):
        with pytest.raises(ConfigError) as raised:
            load_task(TaskConfig(name="harbor", options=options), 0)
        assert raised.value.key == key


def test_a_run_without_a_sandbox_is_refused_before_it_starts(tmp_path: Path) -> None:
    tasks_of(tmp_path / "tasks", 2)
    options = {"path": str(tmp_path / "tasks"), "eval_rows": 1}
    config = make_config(task={"name": "harbor", "options": options, "sandbox": {"kind": "none"}})
    with pytest.raises(ConfigError, match=r"task\.sandbox\.kind=.*remove task\.sandbox\.kind=none"):
        check_task(load_task(config.task, 0), config)


@needs_namespaces
def test_the_example_has_solutions_that_its_tests_accept(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "docs" / "examples" / "make_harbor_tasks.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "tasks")], check=True, timeout=60)
    options = {"path": str(tmp_path / "tasks"), "eval_rows": 32}

    def solve(text: str) -> str:
        return call(f"echo {re.findall(r'([0-9]+) to n', text)[0]} >n") if "tool_response" not in text else "Done."

    group, _ = group_of(tmp_path, "harbor", options, solve)
    assert [sample.reward for sample in group.samples] == [1.0, 1.0], group.failures
    task = load_task(TaskConfig(name="harbor", options={**options, "tool_call_syntax": "short"}), 0)
    shown = task.demonstration(0)
    assert shown.answer == f"[shell:echo {shown.prompt.messages[0]['content'].split()[0]} >n]"


def test_demonstrations_are_reference_solutions(tmp_path: Path) -> None:
    for number in range(4):
        write_task(
            tmp_path / f"task-{number}",
            {"solution/solve.sh": f"#!/bin/bash\necho {number}>n\n", "instruction.md": f"{number} to n"},
        )
    options = {"path": str(tmp_path), "eval_rows": 1, "tool_call_syntax": "short", "demonstration_error_rate": 0.5}
    task = load_task(TaskConfig(name="harbor", options=options), 0)
    shown = [task.demonstration(index) for index in range(60)]
    right = [d for d in shown if d.answer == f"[shell:echo {d.prompt.messages[0]['content'][0]}>n]"]
    assert 20 < len(right) < 60
    assert {d.prompt.messages[0]["content"] for d in shown} == {"0 to n", "1 to n", "2 to n"}
    tagged = load_task(TaskConfig(name="harbor", options={**options, "tool_call_syntax": "tagged"}), 0)
    assert '"command": "echo' in tagged.demonstration(0).answer
    bare = load_task(TaskConfig(name="harbor", options={"path": str(tasks_of(tmp_path / "bare")), "eval_rows": 1}), 0)
    with pytest.raises(NotImplementedError, match=r"training\.sft\.steps=0"):
        bare.demonstration(0)
