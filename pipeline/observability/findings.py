"""Tuning hints: rules over a run's metrics that name the keys to change.

No finding rests on a single step, and findings of RL exclude the first steps. Pure: a config and metric rows in,
sentences out, the same for the report and the launcher.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.algorithms.policy_losses import POLICY_LOSSES
from pipeline.config import RunConfig
from pipeline.run.metrics_log import MetricRecord
from pipeline.topology.gpu_split import best_split
from pipeline.train.loop.grace_period import grace_warning
from pipeline.train.loop.step_metrics import MAX_TRUNCATED

SKIPPED_STEPS, MIN_COUNTED_STEPS = 10, 20
"""First steps that are excluded, and the number of steps after them that a finding of RL requires."""
CLIPPED, REFUSED, IDLE, BUSY = 0.05, 0.1, 0.25, 0.05
"""Minimum fractions for a finding; `BUSY`: the maximum idle fraction of the busy half. As measured, clipping 0.07 of
the tokens slows learning to less than half, and clipping 0.01 has little effect."""
MIN_STEPS = 4
"""Required number of steps with stale groups: the loss of a server for a while affects only one or two."""

SMALL_MODEL = 300_000_000
"""Parameters up to which more servers on one GPU are suggested: with 135M, three made 1.7 to 2.0 times the samples of
one."""
KEYS = {"trainer": "trainer", "servers": "inference"}
"""The section of `resources` for each half."""


@dataclass(frozen=True)
class Finding:
    """One tuning hint.

    Attributes:
        observation: the observed problem, a sentence.
        change: the keys to set, a sentence.
        page: the page and section of the documentation.
    """

    observation: str
    change: str
    page: str


def findings_of(config: RunConfig | None, rows: Sequence[MetricRecord]) -> list[Finding]:
    """The findings for a run's metrics. None without a readable config; those of RL require enough steps."""
    if config is None:
        return []
    return [*_grace(config, rows), *_of_rl(config, rows)]


def _grace(config: RunConfig, rows: Sequence[MetricRecord]) -> Iterator[Finding]:
    """Findings about the grace period. Only the newest attempt counts: earlier ones may have had another one."""
    trained = [row for row in rows if row["kind"] == "train"]
    last = trained[-1] if trained else {}
    newest = [row for row in trained if all(row.get(key) == last.get(key) for key in ("job", "attempt"))]
    if warning := grace_warning(config.cluster, newest):
        page = "docs/checkpoints.md#asynchronous-checkpoints"
        yield Finding(_sentence(warning.observation), _sentence(warning.change), page)


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _of_rl(config: RunConfig, rows: Sequence[MetricRecord]) -> list[Finding]:
    if not config.has_rl or config.training.jobs:
        return []
    steps = [row for row in rows if row["kind"] == "train" and row["job"] == "rl"][SKIPPED_STEPS:]
    if len(steps) < MIN_COUNTED_STEPS:
        return []
    rules = (_not_finite, _equal, _truncated, _clipped, _refused, _idle, _idle_on_shared_gpu)
    return [finding for rule in rules for finding in rule(config, steps)]


def _not_finite(config: RunConfig, steps: Sequence[MetricRecord]) -> Iterator[Finding]:
    for model, whose, rate in (("", "", "optim.lr"), ("critic/", " of the critic", "critic.lr")):
        skipped = [count for row in steps if (count := row.get(f"{model}skipped", 0.0))]
        if len(skipped) > 1:
            yield Finding(
                f"{sum(skipped):.0f} optimizer steps{whose} changed nothing, since their gradient was not finite.",
                f"Lower {rate}, or lengthen optim.warmup_steps.",
                "docs/algorithms.md#gradients-that-are-not-finite",
            )


def _equal(config: RunConfig, steps: Sequence[MetricRecord]) -> Iterator[Finding]:
    spread = _values(steps, "reward/std")
    if spread and not any(spread) and not config.teacher.url:
        yield Finding(
            f"All samples of a step have one reward, {_median(steps, 'reward/mean'):g}: nothing is learned from them.",
            "Read some samples: raise rollout.max_tokens if they are cut off, fix reward.functions if the reward looks "
            "for another form than the model writes, or choose easier or harder prompts.",
            "docs/rewards.md#when-all-rewards-are-equal",
        )


def _truncated(config: RunConfig, steps: Sequence[MetricRecord]) -> Iterator[Finding]:
    truncated, masked = _median(steps, "samples/truncated"), config.training.mask_truncated
    if truncated > MAX_TRUNCATED:
        effect = "they are sampled, but not trained" if masked else "their rewards are of unfinished answers"
        mask = "" if masked else ", or leave them out of the loss: training.mask_truncated=true"
        yield Finding(
            f"{truncated:.0%} of the samples are cut off at rollout.max_tokens: {effect}.",
            f"Raise rollout.max_tokens and model.max_length{mask}.",
            "docs/algorithms.md#which-samples-count",
        )


