"""From the SDK's wire to records, and back.

Owns protobuf, its compression, and the JSON of requests that have numbers in them. Promises that what does not fit
raises `ApiError` with one line that names the datum and its field, before anything else looks at it; and that no length
which a client names makes the server allocate more than the request's own limit allows. Must not know HTTP's routes,
models or the store.

Tokens come as int32, targets as int64, all other numbers as float32. Targets and weights may be [N], [N, K], or CSR.
"""

import io
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.algorithms.summed_losses import NOT_SERVED, SUMMED_LOSSES
from pipeline.errors import ConfigError
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.json_limits import check_fields
from pipeline.tinker.tinker_paths import MAX_NUMBER
from pipeline.tinker.tinker_records import Datum, Pass, PassResult
from pipeline.utils.optional_extras import pip_install

Array = NDArray[Any]
_DTYPES: Mapping[int, str] = {1: "<f4", 2: "<i8"}
_FLOAT32 = 1
PLAIN = ("", "identity")
"""Encodings of a body that is as it was sent."""
MAX_WIDTH = 1 << 14
"""K of [N, K]: what one position may ask for."""
MAX_CELLS = 1 << 24
"""The sum of N × K: what one request may ask for."""


@cache
def protocol() -> Any:
    """The SDK's protobuf module, from its wheel, without the rest of the SDK, which imports a client's world.

    `ConfigError` where the wheel is not installed.
    """
    package = find_spec("tinker")
    folder = next(iter(package.submodule_search_locations or ()), "") if package else ""
    file = Path(folder) / "proto" / "tinker_public_pb2.py"
    if not folder or not file.is_file():
        expected = "the wheel of the tinker SDK, for its protobuf module"
        raise ConfigError("serve.enabled", True, expected, pip_install("tinker"))
    spec = spec_from_file_location("rollcall_tinker_public_pb2", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decompressed(body: bytes, encoding: str, limit: int) -> bytes:
    """The body of a request; `ApiError` if it is larger than `limit`, or in an encoding that nobody sends. It holds
    Python's lock for moments only, so in a separate thread it does not delay other requests."""
    if encoding in PLAIN:
        return body
    if encoding != "zstd":
        raise ApiError(f"Content-Encoding {encoding!r}; expected zstd or none", 415)
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)) as reader:
            plain: bytes = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise ApiError(f"the body is no zstd: {error}") from None
    if len(plain) > limit:
        raise ApiError(f"the request is larger than {limit} bytes when decompressed", 413)
    return plain


def read_pass(body: bytes) -> tuple[str, int, Any]:
    """Model, seq and the message itself; `ApiError` if the bytes are no such request."""
    message = protocol().ForwardBackwardRequest()
    check_fields(body, message.DESCRIPTOR)
    try:
        message.ParseFromString(body)
    except Exception as error:  # noqa: BLE001 (protobuf's own error class depends on its implementation)
        raise ApiError(f"the body is no ForwardBackwardRequest: {error}") from None
    if not message.model_id or not 1 <= message.seq_id <= MAX_NUMBER:
        raise ApiError(f"a forward_backward needs a model_id and a seq_id of 1 to {MAX_NUMBER}")
    return message.model_id, message.seq_id, message


def pass_of(message: Any, longest: int) -> Pass:
    """The record of a request; `ApiError` for a loss that there is not, or data that it cannot take, such as one of
    more than `longest` tokens."""
    loss = str(message.loss_fn)
    if loss in NOT_SERVED:
        raise ApiError(f"loss_fn {loss!r} is not served: {NOT_SERVED[loss]}")
    if loss not in SUMMED_LOSSES:
        raise ApiError(f"loss_fn {loss!r}; expected one of {', '.join(SUMMED_LOSSES)}")
    room = _CellBudget()
    data = tuple(_datum(datum, loss, longest, room, f"datum {index}") for index, datum in enumerate(message.data))
    if not data:
        raise ApiError("forward_backward without data")
    return Pass(data, loss, settings_of(loss, _message_fields(message)), not message.forward_only)


