"""The keys of a job's containers, `cluster.container.*`, and the syntax of a mount."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.config.value_types import Section, Texts
from pipeline.errors import ConfigError

KEY = "cluster.container"
MODES = {"": "rw", "rw": "rw", "ro": "ro"}
"""The last word of a mount, and the access that it gives."""
_FORBIDDEN = (",", ":", " ", "\t", "\n")
"""Characters that separate mounts, or the fields of a mount, for at least one of the runtimes."""


class ContainerConfig(Section):
    """The container in which every rank runs, with all of its roles."""

    kind: Literal["none", "apptainer", "enroot", "pyxis"] = Field(
        "none",
        description="Runtime of the containers: `apptainer` or `enroot` on the nodes, or the plugin `pyxis` of Slurm; "
        "`none`: the ranks run in the environment of the launcher.",
    )
    image: str = Field(
        "",
        description="Image: a file (`.sif` for apptainer, `.sqsh` for enroot and pyxis) on a file system of all nodes, "
        "a directory (apptainer), or an address of a registry in the runtime's syntax.",
    )
    mounts: Texts = Field(
        (),
        description="Additional paths of the nodes in the container, as `SOURCE`, `SOURCE:TARGET` or "
        "`SOURCE:TARGET:ro`. The run directory, the working directory, caches, and paths that other keys name are "
        "mounted without it.",
    )
    python: str = Field("python3", description="Python of the image, with Rollcall's packages: a name or a path.")
    args: Texts = Field(
        (),
        description="Additional options of `apptainer exec` or `enroot start`, such as `[--rocm]`; with pyxis, those "
        "of its plugin.",
    )

    @property
    def is_used(self) -> bool:
        """Whether the ranks run in containers, and so with the packages of the image, not with the launcher's."""
        return self.kind != "none"


@dataclass(frozen=True)
class Mount:
    """A path of a node that is visible in the container.

    Attributes:
        source: absolute path on the node.
        target: absolute path in the container.
        read_only: whether the container cannot write to it.
    """

    source: str
    target: str
    read_only: bool = False


def parse_mount(text: str) -> Mount:
    """The mount that an entry of `cluster.container.mounts` describes; `ConfigError` for another text.

    >>> parse_mount("/data:/mnt/data:ro")
    Mount(source='/data', target='/mnt/data', read_only=True)
    """
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source:
        raise _refusal(text, "a mount with a source, SOURCE[:TARGET[:ro]]", "such as /data or /data:/mnt/data:ro")
    if mode not in MODES:
        raise _refusal(text, "ro, rw or nothing after the second colon", "such as /data:/mnt/data:ro")
    absolute = str(Path(source).expanduser().resolve())
    if target and not target.startswith("/"):
        raise _refusal(text, "an absolute path in the container", f"such as {source}:{absolute}")
    mount = Mount(absolute, target or str(Path(source).expanduser().absolute()), MODES[mode] == "ro")
    check_mount(mount, f"{KEY}.mounts")
    return mount


def check_mount(mount: Mount, key: str) -> None:
    """Raise `ConfigError` for a path that a runtime cannot mount; `key` names the origin of the path."""
    for path in (mount.source, mount.target):
        if bad := next((character for character in _FORBIDDEN if character in path), None):
            hint = "rename it, or mount its parent directory under another name"
            raise ConfigError(key, path, f"a path without {bad!r}, which separates mounts of a container", hint)


def check_container(container: ContainerConfig) -> None:
    """Raise `ConfigError` for the first key that contradicts another, or that a mount's syntax excludes.

    Reads no file: whether image and mounts exist is checked when the batch file is written.
    """
    if not container.is_used:
        if container != ContainerConfig():
            key = next(name for name in type(container).model_fields if getattr(container, name) != _default(name))
            expected = f"nothing with {KEY}.kind=none, which starts no container"
            raise ConfigError(f"{KEY}.{key}", getattr(container, key), expected, f"set {KEY}.kind, or leave it out")
        return
    if not container.image:
        hint = f"set {KEY}.image to a file on a file system of all nodes, or to an address of a registry"
        raise ConfigError(f"{KEY}.image", "", f"an image for {KEY}.kind={container.kind}", hint)
    if not container.python:
        raise ConfigError(f"{KEY}.python", "", "the Python of the image", "such as python3, or leave it out")
    targets = dict[str, str]()
    for text in container.mounts:
        mount = parse_mount(text)
        if targets.setdefault(mount.target, mount.source) != mount.source:
            raise _refusal(text, "one source for each target", f"{targets[mount.target]} has the same target")


def _default(name: str) -> object:
    return getattr(ContainerConfig(), name)


def _refusal(text: str, expected: str, hint: str) -> ConfigError:
    return ConfigError(f"{KEY}.mounts", text, expected, hint)
