"""Metrics of a batch of groups: rewards, lengths, staleness, and the fraction of tokens whose experts are replayed.

Those of an update, which its tokens give, are in `pipeline.train.total_loss`.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.algorithms.advantage_estimators import has_zero_variance
from pipeline.errors import TrainingError
from pipeline.train.batching.sequences import TrainSequence
from pipeline.transport.sample_records import PreparedGroup, Sample, mean_metrics
from pipeline.transport.staleness import is_fresh


def replayed_fraction(rows: Sequence[TrainSequence]) -> float:
    """The fraction of the tokens whose experts are those that a server chose; `TrainingError` if there are none."""
    replayed = sum(len(row.routed_experts) for row in rows if row.routed_experts is not None)
    if not replayed:
        raise TrainingError("training.routing_replay: the servers returned the experts of no token of a whole batch")
    return replayed / sum(map(len, rows))


def batch_metrics(groups: Sequence[PreparedGroup], version: int, oldest: int = 0) -> dict[str, float]:
    """Metrics of a batch: rewards, lengths, and its lag at `version`; tokens of weights before `oldest` are masked."""
    samples = [sample for prepared in groups for sample in prepared.group.samples]
    rewards = np.array([sample.reward for sample in samples])
    lengths = np.array([sum(np.count_nonzero(row.sampled) for row in sample.rows()) for sample in samples])
    abandoned = [seconds for prepared in groups for seconds in prepared.group.abandoned]
    used, wasted = sum(sample.seconds for sample in samples), sum(abandoned)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "samples": float(len(samples)),
        "samples/truncated": float(np.mean([sample.finish == "length" for sample in samples])),
        "completion_length/mean": float(lengths.mean()),
        "completion_length/max": float(lengths.max()),
        "groups/failed_samples": float(sum(len(prepared.group.failures) for prepared in groups)),
        "groups/reused_tokens": float(sum(prepared.group.reused for prepared in groups)),
        "groups/resampled_tokens": float(sum(prepared.group.resampled for prepared in groups)),
        "oversample/canceled_samples": float(len(abandoned)),
        "oversample/wasted_fraction": wasted / (used + wasted) if wasted else 0.0,
    }
    return mean_metrics(samples) | metrics | _task_metrics(groups) | _lag_metrics(samples, version, oldest)


def _task_metrics(groups: Sequence[PreparedGroup]) -> dict[str, float]:
    """The mean reward and the number of samples of each task of a mix that the batch has."""
    rewards: dict[str, list[float]] = {}
    for prepared in groups:
        if prepared.group.task:
            rewards.setdefault(prepared.group.task, []).extend(one.reward for one in prepared.group.samples)
    means = {f"reward/{label}": float(np.mean(values)) for label, values in rewards.items() if values}
    return means | {f"samples/{label}": float(len(values)) for label, values in rewards.items()}


def zero_variance(groups: Sequence[PreparedGroup], dropped: int) -> float:
    """Fraction of groups whose samples all have one reward, among a batch and the groups that were `dropped` for equal
    rewards since the previous batch."""
    equal = sum(has_zero_variance([sample.reward for sample in prepared.group.samples]) for prepared in groups)
    return (equal + dropped) / (len(groups) + dropped)


def _lag_metrics(samples: Sequence[Sample], version: int, oldest: int) -> dict[str, float]:
    """The lag of each sample's oldest unmasked token, and the fractions of masked tokens and samples."""
    rows_by_sample = [sample.rows() for sample in samples]
    sampled = sum(np.count_nonzero(row.sampled) for rows in rows_by_sample for row in rows)
    # One array per sample: the versions of its unmasked tokens.
    fresh = [np.concatenate([row.versions[is_fresh(row, oldest)] for row in rows]) for rows in rows_by_sample]
    lags = [version - versions.min() for versions in fresh if versions.size] or [0]
    return {
        "staleness/mean": float(np.mean(lags)),
        "staleness/max": float(max(lags)),
        "staleness/masked": float(1 - sum(map(len, fresh)) / max(1, sampled)),
        "samples/masked": float(np.mean([not versions.size for versions in fresh])),
    }
