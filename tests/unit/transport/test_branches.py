"""Episodes of several rows: what travels, what is refused, and how trainers count them."""

from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.algorithms.policy_losses import POLICY_LOSSES
from pipeline.config.routing_shape import RoutingShape
from pipeline.errors import RecordError, TrainingError
from pipeline.roles.preprocessor import prepare_group
from pipeline.train.batching.sequences import Batch, TrainSequence, episodes_of
from pipeline.train.batching.token_advantages import assign_advantages
from pipeline.train.loop.batch_metrics import batch_metrics, replayed_fraction
from pipeline.train.loop.rl import rows_of
from pipeline.transport.record_wire import decode_record, encode_record
from pipeline.transport.sample_records import Branch, Group, PreparedGroup, Sample
from tests.fakes.configs import make_config


def packed(tokens: list[int], sampled: list[int], logprobs: list[float]) -> dict[str, bytes]:
    return {
        "tokens": np.array(tokens, "<i4").tobytes(),
        "sampled": np.array(sampled, "<u1").tobytes(),
        "logprobs": np.array(logprobs, "<f4").tobytes(),
    }


def a_sample(reward: float = 1.0, **branches: Any) -> Sample:
    """Rows 1 2 3 4 and, from its branches, 1 2 7 and 1 2 7 9 8."""
    further = (
        Branch(of=0, shared=2, **packed([7], [1], [-3.0])),
        Branch(of=1, shared=3, **packed([9, 8], [0, 1], [0.0, -4.0])),
    )
    return Sample(
        **packed([1, 2, 3, 4], [0, 1, 0, 1], [0.0, -1.0, 0.0, -2.0]),
        reward=reward,
        version_min=1,
        version_max=1,
        finish="stop",
        branches=branches.get("branches", further),
    )


def test_the_routed_experts_of_a_row_are_those_of_its_prefix_and_its_own_without_a_gap() -> None:
    further = (
        Branch(of=0, shared=2, **packed([7], [1], [-3.0]), routed_experts=b"ee"),
        Branch(of=0, shared=3, **packed([9], [1], [-3.0]), routed_experts=b"ff"),  # row 0 has no record of token 2
    )
    sample = msgspec.structs.replace(a_sample(branches=further), routed_experts=b"aabb")
    sample = decode_record(encode_record(sample), Sample)
    assert [row.routed_experts for row in sample.rows(2)] == [b"aabb", b"aabbee", b"aabb"]
    assert [row.routed_experts for row in sample.rows()] == [b"", b"", b""]


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (b"\x01\x02" * 5, "of 5 tokens for a row of 4"),
        (b"\x01\x02\x03", "3 bytes of routed experts, 2 for each token"),
        (b"\x01\x08", "routed expert 8 of a model with 8 experts"),
    ],
)
def test_routed_experts_of_another_model_are_refused_where_they_are_replayed(record: bytes, complaint: str) -> None:
    sample = msgspec.structs.replace(ALONE, routed_experts=record)
    group = PreparedGroup(group=Group(position=0, prompt=0, samples=(sample,)), advantages=(1.0,))
    group.check(5, 10)
    with pytest.raises(RecordError, match=complaint):
        group.check(5, 10, RoutingShape(layers=1, per_token=2, experts=8))


def test_rows_carry_the_routed_experts_of_their_first_tokens() -> None:
    shape = RoutingShape(layers=1, per_token=2, experts=300)
    ids = np.arange(6, dtype="<u2").reshape(3, 1, 2) + 250
    recorded = msgspec.structs.replace(ALONE, routed_experts=ids.tobytes())
    prepared = PreparedGroup(group=Group(position=0, prompt=0, samples=(recorded, ALONE)), advantages=(1.0, 0.0))
    prepared.check(5, 10, shape)

    first, second = rows_of([prepared], routing=shape)
    plain, _ = rows_of([prepared])

    assert first.routed_experts is not None
    assert first.routed_experts.tolist() == ids.tolist()
    assert (second.routed_experts, plain.routed_experts) == (None, None)
    assert replayed_fraction([first, second]) == 3 / 8
    with pytest.raises(TrainingError, match="the servers returned the experts of no token"):
        replayed_fraction([second])


ALONE = a_sample(0.0, branches=())


