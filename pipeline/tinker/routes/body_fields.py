"""Fields of bodies, checked.

Owns what a client may write in them. Promises that a field which does not fit raises `ApiError` with its name. Pure."""

import sys
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.entities import SavedWeights
from pipeline.tinker.model_requests import Request
from pipeline.tinker.sampling_limits import is_decimal, is_number, is_whole
from pipeline.tinker.tinker_paths import MAX_NUMBER, stored_path
from pipeline.tinker.tinker_records import Step

CHECKPOINT_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_ADAM_FIELDS = {"lr": "learning_rate", "clip_norm": "grad_clip_norm"}
LEAST_TTL, MOST_TTL = 3600, 10 * 365 * 86400


def text(body: dict[str, Any], field: str) -> str:
    """A text that is not empty."""
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise ApiError(f"{field}={value!r}; expected a text")
    return value


def number(body: dict[str, Any], field: str, least: int = 0, most: int = MAX_NUMBER) -> int:
    """A whole number from `least` to `most`, which becomes a part of an id."""
    value: Any = body.get(field)
    if not is_whole(value, least, most):
        raise ApiError(f"{field}={repr(value)[:80]}; expected a number of {least} to {most}")
    return value


def flag(body: dict[str, Any], field: str) -> bool:
    """True or false; true where it is left out."""
    value = body.get(field, True)
    if not isinstance(value, bool):
        raise ApiError(f"{field}={value!r}; expected true or false")
    return value


def metadata(body: dict[str, Any]) -> dict[str, str] | None:
    """What a client notes on what it makes: texts by name."""
    metadata = body.get("user_metadata")
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise ApiError(f"user_metadata={str(metadata)[:80]!r}; expected an object whose values are texts")
    return metadata


def ttl(body: dict[str, Any]) -> int | None:
    """Seconds that a checkpoint is kept; None: until it is deleted."""
    seconds = body.get("ttl_seconds")
    if seconds is None:
        return None
    if not isinstance(seconds, int) or not LEAST_TTL <= seconds <= MOST_TTL:
        raise ApiError(f"ttl_seconds={seconds!r}; expected {LEAST_TTL} (an hour) to {MOST_TTL} (10 years)")
    return seconds


def step(body: dict[str, Any]) -> Step:
    """The settings of one step of AdamW, with the SDK's defaults."""
    params = body.get("adam_params")
    if not isinstance(params, dict):
        raise ApiError("optim_step without adam_params; only adamw is served")
    values = {
        "lr": params.get("learning_rate", 1e-4),
        "beta1": params.get("beta1", 0.9),
        "beta2": params.get("beta2", 0.95),
        "eps": params.get("eps", 1e-12),
        "weight_decay": params.get("weight_decay", 0.0),
        "clip_norm": params.get("grad_clip_norm", 0.0),
    }
    for name, value in values.items():
        if not is_number(value, 0.0, sys.float_info.max):
            field = _ADAM_FIELDS.get(name, name)
            raise ApiError(f"adam_params: {field}={value!r}; expected a finite number that is not negative")
    if values["beta1"] >= 1 or values["beta2"] >= 1:
        raise ApiError("adam_params: beta1 and beta2 have to be below 1")
    return Step(**{name: float(value) for name, value in values.items()})


def future(request: Request) -> dict[str, Any]:
    """What a submission is answered with."""
    return {"request_id": request.id, "model_id": request.model}


def listed(checkpoint: SavedWeights) -> dict[str, Any]:
    """A checkpoint as the SDK reads it."""
    path = stored_path(checkpoint.path)
    return {
        "checkpoint_id": path.checkpoint,
        "checkpoint_type": CHECKPOINT_TYPES.get(path.kind, path.kind),
        "time": time_of(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size,
        "public": False,
        "user_metadata": checkpoint.metadata,
        "expires_at": None if checkpoint.expires is None else time_of(checkpoint.expires),
    }


def time_of(seconds: float) -> str:
    """Seconds since the epoch, in ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def page(items: list[Any], request: web.Request) -> tuple[list[Any], dict[str, int]]:
    """The items that `offset` and `limit` of the address select, and the cursor of that page."""

    def query(name: str, otherwise: int) -> int:
        value = request.query.get(name, str(otherwise))
        if not is_decimal(value):
            raise ApiError(f"{name}={value[:80]!r}; expected a number of 18 digits at most")
        return int(value)

    offset, limit = query("offset", 0), query("limit", 100)
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}