def settings_of(loss: str, settings: Mapping[str, float]) -> dict[str, float]:
    """All settings of a loss; `ApiError` for one that it does not have, or that is no number."""
    known = SUMMED_LOSSES[loss].settings
    for name, value in settings.items():
        if name not in known:
            raise ApiError(f"loss_fn_config {name!r}; {loss} takes {', '.join(known) or 'none'}")
        if not np.isfinite(value):
            raise ApiError(f"loss_fn_config {name}={value}; expected a finite number")
    settings = {**known, **settings}
    if "clip_low_threshold" in settings and settings["clip_low_threshold"] > settings["clip_high_threshold"]:
        raise ApiError("loss_fn_config: clip_low_threshold is above clip_high_threshold")
    return settings


def _message_fields(message: Any) -> dict[str, float]:
    config = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise ApiError(f"loss_fn_config {name!r} is no number")
        config[name] = value.number
    return config


class _CellBudget:
    """The cells that a request may still ask for. A CSR matrix counts with its whole shape, not its values."""

    def __init__(self) -> None:
        self._left = MAX_CELLS

    def take(self, cells: int, name: str) -> None:
        """Take `cells` from the budget; `ApiError` if fewer are left."""
        self._left -= cells
        if self._left < 0:
            raise ApiError(f"{name}: the request asks for more than {MAX_CELLS} cells (N × K of all data); split it")


def _datum(message: Any, loss: str, longest: int, room: _CellBudget, name: str) -> Datum:
    tokens = _tokens(message.model_input, name)
    if len(tokens) > longest:
        raise ApiError(f"{name}: {len(tokens)} tokens; expected at most {longest} (model.max_length)")
    inputs = dict(message.loss_fn_inputs)
    fields = SUMMED_LOSSES[loss].columns
    known = {"target_tokens", *fields}
    for field in inputs:
        if field not in known:
            raise ApiError(f"{name}: loss_fn_inputs {field!r}; {loss} reads {', '.join(sorted(known))}")
    if "target_tokens" not in inputs:
        raise ApiError(f"{name}: loss_fn_inputs has no target_tokens")
    targets, cells, width = _targets(inputs["target_tokens"], len(tokens), room, f"{name}: target_tokens")
    columns = {}
    for field in fields:
        if field in inputs:
            values = _column(inputs[field], len(tokens), width, f"{name}: {field}")
        elif field == "weights":
            values = np.ones(len(tokens) * max(1, width), np.float32)
        else:
            raise ApiError(f"{name}: loss_fn_inputs has no {field}, which {loss} reads")
        values = values if cells is None else values[cells]
        if field == "sequence_ratio_mask" and not values.any():
            raise ApiError(f"{name}: {field} marks no token; expected 1 at each sampled one")
        columns[field] = values.tobytes()
    flat = np.arange(len(tokens) * max(1, width), dtype=np.int64) if cells is None else cells
    at = flat // max(1, width)
    return Datum(
        tokens.tobytes(),
        at.tobytes(),
        targets.astype("<i4").tobytes(),
        columns,
        width,
        b"" if cells is None else cells.tobytes(),
    )


def _tokens(chunks: Any, name: str) -> Array:
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ApiError(f"{name}: a chunk of kind {kind}; only encoded_text is served")
        if len(chunk.encoded_text.tokens) % 4:
            raise ApiError(f"{name}: encoded_text.tokens is no array of int32")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not len(tokens):
        raise ApiError(f"{name}: model_input has no tokens")
    return tokens


def _targets(tensor: Any, length: int, room: _CellBudget, name: str) -> tuple[Array, Array | None, int]:
    """Target tokens, the flat cells that they are asked for in (None: all, in order), and K (0 for [N])."""
    shape = _shape(tensor, name, length)
    width = shape[1] if len(shape) == 2 else 0
    room.take(length * max(1, width), name)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        values, cells = _sparse(tensor, shape, name)
    else:
        values, cells = _dense(tensor, shape, name), None
    if values.dtype != np.int64:
        raise ApiError(f"{name}: expected int64")
    if len(values) and (values.min() < 0 or values.max() > np.iinfo(np.int32).max):
        raise ApiError(f"{name}: holds {values.min()} … {values.max()}, which are no tokens")
    return values, cells, width