def test_each_row_is_whole_and_each_sampled_token_is_marked_in_one_of_them() -> None:
    sample = decode_record(encode_record(a_sample()), Sample)
    sample.check()
    rows = sample.rows()
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 7], [1, 2, 7, 9, 8]]
    assert [row.sampled.tolist() for row in rows] == [[0, 1, 0, 1], [0, 0, 1], [0, 0, 0, 0, 1]]
    assert [row.logprobs.tolist() for row in rows] == [[0, -1, 0, -2], [0, 0, -3], [0, 0, 0, 0, -4]]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"of": 2}, "begins as row 2, which does not come before it"),
        ({"shared": 9}, "shares more than there is"),
        (packed([], [], []), "shares more than there is"),
        (packed([1], [1, 0], [0.0]), "differ in length"),
        ({"version_offsets": bytes(2)}, "differ in length"),
        (packed([1], [2], [0.0]), "no row of 0 and 1"),
        (packed([1], [1], [float("nan")]), "not finite"),
        (packed([-1], [1], [0.0]), "negative"),
        ({"shared": 0} | packed([7], [1], [0.0]), "begins with a prompt"),
    ],
)
def test_a_branch_that_makes_no_sense_is_refused(change: dict[str, Any], complaint: str) -> None:
    good = Branch(of=0, shared=2, **packed([7], [1], [-3.0]))
    with pytest.raises(RecordError, match=complaint):
        a_sample(branches=(good, msgspec.structs.replace(good, **change))).check()


@pytest.mark.parametrize(("length", "vocabulary", "complaint"), [(4, 99, "5 tokens, above"), (9, 9, "token id 9")])
def test_bounds_hold_for_every_row(length: int, vocabulary: int, complaint: str) -> None:
    group = PreparedGroup(group=Group(position=0, prompt=0, samples=(a_sample(),)), advantages=(1.0,))
    group.check(5, 10)
    with pytest.raises(RecordError, match=complaint):
        group.check(length, vocabulary)


def groups() -> list[PreparedGroup]:
    config = make_config()
    group = Group(position=3, prompt=0, samples=(a_sample(), ALONE))
    return [prepare_group(group, config)]


def test_baselines_and_means_count_an_episode_once() -> None:
    (prepared,) = groups()
    assert prepared.advantages == pytest.approx((1.0, -1.0), abs=1e-5)
    metrics = batch_metrics([prepared], 2)
    assert (metrics["reward/mean"], metrics["samples"]) == (0.5, 2.0)


def test_the_tasks_of_a_mix_have_their_own_rewards_and_numbers_of_samples() -> None:
    (prepared,) = groups()
    labeled = [
        msgspec.structs.replace(prepared, group=msgspec.structs.replace(prepared.group, task=label, samples=samples))
        for label, samples in (("sums", (a_sample(), ALONE)), ("words", (ALONE,)), ("sums", (ALONE,)))
    ]
    metrics = batch_metrics(labeled, 2)
    assert (metrics["reward/sums"], metrics["samples/sums"]) == (pytest.approx(1 / 3), 3)
    assert (metrics["reward/words"], metrics["samples/words"], metrics["samples"]) == (0, 1, 4)
    assert not {"reward/", "samples/"} & batch_metrics([prepared], 2).keys()


def test_each_row_has_what_a_teacher_says_of_it() -> None:
    (group,) = groups()
    lengths = [len(row.tokens) for sample in group.group.samples for row in sample.rows()]
    logprobs = [np.full(length, -0.5 - place, "<f4") for place, length in enumerate(lengths)]
    taught = msgspec.structs.replace(group, references=tuple(each.tobytes() for each in logprobs))
    taught.check(64, 1 << 20)
    assert [row.reference.tolist() for row in rows_of([taught]) if row.reference is not None] == [
        each.tolist() for each in logprobs
    ]
    assert [row.reference for row in rows_of([group])] == [None] * len(lengths)
    for references, reason in (
        (taught.references[1:], "references of 3 rows do not fit the group's 4 rows"),
        ((logprobs[0].tobytes()[4:], *taught.references[1:]), "do not fit"),
        ((np.full(lengths[0], np.nan, "<f4").tobytes(), *taught.references[1:]), "not finite"),
    ):
        with pytest.raises(RecordError, match=reason):
            msgspec.structs.replace(group, references=references).check(64, 1 << 20)