def _clipped(config: RunConfig, steps: Sequence[MetricRecord]) -> Iterator[Finding]:
    clipped, over_sampler = _median(steps, "clip_fraction"), config.loss.old_logprobs == "sampler"
    if clipped >= CLIPPED and POLICY_LOSSES[config.loss.name].clips_tokens and over_sampler and config.training.max_lag:
        yield Finding(
            f"The clip holds {clipped:.0%} of the tokens: the policy has moved too far from the one that sampled them.",
            "Set loss.old_logprobs=recompute loss.tis=mask, or lower optim.lr or training.max_lag.",
            "docs/algorithms.md#lag",
        )


def _refused(config: RunConfig, steps: Sequence[MetricRecord]) -> Iterator[Finding]:
    stale = [count for count in _values(steps, "groups/stale") if count]
    refused = sum(stale) / (config.training.prompts_per_step * len(steps))
    if refused >= REFUSED and len(stale) >= MIN_STEPS:
        maskable = config.training.max_lag and config.training.stale != "mask"
        mask = ", or count their young tokens: training.stale=mask" if maskable else ""
        yield Finding(
            f"For every 100 groups that were trained, {100 * refused:.0f} were wasted: they were too old.",
            f"Raise training.max_lag{mask}.",
            "docs/algorithms.md#long-samples",
        )


def _idle(config: RunConfig, steps: Sequence[MetricRecord]) -> Iterator[Finding]:
    """Findings about idle time of the trainer or the servers, unless they share GPUs."""
    if config.resources.device != "cuda" or config.resources.colocate:
        return
    names = ("idle/trainer", "idle/servers", "idle/actor")
    if not all(_values(steps, name) for name in names):
        return
    trainer, servers, held = (_median(steps, name) for name in names)
    if trainer >= IDLE and not config.training.max_lag:
        yield Finding(
            f"The trainer waits for samples {trainer:.0%} of the time, as one half always does with max_lag=0.",
            "Set training.max_lag=1 or more: samples of the next step are made while this one is trained.",
            "docs/algorithms.md#lag",
        )
    elif trainer >= IDLE and held >= IDLE:
        yield Finding(
            f"The trainer waits for samples {trainer:.0%} of the time, while training.max_lag holds new ones back.",
            "Raise training.max_lag, or train more samples a step.",
            "docs/performance.md#the-bound-that-staleness-sets",
        )
    elif trainer >= IDLE and servers <= BUSY:
        yield Finding(
            f"The trainer waits for samples {trainer:.0%} of the time: the servers are the slower half.",
            _resplit(config, trainer, servers, "servers"),
            "docs/gpus.md",
        )
    elif servers >= IDLE and trainer <= BUSY:
        yield Finding(
            f"The servers have nothing to do {servers:.0%} of the time: the trainer is the slower half.",
            _resplit(config, trainer, servers, "trainer"),
            "docs/gpus.md",
        )


def _idle_on_shared_gpu(config: RunConfig, steps: Sequence[MetricRecord]) -> Iterator[Finding]:
    """The finding that one server of a small model does not keep the GPU busy that it shares with the trainer."""
    resources = config.resources
    if not resources.colocate or resources.inference.servers > 1 or resources.inference.gpus > 1:
        return
    trainer, held = _median(steps, "idle/trainer"), _median(steps, "idle/actor")
    tokens = _median(steps, "tokens/batch")
    # A pass takes 6 operations for each parameter and token (docs/metrics.md#flops), with adapters 4.
    parameters = _median(steps, "flops") / ((4 if config.model.lora.rank else 6) * tokens) if tokens else 0.0
    if trainer >= IDLE and held < IDLE and 0 < parameters <= SMALL_MODEL:
        yield Finding(
            f"The trainer waits for samples {trainer:.0%} of the time: for a model this small, a server is limited by "
            "its process, not by the GPU.",
            "Put three on the GPU: resources=one_gpu_mps sets resources.mps and what else this needs.",
            "docs/gpus.md#multi-process-service",
        )


def _resplit(config: RunConfig, idle_trainer: float, idle_servers: float, slower: str) -> str:
    """A sentence with a faster split of the run's GPUs and the keys that set it, if there is one."""
    trainer, inference = config.resources.trainer, config.resources.inference
    training = trainer.nodes * trainer.processes * trainer.gpus
    serving = inference.nodes * inference.servers * inference.gpus // inference.servers_per_gpu
    split = best_split(training, serving, inference.gpus, idle_trainer, idle_servers) if training and serving else None
    if split is None:
        return f"No other split of these GPUs is faster; give the {slower} more of them: resources.{KEYS[slower]}."
    keys = "resources.trainer, resources.inference"
    if trainer.nodes == inference.nodes == 1:
        servers = split.servers * inference.servers_per_gpu // inference.gpus
        keys = f"resources.trainer.processes={split.trainer // trainer.gpus} resources.inference.servers={servers}"
    return (
        f"Train on {split.trainer} GPUs and serve on {split.servers}: a step would take 1/{split.factor:.1f} of the "
        f"time, if both halves scale with their GPUs. Set {keys}."
    )


def _values(steps: Sequence[MetricRecord], name: str) -> list[float]:
    return [row[name] for row in steps if row.get(name) is not None]


def _median(steps: Sequence[MetricRecord], name: str) -> float:
    """The median of a metric over the steps that have it; 0 if none does."""
    return statistics.median(_values(steps, name) or [0.0])
