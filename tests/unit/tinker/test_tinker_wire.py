"""Protobuf to records, and back."""

from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.tinker import json_limits, tinker_wire
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.tinker_records import Pass, PassResult

FLOAT32, INT64 = 1, 2
LONGEST = 16


def tensor(values: Any, *, sparse: tuple[Any, Any] | None = None, shape: Any = None) -> Any:
    array = np.asarray(values)
    kind, dtype = (INT64, "<i8") if array.dtype.kind == "i" else (FLOAT32, "<f4")
    message = tinker_wire.protocol().Tensor(dtype=kind, shape=array.shape if shape is None else shape)
    if sparse is None:
        message.dense = array.astype(dtype).tobytes()
    else:
        message.sparse_csr.values = array.astype(dtype).tobytes()
        message.sparse_csr.crow_indices = np.asarray(sparse[0], "<i8").tobytes()
        message.sparse_csr.col_indices = np.asarray(sparse[1], "<i8").tobytes()
    return message


def request(tokens: list[int], loss: str = "cross_entropy", **inputs: Any) -> Any:
    message = tinker_wire.protocol().ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=loss)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
    for name, value in inputs.items():
        datum.loss_fn_inputs[name].CopyFrom(value)
    return message


def read(message: Any) -> Pass:
    model, seq, parsed = tinker_wire.read_pass(message.SerializeToString())
    assert (model, seq) == ("m", 1)
    return tinker_wire.pass_of(parsed, LONGEST)


def refusal(message: Any) -> str:
    with pytest.raises(ApiError) as refused:
        read(message)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_datum_asks_one_question_at_every_position() -> None:
    (datum,) = read(request([5, 6, 7], target_tokens=tensor([6, 7, 8]), weights=tensor([0.0, 1.0, -2.0]))).data
    assert np.frombuffer(datum.tokens, np.int32).tolist() == [5, 6, 7]
    assert np.frombuffer(datum.at, np.int64).tolist() == [0, 1, 2]
    assert np.frombuffer(datum.targets, np.int32).tolist() == [6, 7, 8]
    assert np.frombuffer(datum.columns["weights"], np.float32).tolist() == [0.0, 1.0, -2.0]
    assert datum.width == 0


def test_several_targets_at_a_position_are_several_questions() -> None:
    targets, weights = tensor([[1, 2], [3, 4]]), tensor([[0.5, 0.5], [1.0, 0.0]])
    (datum,) = read(request([5, 6], target_tokens=targets, weights=weights)).data
    assert np.frombuffer(datum.at, np.int64).tolist() == [0, 0, 1, 1]
    assert np.frombuffer(datum.targets, np.int32).tolist() == [1, 2, 3, 4]
    assert datum.width == 2


def test_of_a_sparse_matrix_only_the_cells_that_it_names_are_asked_for() -> None:
    crow, col = [0, 1, 1, 3], [2, 0, 1]
    targets = tensor([7, 8, 9], sparse=(crow, col), shape=[3, 3])
    weights = tensor([1.0, 2.0, 3.0], sparse=(crow, col), shape=[3, 3])
    (datum,) = read(request([5, 6, 7], target_tokens=targets, weights=weights)).data
    assert np.frombuffer(datum.at, np.int64).tolist() == [0, 2, 2]
    assert np.frombuffer(datum.columns["weights"], np.float32).tolist() == [1.0, 2.0, 3.0]
    answer = datum.answer(np.array([-1.0, -2.0, -3.0], np.float32)).reshape(3, 3)
    assert answer.tolist() == [[0, 0, -1.0], [0, 0, 0], [-2.0, -3.0, 0]]


def test_the_newer_form_of_a_setting_is_preferred_and_others_have_their_defaults() -> None:
    inputs = {"target_tokens": tensor([6]), "logprobs": tensor([-1.0]), "advantages": tensor([1.0])}
    message = request([5], "ppo", **inputs)
    message.loss_fn_config["clip_low_threshold"] = 0.5
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.7
    assert read(message).settings == {"clip_low_threshold": 0.7, "clip_high_threshold": 1.2}


