"""The containers of a batch file: the words by which srun, apptainer or enroot start an agent in one.

Owns the mounts that a run needs, and the syntax of each runtime. Promises that a run's files have the same paths in the
container as on the nodes, and that a path which the submitting host lacks is refused before anything is queued. Reads
the file system of the submitting host, changes nothing.

| kind | the container is started by | ends |
|---|---|---|
| `pyxis` | srun, which gets `srun_options` | with its task |
| `apptainer` | `container_start`, which apptainer replaces | with its command |
| `enroot` | `container_start`, which creates it before and removes it after the command | with its command |

In every kind the first process of the container is `container_entry`, which the agent replaces.
"""

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.config.container_keys import KEY, ContainerConfig, Mount, check_mount, parse_mount
from pipeline.config.packaged_model import cache_folder
from pipeline.errors import ConfigError
from pipeline.run.paths import AttachedPaths, RunPaths

CACHE_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME")
"""Variables of caches that a user may keep outside `~/.cache`."""
CACHES = ("huggingface", "torch", "rollcall")
"""Directories of `~/.cache` that a run uses, which may be links to another disk."""
HF_CACHES = ("hub", "datasets")
"""Directories of HF_HOME, as above."""
OF_IMAGE = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
"""Directories that a container has from its image or its runtime: mounted only if the user names them."""
GPU_VARIABLES = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")
"""Variables by which enroot's hook mounts the driver. Images without CUDA do not set them."""


def automatic_mounts(config: RunConfig, run: RunPaths, variables: Mapping[str, str] = os.environ) -> list[Mount]:
    """The paths that a container gets without a key, at the same path: files of the run and of the user.

    They are the run directory, the working directory, the caches, /tmp, and each existing path that a key of the config
    names. A path below another one is left out.
    """
    served = run.served.root if isinstance(run, AttachedPaths) else run.root
    others = [Path.cwd(), *_paths_in(_keys(config))]
    paths = [served, *cache_folders(config, variables), *(path for path in others if not _is_of_image(path))]
    if config.cluster.container.kind != "apptainer":  # which mounts /tmp by itself
        paths.append(Path("/tmp"))
    return [Mount(str(path), str(path)) for path in _outermost(paths)]


def cache_folders(config: RunConfig, variables: Mapping[str, str] = os.environ) -> list[Path]:
    """The directories of caches, which a node may have to create; of a link also the directory to which it leads, by
    each of its names: the container has the link as it is written."""
    named = [config.cluster.compile_cache, *(variables.get(name, "") for name in CACHE_VARIABLES)]
    home = cache_folder().parent
    paths = [home, *(Path(path).absolute() for path in named if path)]
    hf_home = Path(variables.get("HF_HOME") or home / "huggingface").absolute()
    inner = [*(home / name for name in CACHES), *(hf_home / name for name in HF_CACHES)]
    targets = [target for path in (*paths, *inner) if path.is_dir() for target in _link_targets(path)]
    return [path for path in _outermost([*paths, *targets]) if not _is_of_image(path)]


def mounts_of(config: RunConfig, run: RunPaths, variables: Mapping[str, str] = os.environ) -> list[Mount]:
    """All mounts of the run's containers, outer directories first; a user's mount replaces ours at the same target."""
    container = config.cluster.container
    mounts = dict[str, Mount]()
    for mount in automatic_mounts(config, run, variables):
        check_mount(mount, KEY)
        mounts[mount.target] = mount
    for text in container.mounts:
        mount = parse_mount(text)
        if not Path(mount.source).exists():
            hint = "create it, or leave it out; a mount's source must exist on this host and on all nodes"
            raise ConfigError(f"{KEY}.mounts", text, "a source that exists on this host", hint)
        mounts[mount.target] = mount
    return sorted(mounts.values(), key=lambda mount: len(Path(mount.target).parts))


def srun_options(config: RunConfig, run: RunPaths) -> list[str]:
    """The options by which srun starts a task in a container, for each component of the job; empty without pyxis."""
    container = config.cluster.container
    if container.kind != "pyxis":
        return []
    caches = {str(path) for path in cache_folders(config)}
    mounts = ",".join(_colons(mount, _flags(mount, caches)) for mount in mounts_of(config, run))
    variables = [f"--container-env={','.join(GPU_VARIABLES)}"] if _has_gpus(config) else []
    return [
        f"--container-image={image_of(container)}",
        f"--container-mounts={mounts}",
        f"--container-workdir={_working_directory(run)}",
        "--no-container-mount-home",
        "--no-container-remap-root",  # the run's files belong to this user, whose id the agents compare
        *variables,
        *container.args,
    ]


