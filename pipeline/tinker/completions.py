"""OpenAI's requests and answers, as far as the gateway reads them.

Owns which fields a client may send, and what becomes of an answer on its way back. Promises that a field which is not
listed here is refused by its name; that no request has a server open an address or read media; and that an answer names
the model as the client did. What a field means is the server's: vLLM checks its values. Pure.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.forwarding import CHAT, COMPLETION
from pipeline.tinker.sampling_limits import is_whole

_MAX_ID = (1 << 31) - 1
_SHARED = frozenset(
    {
        *("model", "stream", "stream_options", "n", "seed", "stop", "stop_token_ids", "ignore_eos"),
        *("temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs", "prompt_logprobs", "logit_bias"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "response_format"),
        *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens"),
        *("return_token_ids", "return_tokens_as_token_ids"),
    }
)
FIELDS: Mapping[str, frozenset[str]] = {
    COMPLETION: _SHARED | {"prompt", "echo"},
    CHAT: _SHARED
    | {
        *("messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls"),
        *("reasoning_effort", "include_reasoning", "chat_template_kwargs"),
        *("add_generation_prompt", "continue_final_message"),
    },
}
LABELS = frozenset({"user", "safety_identifier", "prompt_cache_key", "metadata"})
"""Fields that change no answer: taken, and not passed on."""
_USAGE = {"include_usage": True, "continuous_usage_stats": True}


def checked_body(route: str, body: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The body for a server that makes at most `most` completions at once; `ApiError` names the field that is not
    served."""
    fields = {name: value for name, value in body.items() if value is not None and name not in LABELS}
    for name in fields:
        if name not in FIELDS[route]:
            raise ApiError(f"{name} is not served by {route}; leave it out")
    for name in ("stream", "echo"):
        if not isinstance(fields.get(name, False), bool):
            raise ApiError(f"{name}={_short(fields[name])}; expected true or false")
    choices = fields.get("n", 1)
    if not is_whole(choices, 1, most):
        raise ApiError(f"n={_short(choices)}; expected 1 to {most}")
    if not _are_ids(fields.get("stop_token_ids", [])):
        raise ApiError("stop_token_ids: expected a list of token ids")
    if route == CHAT:
        _check_messages(fields.get("messages"))
        _check_template(fields.get("chat_template_kwargs", {}))
    else:
        _check_prompts(fields.get("prompt"), choices, most)
    if fields.get("stream"):
        fields["stream_options"] = _USAGE  # read here for each key's usage, and hidden from who does not ask for it
    return fields


def sequences_of(body: Mapping[str, Any]) -> int:
    """How many sequences a checked body takes at a server: those of each prompt; a chat is one prompt."""
    return len(_prompts(body.get("prompt"))) * int(body.get("n", 1))


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether a stream ends with the usage; `ApiError` for options that are not served."""
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise ApiError("stream_options: expected an object with include_usage alone")
    if not body.get("stream"):
        raise ApiError("stream_options without stream=true")
    return options.get("include_usage") is True


def completion_json(part: Mapping[str, Any], model: str) -> dict[str, Any]:
    """A part of an answer as the client gets it."""
    return {**part, "model": model} if "model" in part else dict(part)


def completion_event(part: Mapping[str, Any], model: str, *, usage: bool) -> dict[str, Any] | None:
    """An event of a stream as the client gets it; None for one that it did not ask for. OpenAI puts the usage into the
    last event alone, which has no choices."""
    if part.get("choices") == [] and not usage:
        return None
    event = completion_json(part, model)
    if event.get("choices"):
        event.pop("usage", None)
    return event


def read_part(text: bytes) -> dict[str, Any]:
    """A part of a server's answer; `ApiError` 502 if it is no JSON object."""
    try:
        part = msgspec.json.decode(text)
    except msgspec.DecodeError:
        part = None
    if not isinstance(part, dict):
        raise ApiError("the server's answer makes no sense", 502)
    return part


def error_body(message: str, status: int) -> dict[str, Any]:
    """What OpenAI's clients make an exception of."""
    kind, code = _KINDS.get(status, ("server_error" if status >= 500 else "invalid_request_error", None))
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


_KINDS: Mapping[int, tuple[str, str | None]] = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("invalid_request_error", "model_not_found"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
}


def _check_messages(messages: Any) -> None:
    """Texts alone: a server would fetch an image from any address that it is given."""
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages: expected a list of messages")
    for message in messages:
        if not isinstance(message, dict):
            raise ApiError(f"messages: {_short(message)}; expected an object")
        for part in _parts_of(message.get("content")):
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(part, str) and (kind != "text" or not isinstance(part.get("text"), str)):
                raise ApiError(f"messages: a part of type {_short(kind)}; only text is served")


def _parts_of(content: Any) -> Iterator[Any]:
    if isinstance(content, list):
        yield from content
    elif content is not None and not isinstance(content, str):
        raise ApiError(f"messages: content={_short(content)}; expected a text, or a list of parts")


def _check_template(switches: Any) -> None:
    """Switches such as `enable_thinking`."""
    plain = isinstance(switches, dict) and all(isinstance(value, str | int | float) for value in switches.values())
    if not plain or "chat_template" in switches:
        raise ApiError("chat_template_kwargs: expected an object of plain values, without chat_template")


def _check_prompts(prompt: Any, choices: int, most: int) -> None:
    prompts = _prompts(prompt)
    if not prompt or not all(isinstance(item, str) or (item and _are_ids(item)) for item in prompts):
        raise ApiError("prompt: expected a text, a list of token ids, or a list of such; none may be empty")
    if len(prompts) * choices > most:
        raise ApiError(f"{len(prompts)} prompts with n={choices}; expected {most} completions at most")


def _prompts(prompt: Any) -> list[Any]:
    """Each prompt of one field: a text, token ids, or several of either."""
    many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    return prompt if many else [prompt]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(is_whole(id, 0, _MAX_ID) for id in value)


def _short(value: Any) -> str:
    return repr(value)[:80]