GOOD = {"target_tokens": tensor([6, 7]), "weights": tensor([1.0, 1.0])}
RL = {"target_tokens": tensor([6, 7]), "logprobs": tensor([-1.0, -1.0]), "advantages": tensor([1.0, 1.0])}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (request([5, 6], "nothing", **GOOD), "expected one of"),
        (request([5, 6], "stable_reinforce", **RL), "not served: .* take loss_fn=importance_sampling"),
        (request([5, 6], "gspo", **RL), "no sequence_ratio_mask"),
        (request([5, 6], "gspo", **RL, sequence_ratio_mask=tensor([0.0, 0.0])), "datum 0: .* marks no token"),
        (request([5, 6], **{**GOOD, "mask": tensor([1.0, 1.0])}), "'mask'"),
        (request([5, 6], weights=tensor([1.0, 1.0])), "no target_tokens"),
        (request([5, 6], "ppo", target_tokens=tensor([6, 7])), "'target_tokens'|no logprobs"),
        (request([5, 6], **{**GOOD, "weights": tensor([1.0])}), "shape"),
        (request([5, 6], **{**GOOD, "weights": tensor([1.0, float("nan")])}), "not finite"),
        (request([5, 6], **{**GOOD, "weights": tensor([1, 1])}), "expected float32"),
        (request([5, 6], **{**GOOD, "target_tokens": tensor([1.0, 1.0])}), "expected int64"),
        (request([5, 6], **{**GOOD, "target_tokens": tensor([6, -1])}), "no tokens"),
        (request([], **GOOD), "no tokens"),
        (request([5] * 17, target_tokens=tensor([6] * 17)), "at most 16"),
        (request([5, 6], target_tokens=tensor([6, 7], shape=[2, 1 << 40])), "K of 1"),
        (request([5, 6], target_tokens=tensor([6], sparse=([0, 1, 1], [9]), shape=[2, 3])), "column outside"),
        (request([5, 6], target_tokens=tensor([6], sparse=([0, 2, 1], [0]), shape=[2, 3])), "does not fit"),
        (request([5, 6], target_tokens=tensor([6, 6], sparse=([0, 2, 2], [0, 0]), shape=[2, 3])), "twice"),
    ],
)
def test_what_a_loss_cannot_take_is_refused_in_one_line_that_says_where(message: Any, says: str) -> None:
    import re

    assert re.search(says, refusal(message))


def test_the_cells_of_a_request_are_bounded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_wire, "MAX_CELLS", 100)
    one = request([5, 6], target_tokens=tensor([6], sparse=([0, 1, 1], [9]), shape=[2, 20]))
    assert len(read(one).data) == 1
    two = request([5, 6], target_tokens=tensor([6], sparse=([0, 1, 1], [9]), shape=[2, 20]))
    two.data.extend([one.data[0], one.data[0]])
    assert "datum 2: target_tokens: the request asks for more than 100 cells" in refusal(two)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_refusal(body: bytes) -> None:
    good = request([5, 6], **GOOD).SerializeToString()
    for candidate in (body, good + body, good[: len(body)] + body):
        try:
            _, _, message = tinker_wire.read_pass(candidate)
            tinker_wire.pass_of(message, LONGEST)
        except ApiError:
            continue


def test_a_body_may_be_compressed_and_none_grows_beyond_the_limit() -> None:
    plain = b"a" * 1000
    packed = zstandard.ZstdCompressor().compress(plain)
    assert tinker_wire.decompressed(packed, "zstd", 1000) == plain
    with pytest.raises(ApiError) as refused:
        tinker_wire.decompressed(packed, "zstd", 999)
    assert refused.value.status == 413
    with pytest.raises(ApiError, match="no zstd"):
        tinker_wire.decompressed(b"nothing", "zstd", 1000)


def test_answers_are_read_by_the_sdk_itself_as_they_were_given() -> None:
    from tinker.proto.response_conv import deserialize_forward_backward_output

    rows = [np.array([-1.0, -2.0], np.float32), np.array([[-1.0, -2.0], [-3.0, -4.0]], np.float32)]
    passed = PassResult([row.tobytes() for row in rows] * 2, [0, 2, 0, 2], {"loss:sum": 3.0})
    output = deserialize_forward_backward_output(tinker_wire.pass_message(passed))
    assert output.metrics == {"loss:sum": 3.0}
    for row, found in zip(rows * 2, output.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(found["logprobs"].to_numpy(), row)


def test_a_body_of_countless_messages_is_refused_before_it_is_parsed() -> None:
    """Empty data take two bytes each on the wire, and a hundred parsed."""
    request = tinker_wire.protocol().ForwardBackwardRequest
    many = b"\x1a\x00" * (json_limits.SMALL_BYTES // 2 + 1)
    nested = (
        request(data=[{}]).SerializeToString()[:1] + b"\x82\x80\x40" + b"\n\x00" * (json_limits.SMALL_BYTES // 2 + 1)
    )
    for body in (many, nested):
        with pytest.raises(ApiError, match="more than 262144 fields") as refused:
            tinker_wire.read_pass(body)
        assert refused.value.status == 413
    for torn in (b"\xff" * (json_limits.SMALL_BYTES + 1), many[:8] + b"\x1a" + b"\xff" * json_limits.SMALL_BYTES):
        with pytest.raises(ApiError, match="no ForwardBackwardRequest"):
            tinker_wire.read_pass(torn)
    with pytest.raises(ApiError, match="group"):
        tinker_wire.read_pass(b"\x1b" + many)


def test_a_large_body_of_few_messages_is_read() -> None:
    request = tinker_wire.protocol().ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(4):
        request.data.add().model_input.add().encoded_text.tokens = bytes(json_limits.SMALL_BYTES)
    assert tinker_wire.read_pass(request.SerializeToString())[:2] == ("m", 1)
