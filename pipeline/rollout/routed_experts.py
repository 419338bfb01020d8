"""The routed experts in a server's response, as one record of bytes for each token.

vLLM returns them as an array [tokens, layers, experts of a token] in base64 of numpy's file format, of all tokens that
the server read: the prompt from the requested token on, and the sampled tokens but the last.
"""

import base64
import binascii
from collections.abc import Sequence
from io import BytesIO

import numpy as np

from pipeline.config.routing_shape import RoutingShape
from pipeline.errors import RolloutError


def parse_routed_experts(text: str | None, shape: RoutingShape, most: int) -> tuple[bytes, ...]:
    """The record of each token of a response, at most `most`; none where the server returned none.

    `ValueError` for what is no array, `RolloutError` for an array of another model.
    """
    if not text:
        return ()
    try:
        ids = np.load(BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, EOFError) as error:
        raise ValueError(f"routed experts are no array: {error}") from None
    if ids.ndim != 3 or ids.shape[1:] != (shape.layers, shape.per_token) or ids.dtype.kind not in "ui":
        expected = f"[tokens, {shape.layers}, {shape.per_token}]"
        raise RolloutError(f"the server returned routed experts {list(ids.shape)} of {ids.dtype}, expected {expected}")
    if len(ids) > most:
        raise ValueError(f"routed experts of {len(ids)} tokens, but the server read {most}")
    return split_records(ids.astype(shape.dtype).tobytes(), shape.token_bytes)


def split_records(data: bytes, token_bytes: int) -> tuple[bytes, ...]:
    """Records end to end as one for each token."""
    return tuple(data[start : start + token_bytes] for start in range(0, len(data), token_bytes))


def known_records(tokens: Sequence[int], earlier: Sequence[int], records: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """The records of a request's `tokens` that an `earlier` request has, which the tokens must continue."""
    continues = records and len(earlier) < len(tokens) and list(tokens[: len(earlier)]) == list(earlier)
    return records if continues else ()
