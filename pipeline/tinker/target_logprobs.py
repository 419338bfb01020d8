"""Log-probabilities of named tokens at positions of a prompt: `target_prompt_logprobs` of the SDK.

A server gives the log-probabilities of the tokens that a prompt has. So a named token is scored as the last token of a
separate prompt: the client's prompt up to the token's position, and the token. That costs a forward pass of each such
prompt, and the sum of their lengths has a limit. Pure.

    targets = read_targets(body, len(tokens))       # None: the request names no tokens
    scores = {cell: … for cell in targets.cells}    # of the last token of targets.prompt(tokens, cell)
    targets.tensor(scores)                          # protobuf, in the shape and layout of the request
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.tinker import tinker_wire
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.sampling_limits import is_whole

MAX_SCORED_TOKENS = 1 << 20
"""Tokens of all prompts that one request has servers score."""
MAX_PARALLEL_SCORES = 32
"""Prompts of one request that a server scores at once."""
_FIELD = "target_prompt_logprobs"
_MAX_ID = (1 << 31) - 1
Cell = tuple[int, int]
"""A row, which is one less than the position in the prompt, and a token."""


@dataclass(frozen=True)
class Targets:
    """The named tokens of one request.

    Attributes:
        rows, ids: int64[cells of the request] each; an id of -1 names no token.
        shape: (prompt tokens - 1, K).
        crow, columns: of the CSR matrix; None: the matrix is dense, and its cells are in order.
    """

    rows: NDArray[np.int64]
    ids: NDArray[np.int64]
    shape: tuple[int, int]
    crow: NDArray[np.int64] | None
    columns: NDArray[np.int64] | None

    @property
    def cells(self) -> list[Cell]:
        """Each pair of a position and a token once, in order."""
        return sorted({(int(row), int(id)) for row, id in zip(self.rows, self.ids, strict=True) if id >= 0})

    @staticmethod
    def prompt(tokens: list[int], cell: Cell) -> list[int]:
        """The prompt whose last token's log-probability is that of the cell."""
        return [*tokens[: cell[0] + 1], cell[1]]

    def tensor(self, scores: Mapping[Cell, float]) -> Any:
        """The answer as protobuf: float32, 0 where no token was named."""
        proto = tinker_wire.protocol()
        pairs = zip(self.rows.tolist(), self.ids.tolist(), strict=True)
        values = np.array([scores[pair] if pair[1] >= 0 else 0.0 for pair in pairs], "<f4").tobytes()
        tensor = proto.Tensor(dtype=proto.DTYPE_FLOAT32, shape=self.shape)
        if self.crow is None or self.columns is None:
            tensor.dense = values
            return tensor
        crow, columns = self.crow.astype("<i8").tobytes(), self.columns.astype("<i8").tobytes()
        tensor.sparse_csr.CopyFrom(proto.SparseCsr(values=values, crow_indices=crow, col_indices=columns))
        return tensor


def read_targets(body: Mapping[str, Any], length: int) -> Targets | None:
    """The named tokens of a request whose prompt has `length` tokens; `ApiError` for what cannot be scored."""
    tensor = body.get(_FIELD)
    if tensor is None:
        return None
    if not isinstance(tensor, dict) or tensor.get("dtype") != "int64":
        raise ApiError(f"{_FIELD}: expected a tensor of dtype int64")
    shape = tensor.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or shape[0] != length - 1 or not is_whole(shape[1], 1):
        raise ApiError(f"{_FIELD}: shape {str(shape)[:80]}; expected [{length - 1}, K], a row less than prompt tokens")
    ids = _whole_numbers(tensor.get("data"), "data", -1, _MAX_ID)
    targets = _sparse(tensor, ids, shape) if tensor.get("sparse_crow_indices") is not None else _dense(ids, shape)
    cells = targets.cells
    if not cells:
        raise ApiError(f"{_FIELD} names no token; leave it out")
    scored = sum(row + 2 for row, _ in cells)
    if scored > MAX_SCORED_TOKENS:
        most = f"{MAX_SCORED_TOKENS} tokens of prompts; ask for fewer positions, or fewer tokens at each"
        raise ApiError(f"{_FIELD}: {len(cells)} tokens at {scored} tokens of prompts; expected at most {most}")
    return targets


def max_sequences(body: Mapping[str, Any], length: int) -> int:
    """The most sequences that a request with a prompt of `length` tokens has at a server at once."""
    targets = read_targets(body, length)
    scores = min(MAX_PARALLEL_SCORES, len(targets.cells)) if targets else 0
    return max(int(body.get("num_samples", 1)), scores)


def _dense(ids: NDArray[np.int64], shape: list[int]) -> Targets:
    if len(ids) != shape[0] * shape[1]:
        raise ApiError(f"{_FIELD}: {len(ids)} values; expected those of {shape}")
    return Targets(np.repeat(np.arange(shape[0]), shape[1]), ids, (shape[0], shape[1]), None, None)


def _sparse(matrix: Mapping[str, Any], ids: NDArray[np.int64], shape: list[int]) -> Targets:
    crow = _whole_numbers(matrix.get("sparse_crow_indices"), "sparse_crow_indices", 0, len(ids))
    columns = _whole_numbers(matrix.get("sparse_col_indices"), "sparse_col_indices", 0, shape[1] - 1)
    fits = len(crow) == shape[0] + 1 and len(columns) == len(ids) and crow[0] == 0 and crow[-1] == len(ids)
    if not fits or (np.diff(crow) < 0).any():
        raise ApiError(f"{_FIELD}: the CSR matrix does not fit its shape {shape}")
    rows = np.repeat(np.arange(shape[0]), np.diff(crow))
    return Targets(rows, ids, (shape[0], shape[1]), crow, columns)


def _whole_numbers(values: Any, name: str, least: int, most: int) -> NDArray[np.int64]:
    if not isinstance(values, list) or not all(is_whole(value, least, most) for value in values):
        raise ApiError(f"{_FIELD}: {name}: expected a list of whole numbers from {least} to {most}")
    return np.array(values, np.int64)
