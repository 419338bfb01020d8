"""A teacher's likeliest tokens on their way from the preprocessor to the rows of a step."""

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from pipeline.errors import RecordError
from pipeline.train.loop.rl import rows_of
from pipeline.transport.record_wire import decode_record, encode_record
from pipeline.transport.sample_records import Branch, Group, PreparedGroup, Sample
from pipeline.transport.top_tokens import ABSENT, ENTRY_BYTES, TopTokens

TOP_K, VOCABULARY = 2, 10


def record_of(ids: list[list[int]], logprobs: list[list[float]]) -> TopTokens:
    return TopTokens(np.array(ids, "<i4").tobytes(), np.array(logprobs, "<f4").tobytes())


def a_sample(versions: list[int], finish: Any = "stop") -> Sample:
    """Two rows: a prompt, a sampled token, a tool's and a sampled one; and a branch that ends with a sampled token."""
    arrays = {"sampled": np.array([0, 1, 0, 1], "u1"), "logprobs": np.array([0, -1, 0, -2], "<f4")}
    branch = Branch(of=0, shared=2, tokens=np.array([7], "<i4").tobytes(), sampled=b"\x01", logprobs=bytes(4))
    return Sample(
        tokens=np.array([1, 2, 3, 4], "<i4").tobytes(),
        **{name: array.tobytes() for name, array in arrays.items()},
        reward=0.0,
        version_min=0,
        version_max=max(versions),
        version_offsets=np.array(versions, "u1").tobytes(),
        branches=(branch,),
        finish=finish,
    )


LIKELY = (record_of([[5, 6], [7, 0]], [[-0.5, -2], [-0.25, ABSENT]]), record_of([[8, 9]], [[-1, -3]]))


def a_group(*samples: Sample) -> PreparedGroup:
    rows = sum(len(sample.rows()) for sample in samples)
    references = tuple(bytes(4 * len(row.tokens)) for sample in samples for row in sample.rows())
    return PreparedGroup(
        group=Group(position=0, prompt=0, samples=samples),
        advantages=(0.0,) * len(samples),
        references=references,
        top_tokens=LIKELY * (rows // 2),
    )


def test_they_survive_the_wire_and_cost_eight_bytes_each() -> None:
    prepared = a_group(a_sample([0, 0, 0, 0]))
    assert decode_record(encode_record(prepared), PreparedGroup) == prepared
    prepared.check(4, VOCABULARY, top_k=TOP_K)
    assert sum(len(row.ids) + len(row.logprobs) for row in prepared.top_tokens) == ENTRY_BYTES * 3 * TOP_K


def test_rows_have_them_where_tokens_count() -> None:
    """The first sampled token of a row is stale; a truncated sample counts nowhere; a branch's prefix has none."""
    prepared = a_group(a_sample([0, 0, 0, 1]), a_sample([1, 1, 1, 1], "length"))
    rows = rows_of([prepared], masked="length", oldest=1, top_k=TOP_K)
    for row in rows:
        row.check()
    assert [row.counted for row in rows] == [1, 0, 0, 0]
    assert [[] if row.top_ids is None else row.top_ids.tolist() for row in rows] == [[[7, 0]], [], [], []]
    all_rows = rows_of([prepared], top_k=TOP_K)
    assert [None if row.top_ids is None else row.top_ids.tolist() for row in all_rows][:2] == [
        [[5, 6], [7, 0]],
        [[8, 9]],
    ]
    logprobs = all_rows[0].top_logprobs
    assert logprobs is not None
    assert logprobs.tolist() == [[-0.5, -2], [-0.25, ABSENT]]
    assert rows_of([prepared])[0].top_ids is None


def test_tokens_that_only_the_teacher_has_are_absent() -> None:
    padded = record_of([[8, VOCABULARY], [VOCABULARY - 1, 3]], [[-1, -3], [-0.5, -2]])
    ids, logprobs = padded.within(VOCABULARY).arrays(TOP_K)
    assert ids.tolist() == [[8, 0], [VOCABULARY - 1, 3]]
    assert logprobs.tolist() == [[-1, ABSENT], [-0.5, -2]]
    assert LIKELY[0].within(VOCABULARY) is LIKELY[0]
    structs.replace(a_group(a_sample([0] * 4)), top_tokens=(padded, LIKELY[1])).check(4, VOCABULARY, top_k=TOP_K)


@pytest.mark.parametrize(
    ("top_k", "changed", "complaint"),
    [
        (0, LIKELY, "of 2 rows; expected 0"),
        (TOP_K, (), "of 0 rows; expected 2"),
        (3, LIKELY, "do not fit 2 sampled tokens with 3 each"),
        (TOP_K, (LIKELY[1], LIKELY[0]), "do not fit 2 sampled tokens with 2 each"),
        (TOP_K, (LIKELY[0], record_of([[-1, 1]], [[-1, -3]])), "has the id -1"),
        (TOP_K, (LIKELY[0], record_of([[8, 9]], [[-1, float("nan")]])), "is not a number"),
        (TOP_K, (LIKELY[0], record_of([[8, 9]], [[float("inf"), -1]])), "is not a number"),
    ],
)
def test_a_group_whose_likely_tokens_do_not_fit_is_malformed(
    top_k: int, changed: tuple[TopTokens, ...], complaint: str
) -> None:
    prepared = structs.replace(a_group(a_sample([0, 0, 0, 0])), top_tokens=changed)
    with pytest.raises(RecordError, match=complaint):
        prepared.check(4, VOCABULARY, top_k=top_k)
