"""The wire form of records: whatever is written is read equal, anything else is a RecordError."""

import zlib
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import RecordError
from pipeline.transport.eval_records import EvalRequest, EvalResult
from pipeline.transport.record_wire import decode_record, encode_record
from pipeline.transport.sample_records import WIRE_VERSION, Branch, Group, PreparedGroup, Record, Reissue, Sample

numbers = st.integers(0, 2**40)
times = st.floats(0, 1e9)
reasons = st.text(max_size=20)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """A sample whose three arrays agree."""
    length = draw(st.integers(0, 12))
    return draw(
        st.builds(
            Sample,
            tokens=st.binary(min_size=4 * length, max_size=4 * length),
            sampled=st.binary(min_size=length, max_size=length),
            logprobs=st.binary(min_size=4 * length, max_size=4 * length),
            reward=st.floats(allow_nan=False),
            version_min=numbers,
            version_max=numbers,
            finish=st.sampled_from(["stop", "length"]),
            turns=numbers,
            seconds=times,
            server=reasons,
            version=st.just(WIRE_VERSION),
        )
    )


def built(kind: type[Record], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Record]:
    return st.builds(kind, version=st.just(WIRE_VERSION), **fields)


groups = built(
    Group,
    position=numbers,
    prompt=numbers,
    samples=st.lists(samples(), max_size=3).map(tuple),
    failures=st.lists(reasons, max_size=3).map(tuple),
)
prepared = built(
    PreparedGroup,
    group=groups,
    advantages=st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
    outcome=reasons,
)
results = built(
    EvalResult,
    id=reasons,
    policy_version=numbers,
    accuracy=st.floats(0, 1),
    prompts=numbers,
    version_min=numbers,
    version_max=numbers,
    seconds=times,
)
requests = built(EvalRequest, id=reasons, policy_version=numbers)
reissues = built(Reissue, position=numbers, reason=reasons)
records = st.one_of(samples(), groups, prepared, results, requests, reissues)


@given(records)
def test_every_record_is_read_as_it_was_written(record: Record) -> None:
    assert decode_record(encode_record(record), type(record)) == record


@given(records, st.data())
def test_a_torn_record_is_an_error(record: Record, data: st.DataObject) -> None:
    wire = encode_record(record)
    cut = data.draw(st.integers(0, len(wire) - 1))
    with pytest.raises(RecordError, match=f"{cut} bytes are no {type(record).__name__} record"):
        decode_record(wire[:cut], type(record))


@given(st.binary(max_size=64))
def test_random_bytes_are_never_a_record(data: bytes) -> None:
    with pytest.raises(RecordError):
        decode_record(data, Group)


def test_a_record_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match="expected a Group record, found Reissue"):
        decode_record(encode_record(Reissue(position=1, reason="old")), Group)


def test_a_record_of_another_version_is_refused() -> None:
    newer = Reissue(position=1, reason="old", version=WIRE_VERSION + 1)
    with pytest.raises(RecordError, match=f"version {WIRE_VERSION + 1}; this code reads version {WIRE_VERSION}"):
        decode_record(encode_record(newer), Reissue)


def with_checksum(fields: dict[str, Any]) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return zlib.crc32(body).to_bytes(4, "little") + body