def test_all_rows_of_an_episode_have_its_advantage() -> None:
    rows = rows_of(groups())
    assert [row.advantages for row in rows] == pytest.approx([1.0, 1.0, 1.0, -1.0], abs=1e-5)
    assert [row.counted for row in rows] == [2, 1, 1, 2]
    assert episodes_of(rows) == [0, 0, 0, 3]
    assert not any(row.counted for row in rows_of(groups(), masked="stop"))


def test_tokens_that_are_too_old_count_in_no_denominator_and_are_told() -> None:
    """Of the episode's tokens, of versions 1 2, 4 and 3, and of the other sample's, both of version 1."""
    versions = bytes([0, 0, 0, 1]), bytes([3]), bytes([0, 2])
    own, first, second = versions
    one, other = a_sample().branches
    branches = (
        msgspec.structs.replace(one, version_offsets=first),
        msgspec.structs.replace(other, version_offsets=second),
    )
    episode = msgspec.structs.replace(a_sample(branches=branches), version_offsets=own, version_max=4)
    group = prepare_group(Group(position=3, prompt=0, samples=(episode, ALONE)), make_config())
    rows = rows_of([group], oldest=2)
    assert [row.counted for row in rows] == [1, 1, 1, 0]
    assert [row.advantages for row in rows] == pytest.approx([1.0, 1.0, 1.0, -1.0], abs=1e-5), "rewards all count"
    assert Batch.of(rows, "token").weights == pytest.approx([1 / 3] * 4)
    assert Batch.of(rows, "sequence").weights == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    metrics = batch_metrics([group], 4, oldest=2)
    assert {type(value) for value in metrics.values()} == {float}, "what a sink can write"
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (2, 2)
    assert (metrics["staleness/masked"], metrics["samples/masked"]) == (0.5, 0.5)
    unmasked = batch_metrics([group], 4)
    assert (unmasked["staleness/max"], unmasked["staleness/masked"], unmasked["samples/masked"]) == (3, 0, 0)


def test_a_sequence_is_an_episode() -> None:
    rows = rows_of(groups())
    assert Batch.of(rows, "sequence").weights == pytest.approx([1 / 8, 1 / 8, 1 / 8, 1 / 4])
    assert Batch.of(rows, "fixed", max_length=10).weights == pytest.approx([1 / 20] * 4)
    assert Batch.of(rows, "token").weights == pytest.approx([1 / 6] * 4)


def test_rows_of_other_prompts_are_other_episodes() -> None:
    one = TrainSequence(np.zeros(2, np.int32), np.array([0, 1], np.uint8), prompt=1, episode=0)
    other = TrainSequence(np.zeros(2, np.int32), np.array([0, 1], np.uint8), prompt=2, episode=0)
    alone = TrainSequence(np.zeros(2, np.int32), np.array([0, 1], np.uint8), prompt=2)
    assert episodes_of([one, other, one, alone, alone]) == [0, 1, 0, 3, 4]


def test_the_deviation_of_a_batch_counts_an_episode_once() -> None:
    """Rewards 1 and 0 have the deviation one half, however many rows the first has."""
    loss = make_config(loss={"name": "reinforce_pp", "advantage_estimator": "batch"}).loss
    assert loss.name in POLICY_LOSSES
    rows = [
        TrainSequence(row.tokens, row.sampled, reward, row.logprobs, prompt=3, episode=number)
        for number, (sample, reward) in enumerate([(a_sample(), 1.0), (ALONE, 0.0)])
        for row in sample.rows()
    ]
    computed = assign_advantages(rows, loss).advantages
    assert [
        float(each[np.asarray(row.mask, bool)][0]) for each, row in zip(computed, rows, strict=True)
    ] == pytest.approx([1.0, 1.0, 1.0, -1.0], abs=1e-4)


def test_what_was_abandoned_beside_a_batch_is_told() -> None:
    (prepared,) = groups()
    samples = tuple(msgspec.structs.replace(sample, seconds=3.0) for sample in prepared.group.samples)
    group = msgspec.structs.replace(prepared.group, samples=samples, abandoned=(1.0, 1.0))
    metrics = batch_metrics([msgspec.structs.replace(prepared, group=group)], 1)
    assert (metrics["oversample/canceled_samples"], metrics["oversample/wasted_fraction"]) == (2, 0.25)
    assert batch_metrics([prepared], 1)["oversample/wasted_fraction"] == 0