def agent_words(config: RunConfig, run: RunPaths, python: str, words: Sequence[str]) -> list[list[str]]:
    """The command of a rank's agent in its container, as lines of words.

    Args:
        config: a config whose `cluster.container.kind` is not `none`.
        run: the run, whose code has the scripts.
        python: the host's interpreter.
        words: the arguments of the agent's Python.
    """
    container, scripts = config.cluster.container, run.code / "slurm" / "scheduler" / "slurm"
    entry = [str(scripts / "container_entry.py"), str(run.code), _working_directory(run)]
    inside = [container.python, "-I", *entry, *words]
    if container.kind == "pyxis":
        return [inside]
    image = image_of(container)
    caches = [f"--cache={path}" for path in cache_folders(config)]
    start = [python, "-I", "-S", str(scripts / "container_start.py"), f"--image={image}", *caches, "--"]
    return [start, *_runtime(config, run), [*container.args, image], inside]


def gpu_exports(config: RunConfig) -> list[str]:
    """Shell lines that request the driver in containers of enroot, also for images without CUDA."""
    if config.cluster.container.kind not in ("pyxis", "enroot") or not _has_gpus(config):
        return []
    devices, capabilities = GPU_VARIABLES
    return [
        f'export {devices}="${{{devices}:-all}}" {capabilities}="${{{capabilities}:-compute,utility}}"',
    ]


def image_of(container: ContainerConfig) -> str:
    """The image, with an absolute path if it is a file. `ConfigError` for a file that does not exist."""
    image = container.image
    if "://" in image or (container.kind == "pyxis" and not image.startswith(("/", ".", "~"))):
        return image
    path = Path(image).expanduser().absolute()
    if not path.exists():
        example = "docker://ubuntu" if container.kind != "pyxis" else "nvcr.io#nvidia/pytorch:25.06-py3"
        hint = f"create the image, or name one of a registry, such as {example}"
        raise ConfigError(f"{KEY}.image", image, "an image that exists on this host", hint)
    if path.is_dir() and container.kind != "apptainer":
        raise ConfigError(f"{KEY}.image", image, "a squashfs file", "see enroot import")
    return str(path)


def _runtime(config: RunConfig, run: RunPaths) -> list[list[str]]:
    """The command of apptainer or enroot, without the user's options and the image; one line for each mount."""
    mounts = mounts_of(config, run)
    if config.cluster.container.kind == "enroot":
        return [["enroot", "start"], *(["--mount", _colons(mount, _fstab(mount))] for mount in mounts)]
    gpus = ["--nv"] if _has_gpus(config) else []
    start = ["apptainer", "exec", *gpus, "--no-home", "--pwd", _working_directory(run)]
    return [start, *(["--bind", _colons(mount, ":ro" if mount.read_only else "")] for mount in mounts)]


def _flags(mount: Mount, caches: Container[str]) -> str:
    """pyxis's flags of a mount. A node that lacks a cache starts without it, since pyxis cannot create a directory."""
    flags = [*(["ro"] if mount.read_only else []), *(["nofail"] if mount.source in caches else [])]
    return f":{'+'.join(flags)}" if flags else ""


def _fstab(mount: Mount) -> str:
    """enroot's type and options of a mount, as in fstab."""
    return f":none:x-create=auto,rbind{',ro' if mount.read_only else ''}"


def _colons(mount: Mount, rest: str) -> str:
    return f"{mount.source}:{mount.target}{rest}"


def _has_gpus(config: RunConfig) -> bool:
    return config.resources.device == "cuda"


def _working_directory(run: RunPaths) -> str:
    """The launcher's working directory, as without a container; the run's if an image has its own directory there."""
    return str(run.root if _is_of_image(Path.cwd()) else Path.cwd())


def _link_targets(path: Path) -> Iterator[Path]:
    """The paths to which a chain of links leads, as each link is written; nothing of a path that is no link."""
    while path.is_symlink():
        path = Path(os.path.normpath(path.parent / path.readlink()))
        yield from (path, path.resolve())


def _is_of_image(path: Path) -> bool:
    return (
        path == Path("/") or str(path).startswith(tuple(f"{folder}/" for folder in OF_IMAGE)) or str(path) in OF_IMAGE
    )


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """The paths without duplicates and without those below another one, shortest first."""
    outer = list[Path]()
    for path in sorted(set(paths), key=lambda path: (len(path.parts), str(path))):
        if not any(other in path.parents for other in outer):
            outer.append(path)
    return outer


def _keys(config: RunConfig) -> dict[str, Any]:
    """The keys whose values may be paths of the user's files."""
    tree = config.model_dump(mode="json")
    return {name: value for name, value in tree.items() if name not in ("cluster", "name", "output", "debug")}


def _paths_in(value: Any) -> Iterator[Path]:
    """The existing paths among the texts of a tree of values. A word without a slash is no path."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _paths_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _paths_in(inner)
    elif isinstance(value, str) and "/" in value and "\n" not in value:
        path = Path(value).expanduser().absolute()
        try:
            exists = path.exists()
        except OSError:  # a long text, such as a prompt
            return
        if exists:
            # As written too: of a link, the container has neither the name nor what it refers to.
            yield from {path.resolve(), path} if ".." not in path.parts else {path.resolve()}
