"""The files of a task in Harbor's format, and whether it needs a container image.

Owns the reading of `instruction.md`, `task.toml`, `environment/`, `tests/` and `solution/`. A task needs no image if
its Dockerfile starts from a plain distribution and only copies files, sets variables and the working directory.
Promises one `HarborError` with the file, the line and the reason for anything else.
"""

import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

PLAIN_IMAGES = ("alpine", "bash", "busybox", "debian", "python", "scratch", "ubuntu")
"""Images that have nothing of a task's own; commands find this machine's programs instead of theirs."""
FIXED_DIRECTORIES = ("/logs", "/tests")
SYSTEM_DIRECTORIES = (
    *("bin", "dev", "etc", "gnu", "lib", "lib32", "lib64", "nix"),
    *("opt", "proc", "sbin", "sys", "tmp", "usr", "var"),
)
MAX_BYTES = 1 << 24
"""Largest size of a task's files in bytes."""


class HarborError(ValueError):
    """A task that cannot be run, with the file and the reason."""


@dataclass(frozen=True)
class HarborFolder:
    """One task.

    Attributes:
        name: the folder's name.
        instruction: the text of the prompt.
        workdir: working directory of commands.
        files: files of the environment by absolute path.
        tests: files of `tests/` by absolute path below /tests.
        env, test_env: further variables of commands, and of the tests.
        test_seconds: time limit of the tests in `task.toml`; infinity: none.
        solution: the text of `solution/solve.sh` without its first line, empty if there is none.
    """

    name: str
    instruction: str
    workdir: str = "/app"
    files: Mapping[str, bytes] = field(default_factory=dict)
    tests: Mapping[str, bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    test_env: Mapping[str, str] = field(default_factory=dict)
    test_seconds: float = float("inf")
    solution: str = ""

    @property
    def directories(self) -> tuple[str, ...]:
        """The writable directories of the root that the task needs."""
        tops = {f"/{PurePosixPath(path).parts[1]}" for path in (self.workdir, *self.files)}
        return tuple(sorted({*tops, "/app", *FIXED_DIRECTORIES}))


def find_tasks(path: Path) -> list[Path]:
    """The folder itself if it is a task, else its subfolders that are tasks, by name."""
    if (path / "task.toml").is_file():
        return [path]
    return sorted(file.parent for file in path.glob("*/task.toml"))


def read_task(folder: Path, ignore_image: bool = False) -> HarborFolder:
    """The task in a folder; `HarborError` if it is incomplete, or needs an image and `ignore_image` is False."""
    config = _toml(folder / "task.toml")
    environment, verifier = _section(folder, config, "environment"), _section(folder, config, "verifier")
    if not ignore_image:
        _require_no_image(folder, config, environment)
    dockerfile = folder / "environment" / "Dockerfile"
    built = _Built(folder / "environment", ignore_image)
    if dockerfile.is_file():
        built.read(dockerfile)
    tests = {f"/tests{path}": content for path, content in _files(folder / "tests").items()}
    if "/tests/test.sh" not in tests:
        raise HarborError(f"{folder / 'tests' / 'test.sh'}: no such file; it writes the reward")
    solution = folder / "solution" / "solve.sh"
    return HarborFolder(
        name=folder.name,
        instruction=_text(folder / "instruction.md").strip(),
        workdir=built.workdir,
        files=built.files,
        tests=tests,
        env={**built.env, **_env(folder, environment)},
        test_env=_env(folder, verifier),
        test_seconds=_seconds(folder, verifier, "timeout_sec"),
        solution=_without_first_line(_text(solution)) if solution.is_file() else "",
    )


class _Built:
    """What a Dockerfile makes of its folder."""

    def __init__(self, folder: Path, ignore_image: bool) -> None:
        self._folder, self._ignore = folder, ignore_image
        self.workdir, self.files, self.env = "/app", dict[str, bytes](), dict[str, str]()

    def read(self, dockerfile: Path) -> None:
        """Follow the instructions; `HarborError` for one that needs an image."""
        lines = re.sub(r"^\s*#.*\n?", "", _text(dockerfile), flags=re.MULTILINE).replace("\\\n", " ").splitlines()
        for line in filter(None, map(str.strip, lines)):
            keyword, _, rest = line.partition(" ")
            if not self._follow(keyword.upper(), rest.strip()) and not self._ignore:
                raise HarborError(
                    f"{dockerfile}: needs a container image for `{line[:80]}`, and this task runs in a sandbox without "
                    "one; set task.options.ignore_image=true if this machine has all that it installs"
                )

    def _follow(self, keyword: str, rest: str) -> bool:
        """Whether an instruction needs no image; it then has its effect."""
        if keyword == "FROM":
            image = rest.removeprefix("docker.io/").removeprefix("library/")
            return re.split("[:@ ]", image)[0] in PLAIN_IMAGES and " as " not in image.lower()
        if keyword == "WORKDIR":
            self.workdir = self._absolute(rest)
        elif keyword == "COPY" and not rest.startswith(("--", "[")):
            self._copy(shlex.split(rest))
        elif keyword == "ENV":
            pairs = shlex.split(rest)
            if not all("=" in pair for pair in pairs):
                pairs = ["=".join(rest.split(None, 1))]
            self.env.update((name, value) for name, _, value in (pair.partition("=") for pair in pairs))
        else:
            return keyword in ("CMD", "LABEL", "EXPOSE", "MAINTAINER")
        return True

    def _copy(self, words: list[str]) -> None:
        *sources, target = words
        into = self._absolute(target)
        for source in sources:
            path = (self._folder / source).resolve()
            if not path.is_relative_to(self._folder.resolve()) or not path.exists():
                raise HarborError(f"{self._folder / 'Dockerfile'}: COPY {source}: no such file below its folder")
            is_folder = target.endswith("/") or len(sources) > 1 or into == self.workdir
            if path.is_dir():
                self.files |= {f"{into}{name}": content for name, content in _files(path).items()}
            else:
                self.files[f"{into}/{path.name}" if is_folder else into] = path.read_bytes()

    def _absolute(self, path: str) -> str:
        whole = PurePosixPath(self.workdir) / path
        if ".." in whole.parts or len(whole.parts) < 2 or whole.parts[1] in SYSTEM_DIRECTORIES:
            raise HarborError(
                f"{self._folder / 'Dockerfile'}: the path {path} belongs to the system, which is read-only in the "
                "sandbox; use a path such as /app"
            )
        return str(whole)


def _require_no_image(folder: Path, config: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    image = str(environment.get("docker_image", ""))
    if image and re.split("[:@]", image)[0] not in PLAIN_IMAGES:
        raise HarborError(
            f"{folder / 'task.toml'}: needs the container image {image}, and this task runs in a sandbox without one; "
            "set task.options.ignore_image=true if this machine has all that it installs"
        )
    if config.get("steps"):
        raise HarborError(f"{folder / 'task.toml'}: tasks of several steps are not supported")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).exists():
            raise HarborError(f"{folder / 'environment' / name}: needs containers, which the sandbox has not")


def _files(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by path from the folder on with a leading slash."""
    files, size = dict[str, bytes](), 0
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
            raise HarborError(f"{path}: a link that leaves the task's folder")
        if path.is_file():
            size += path.stat().st_size
            if size > MAX_BYTES:
                raise HarborError(f"{folder}: more than {MAX_BYTES >> 20} MiB of files")
            files[f"/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return files


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise HarborError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise HarborError(f"{path}: {error}") from None


def _toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise HarborError(f"{path}: {error}") from None


def _section(folder: Path, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise HarborError(f"{folder / 'task.toml'}: [{name}] is no table")
    return section


def _env(folder: Path, section: Mapping[str, Any]) -> Mapping[str, str]:
    env = section.get("env", {})
    if not isinstance(env, Mapping):
        raise HarborError(f"{folder / 'task.toml'}: env is no table")
    return {str(name): str(value) for name, value in env.items()}


def _seconds(folder: Path, section: Mapping[str, Any], name: str) -> float:
    value = section.get(name, float("inf"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise HarborError(f"{folder / 'task.toml'}: {name}={value!r} is no positive number")
    return float(value)


def _without_first_line(script: str) -> str:
    """A script without its `#!` line."""
    return script.partition("\n")[2].strip() if script.startswith("#!") else script.strip()
