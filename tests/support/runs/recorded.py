"""A run with recorded samples, written by the real writers: what a replay reads."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.config.model_directory import BUILT_IN
from pipeline.rollout.sample_store import SampleStore, records_of_group
from pipeline.transport.ledger import BatchEntry, Ledger
from pipeline.transport.sample_records import Branch, Group, PreparedGroup, Sample
from tests.fakes.configs import make_config
from tests.fakes.run_directory import FakeRun

STEPS, PROMPTS, SAMPLES = 6, 2, 4
VOCABULARY = 17
FILTERED = 4
"""A position without a batch."""


def write_recorded(root: Path, **sections: Any) -> FakeRun:
    """A run of `STEPS` steps of the demo's tiny model; one of its samples in four has two rows."""
    training: dict[str, Any] = {"steps": STEPS, "prompts_per_step": PROMPTS, "max_lag": 1, "mini_batches": 2}
    config = make_config(
        name=root.name,
        output=str(root.parent),
        model={"path": str(BUILT_IN / "tiny_qwen3"), "init": "random", "max_length": 32},
        optim={"lr": 1e-3, "schedule": "cosine"},
        training=training | {"checkpoint_every": 2, "micro_batch_tokens": 64},
        rollout={"group_size": SAMPLES, "max_tokens": 8},
        tracking={"trackers": ()},
        resources={"trainer": {"nodes": 1, "processes": 1}},
        **sections,
    )
    run = FakeRun(root, config)
    positions = [position for position in range(STEPS * PROMPTS + 1) if position != FILTERED]
    positions[1], positions[2] = positions[2], positions[1]
    ledger = Ledger()
    with SampleStore(run.paths.rollouts / "train", "a-0", 1 << 20) as store:
        for index, position in enumerate(positions):
            step, order = divmod(index, PROMPTS)
            if step == 2:
                ledger.mark_done(FILTERED, "filtered: zero advantage", step)
            # Positions 5 and 8 were sampled twice, as after a crash; the second sampling was trained.
            samplings = (100 + position, position) if position in (5, 8) else (position,)
            groups = [make_group(position, seed, version=max(0, step - 1)) for seed in samplings]
            for group in groups:
                prepared = PreparedGroup(group=group, advantages=tuple(range(SAMPLES)))
                store.add(records_of_group(prepared, "arithmetic", "group_std"))
            trained = groups[-1]
            entry = BatchEntry(order=order, versions=trained.versions, fingerprint=trained.fingerprint())
            ledger.mark_done(position, "trained", step, entry)
    run.paths.ledger.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in ledger.drain_changes()))
    return run


def make_group(position: int, seed: int, version: int) -> Group:
    """A group of random samples. Its last one branched, so it has two rows."""
    draw = np.random.default_rng(seed)
    samples = []
    for index in range(SAMPLES):
        branches = (Branch(of=0, shared=2, **_arrays(draw, 4)),) if index == SAMPLES - 1 else ()
        arrays = _arrays(draw, int(draw.integers(5, 12)), prompt=3)
        reward = float(draw.random())
        head: dict[str, Any] = {"version_min": version, "version_max": version + 1, "finish": "stop"}
        samples.append(Sample(**head, **arrays, reward=reward, branches=branches, metrics={"rewards/exact": reward}))
    return Group(position=position, prompt=position, samples=tuple(samples), failures=("reward raised",))


def _arrays(draw: np.random.Generator, length: int, prompt: int = 1) -> dict[str, bytes]:
    sampled = np.array([0] * prompt + [1] * (length - prompt), "<u1")
    return {
        "tokens": draw.integers(0, VOCABULARY, length).astype("<i4").tobytes(),
        "sampled": sampled.tobytes(),
        "logprobs": ((draw.normal(size=length) * 0.1 - 2.8) * sampled).astype("<f4").tobytes(),
        "version_offsets": (draw.integers(0, 2, length) * sampled).astype("<u1").tobytes(),
    }