@given(records, st.data())
def test_a_record_with_one_flipped_bit_is_an_error(record: Record, data: st.DataObject) -> None:
    wire = bytearray(encode_record(record))
    wire[data.draw(st.integers(0, len(wire) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(RecordError, match="checksum differs"):
        decode_record(bytes(wire), type(record))


def test_a_kind_that_this_code_does_not_know_is_refused() -> None:
    wire = with_checksum({"kind": "telegram", "version": WIRE_VERSION})
    with pytest.raises(RecordError, match="telegram"):
        decode_record(wire, Group)


def test_a_text_that_is_not_utf_8_is_refused() -> None:
    body = msgspec.msgpack.encode(Reissue(position=3, reason="old")).replace(b"old", b"o\xffd")
    with pytest.raises(RecordError, match="'utf-8' codec can't decode byte 0xff"):
        decode_record(zlib.crc32(body).to_bytes(4, "little") + body, Reissue)


def test_a_missing_field_is_named() -> None:
    wire = with_checksum({"kind": "reissue", "version": WIRE_VERSION, "position": 3})
    with pytest.raises(RecordError, match="reason"):
        decode_record(wire, Reissue)


def a_sample(tokens: int, sampled: int, logprobs: int) -> Sample:
    return Sample(
        tokens=np.arange(tokens, dtype="<i4").tobytes(),
        sampled=np.minimum(np.arange(sampled), 1).astype("<u1").tobytes(),
        logprobs=np.linspace(-2, 0, logprobs, dtype="<f4").tobytes(),
        reward=1.0,
        version_min=1,
        version_max=2,
        finish="stop",
    )


def test_arrays_come_back_with_their_type_and_values_and_cannot_be_written() -> None:
    sample = decode_record(encode_record(a_sample(3, 3, 3)), Sample)
    sample.check()
    assert sample.token_array().tolist() == [0, 1, 2]
    assert sample.sampled_array().tolist() == [0, 1, 1]
    assert sample.logprob_array().tolist() == [-2, -1, 0]
    assert sample.logprob_array().dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        sample.token_array()[0] = 7


@pytest.mark.parametrize(("tokens", "sampled", "logprobs"), [(2, 3, 3), (3, 2, 3), (3, 3, 2)])
def test_arrays_of_different_lengths_are_refused(tokens: int, sampled: int, logprobs: int) -> None:
    with pytest.raises(RecordError, match=rf"\({tokens}, {sampled}, {logprobs}\)"):
        a_sample(tokens, sampled, logprobs).check()


VOCABULARY = 32
POISON: dict[str, dict[str, Any]] = {
    "part of a number": {"tokens": b"\0" * 13},
    "no tokens": {"tokens": b"", "sampled": b"", "logprobs": b""},
    "no prompt": {"sampled": b"\1\1\1"},
    "not 0 or 1": {"sampled": b"\0\2\1"},
    "a negative token": {"tokens": np.array([1, -1, 2], "<i4").tobytes()},
    "a log-probability": {"logprobs": np.array([0, np.nan, 0], "<f4").tobytes()},
    "a reward": {"reward": float("inf")},
    "a reward of no use": {"reward": 2.2e307},
    "versions": {"version_min": 3},
}


@pytest.mark.parametrize("change", POISON.values(), ids=POISON)
def test_a_sample_that_makes_no_sense_is_refused_though_it_decodes(change: dict[str, Any]) -> None:
    good = a_sample(3, 3, 3)
    good.check()
    poisoned = decode_record(encode_record(msgspec.structs.replace(good, **change)), Sample)
    with pytest.raises(RecordError):
        poisoned.check()
    group = Group(position=0, prompt=0, samples=(good, poisoned))
    with pytest.raises(RecordError):
        PreparedGroup(group=group, advantages=(0, 0)).check(64, VOCABULARY)


@pytest.mark.parametrize(
    ("advantages", "length", "named"),
    [
        ((0.5,), 3, "1 advantages for 2"),
        ((0.5, float("nan")), 3, "not finite"),
        ((0, 0), 65, "model.max_length=64"),
        ((0, 0), VOCABULARY + 1, f"token id {VOCABULARY} is outside of the vocabulary of {VOCABULARY}"),
    ],
)
def test_advantages_that_do_not_fit_and_samples_that_no_model_takes_are_refused(
    advantages: tuple[float, ...], length: int, named: str
) -> None:
    group = Group(position=0, prompt=0, samples=(a_sample(length, length, length),) * 2)
    with pytest.raises(RecordError, match=named):
        PreparedGroup(group=group, advantages=advantages).check(64, VOCABULARY)
    PreparedGroup(group=group, outcome="filtered: zero advantage").check(64, VOCABULARY)


def test_a_position_below_zero_does_not_decode() -> None:
    with pytest.raises(RecordError, match="position"):
        decode_record(encode_record(Reissue(position=-1, reason="x")), Reissue)


def test_a_group_spends_few_bytes_besides_its_arrays() -> None:
    tokens = 600
    group = Group(position=1, prompt=1, samples=(a_sample(tokens, tokens, tokens),) * 8)
    assert len(encode_record(group)) < 8 * (9 * tokens + 200)


def sample_of(*tokens: int, **changes: Any) -> Sample:
    count = len(tokens)
    values: dict[str, Any] = {
        "tokens": np.array(tokens, "<i4").tobytes(),
        "sampled": bytes([0, *[1] * (count - 1)]),
        "logprobs": np.array([0, *[-0.5] * (count - 1)], "<f4").tobytes(),
        "reward": 1.0,
        "version_min": 3,
        "version_max": 4,
        "finish": "stop",
    }
    return Sample(**values | changes)


def test_another_training_input_is_another_fingerprint_and_nothing_else_is() -> None:
    """The same rows in another encoding have the same fingerprint: a branch with its prefix, or without one."""
    group = Group(position=7, prompt=2, samples=(sample_of(1, 2, 3), sample_of(1, 4)))
    others = (
        (sample_of(1, 4), sample_of(1, 2, 3)),
        (sample_of(1, 2, 9), sample_of(1, 4)),
        (sample_of(1, 2, 3, reward=0.5), sample_of(1, 4)),
        (sample_of(1, 2, 3, sampled=bytes([0, 0, 1])), sample_of(1, 4)),
        (sample_of(1, 2, 3, logprobs=bytes(12)), sample_of(1, 4)),
        (sample_of(1, 2, 3, version_offsets=bytes([0, 0, 1])), sample_of(1, 4)),
        (sample_of(1, 2, 3),),
    )
    prints = {Group(position=7, prompt=2, samples=samples).fingerprint() for samples in others}
    assert len(prints | {group.fingerprint()}) == len(others) + 1
    same = Group(position=8, prompt=2, samples=(sample_of(1, 2, 3, server="a", seconds=2.0), sample_of(1, 4)))
    assert same.fingerprint() == group.fingerprint()
    assert group.versions == (3, 4)

    def branched(of: int, shared: int, *tokens: int, sampled: bytes) -> str:
        own = {"tokens": np.array(tokens, "<i4").tobytes(), "logprobs": bytes(4 * len(tokens))}
        branch = Branch(of=of, shared=shared, sampled=sampled, **own)
        return Group(position=7, prompt=2, samples=(sample_of(1, 2, 3, branches=(branch,)),)).fingerprint()

    assert branched(0, 2, 5, sampled=bytes([1])) == branched(0, 0, 1, 2, 5, sampled=bytes([0, 0, 1]))