def _column(tensor: Any, length: int, width: int, name: str) -> Array:
    """Numbers for every cell of [N] or [N, K], flat."""
    shape = _shape(tensor, name, length)
    if (shape[1] if len(shape) == 2 else 0) != width:
        raise ApiError(f"{name}: shape {list(shape)}; expected that of target_tokens")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        values, cells = _sparse(tensor, shape, name)
        whole = np.zeros(length * max(1, width), np.float32)
        whole[cells] = values
        values = whole
    else:
        values = _dense(tensor, shape, name)
    if values.dtype != np.float32:
        raise ApiError(f"{name}: expected float32")
    if not np.isfinite(values).all():
        raise ApiError(f"{name}: holds a value that is not finite")
    return values


def _shape(tensor: Any, name: str, length: int) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if not shape and tensor.WhichOneof("encoding") == "dense":
        shape = (len(tensor.dense) // np.dtype(_dtype(tensor, name)).itemsize,)
    if len(shape) not in (1, 2) or shape[0] != length:
        raise ApiError(f"{name}: shape {list(shape)}; expected [{length}] or [{length}, K]")
    if len(shape) == 2 and not 0 < shape[1] <= MAX_WIDTH:
        raise ApiError(f"{name}: shape {list(shape)}; expected K of 1 to {MAX_WIDTH}")
    return shape


def _dtype(tensor: Any, name: str) -> str:
    if tensor.dtype not in _DTYPES:
        raise ApiError(f"{name}: expected dtype float32 or int64")
    return _DTYPES[tensor.dtype]


def _dense(tensor: Any, shape: tuple[int, ...], name: str) -> Array:
    dtype = np.dtype(_dtype(tensor, name))
    if len(tensor.dense) != int(np.prod(shape)) * dtype.itemsize:
        raise ApiError(f"{name}: {len(tensor.dense)} bytes; expected {list(shape)} of {dtype.name}")
    return np.frombuffer(tensor.dense, dtype)


def _sparse(tensor: Any, shape: tuple[int, ...], name: str) -> tuple[Array, Array]:
    """The values of a CSR matrix, and the flat cell of each."""
    if len(shape) != 2:
        raise ApiError(f"{name}: CSR of shape {list(shape)}; expected [N, K]")
    csr, dtype = tensor.sparse_csr, np.dtype(_dtype(tensor, name))
    if len(csr.values) % dtype.itemsize or len(csr.crow_indices) % 8 or len(csr.col_indices) % 8:
        raise ApiError(f"{name}: arrays of the CSR matrix end in the middle of a number")
    values = np.frombuffer(csr.values, dtype)
    rows, columns = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
    fits = len(rows) == shape[0] + 1 and len(columns) == len(values)
    if not fits or rows[0] or rows[-1] != len(values) or (np.diff(rows) < 0).any():
        raise ApiError(f"{name}: the CSR matrix does not fit its shape {list(shape)}")
    if len(columns) and (columns.min() < 0 or columns.max() >= shape[1]):
        raise ApiError(f"{name}: the CSR matrix has a column outside 0 … {shape[1] - 1}")
    cells = np.repeat(np.arange(shape[0]), np.diff(rows)) * shape[1] + columns
    if len(np.unique(cells)) != len(cells):
        raise ApiError(f"{name}: the CSR matrix names a cell twice")
    return values, cells.astype(np.int64)


def pass_message(result: PassResult) -> bytes:
    """The protobuf that the SDK reads: one record for each run of data of one width, in order."""
    proto = protocol()
    message = proto.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(result.metrics)
    start = 0
    while start < len(result.logprobs):
        width, end = result.widths[start], start
        while end < len(result.logprobs) and result.widths[end] == width:
            end += 1
        parts = result.logprobs[start:end]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(parts))
        record.fields["logprobs"].CopyFrom(
            proto.BatchedTensor(
                data=b"".join(parts),
                offsets=offsets.tobytes(),
                dtype=_FLOAT32,
                trailing_shape=[width] if width else [],
            )
        )
        start = end
    return bytes(message.SerializeToString())
