"""The rule between `faults` and the other keys: an injected fault needs its target and its moment in the run."""

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.run.fault_plan import NAMES, parse_faults


def faults_can_happen(config: RunConfig) -> None:
    """Every injected fault has its target and its moment in this run."""
    own_steps = not (config.evaluation.only or config.serve.enabled or config.training.jobs)
    targets = {
        "trainer": not config.evaluation.only,
        "checkpoint": own_steps and "://" not in config.training.checkpoints,
        "disk": own_steps,
        "filesystem": own_steps,
        "node": True,
        "names": True,
        "redis": config.has_rollouts and config.streams.backend == "redis",
        "preprocessor": config.has_rollouts,
        "actor": config.has_rollouts or config.evaluation.only,
        "inference": config.has_servers,
    }
    moments = {"": True, "start": True, "save": own_steps, "end": own_steps, "sft": own_steps and config.has_sft}
    for fault in parse_faults(config.faults):
        if not targets[fault.target]:
            raise ConfigError("faults", fault.text, f"a target of this run, which has no {fault.target}", "remove it")
        if fault.target == NAMES and not config.cluster.on_this_machine:
            limit = config.cluster.fs_visibility_seconds
            if (fault.amount or 0.0) > limit:
                expected = f"at most cluster.fs_visibility_seconds={limit:g}, by which agents wait for late files"
                raise ConfigError("faults", fault.text, expected, "lower it, or raise the key")
        has_moment = config.has_rl if fault.moment == "step" else config.has_rollouts
        if not moments.get(fault.moment, own_steps and has_moment):
            raise ConfigError("faults", fault.text, f"a moment of this run, which has no {fault.moment}", "remove it")
        key, steps = ("training.sft.steps", config.training.sft.steps)
        if fault.moment != "sft":
            key, steps = ("training.steps", config.training.steps)
        if fault.number is not None and fault.number > steps:
            raise ConfigError("faults", fault.text, f"a step up to {key}={steps}", "lower it")
