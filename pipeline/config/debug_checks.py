"""Rules of the keys `debug.*`: which steps can be traced, and which role can run under a debugger."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.utils.optional_extras import pip_install


def debug_is_possible(config: RunConfig) -> None:
    """Raise `ConfigError` for the first key of `debug` that the run cannot follow."""
    debug, device = config.debug, config.resources.device
    for key, window in (("profile_steps", debug.profile_steps), ("memory_steps", debug.memory_steps)):
        if window:
            _check_window(f"debug.{key}", window, config)
    if debug.memory_steps and device == "cpu":
        expected = "nothing with resources.device=cpu: torch records the allocations of GPUs only"
        raise ConfigError("debug.memory_steps", list(debug.memory_steps), expected, "leave it out")
    if debug.role:
        _check_role(debug.role, _processes(config))
        if debug.tool == "debugpy" and find_spec("debugpy") is None:
            expected, hint = "pdb, since debugpy is not installed", f"{pip_install('debug')}, or leave debug.tool out"
            raise ConfigError("debug.tool", "debugpy", expected, hint)


def _processes(config: RunConfig) -> dict[str, int]:
    """The processes of each role of the run that is a Python program of this project."""
    trainer = config.resources.trainer
    if config.evaluation.only:
        return {"actor": 1}
    processes = {"trainer": trainer.nodes * trainer.processes}
    return processes | ({"actor": 1, "preprocessor": 1} if config.has_rollouts else {})


def _check_window(key: str, window: Sequence[int], config: RunConfig) -> None:
    value, training = list(window), config.training
    if training.jobs or config.serve.enabled or config.evaluation.only:
        expected = "nothing in a run whose steps are those of job files, clients or an evaluation"
        raise ConfigError(key, value, expected, "leave it out")
    if len(window) != 2:
        raise ConfigError(key, value, "[FIRST, LAST]", f"set {key}=[{window[0]},{window[0]}] for one step")
    first, last = window
    if first > last:
        raise ConfigError(key, value, "[FIRST, LAST] with FIRST ≤ LAST", f"set {key}=[{last},{first}]")
    steps = training.steps or training.sft.steps  # 0: the steps of SFT follow from its epochs
    if steps and first > steps:
        raise ConfigError(key, value, f"steps up to {steps}, the last one of the run", "lower it")


def _check_role(role: str, processes: Mapping[str, int]) -> None:
    name, dot, index = role.partition(".")
    if name in processes and (not dot or (index.isdecimal() and int(index) < processes[name])):
        return
    choices = [*processes, *(f"{name}.{count - 1}" for name, count in processes.items() if count > 1)]
    expected = f"a role of this run that is a Python program of Rollcall: {', '.join(choices)}"
    raise ConfigError("debug.role", role, expected, "for servers, see inference.extra_args and debug.log_level")
