"""The cheaper way for log-probabilities: the same as vLLM's own way in its classes; of servers see `test_weights`."""

import json
import logging
import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.inference.vllm import compact_logprobs
from pipeline.inference.vllm.compact_logprobs import SWITCH, add_compact_logprobs, add_compact_responses
from pipeline.inference.vllm.token_versions import _Engine

# Importing vLLM has torch say what of it is deprecated.
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

EDGES = [0.0, -0.0, -1e-45, -9999.5, float("-inf"), float("nan"), np.float32(-0.1)]


@pytest.fixture
def seams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test replaces in vLLM's classes is put back."""
    from vllm.entrypoints.scale_out.token_in_token_out import api_router, serving
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.serial_utils import MsgpackDecoder

    for owner, name in (
        (LogprobsLists, "slice_request"),
        (MsgpackDecoder, "_decode_ndarray"),
        (LogprobsProcessor, "_update_sample_logprobs"),
        *((serving, name) for name in compact_logprobs._ENTRIES),
        (serving.ServingTokens, "_create_tokens_logprobs"),
        (api_router, "JSONResponse"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def a_step(width: int, counts: list[int] | None, seed: int = 0) -> Any:
    """The log-probabilities of a step of four requests; with `counts`, several tokens of each."""
    from vllm.v1.outputs import LogprobsLists

    rows, random = sum(counts or [1] * 4), np.random.default_rng(seed)
    values = -random.exponential(size=(rows, width)).astype(np.float32)
    values[: len(EDGES), 0] = EDGES[:rows]
    ids = np.stack([random.permutation(1000)[:width] for _ in range(rows)]).astype(np.int32)
    ends = None if counts is None else [0, *np.cumsum(counts).tolist()]
    return LogprobsLists(ids, values, random.integers(0, 99, rows, dtype=np.int64), ends)


def delivered(step: Any, counts: list[int], hop: bool) -> list[Any]:
    """Each request's part of a step, as it comes from the engine."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    parts = [step.slice_request(index, count) for index, count in enumerate(counts)]
    if not hop:
        return parts
    outputs = [EngineCoreOutput(request_id="r", new_token_ids=[1], new_logprobs=part) for part in parts]
    encoded = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))
    return [output.new_logprobs for output in MsgpackDecoder(EngineCoreOutputs).decode(encoded).outputs]


def a_request(tokenizer: Any = None, flat: bool = False) -> Any:
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    return LogprobsProcessor(tokenizer, FlatLogprobs() if flat else [], None, 0.0, 0, None)


def processed(steps: list[Any], counts: list[int], tokenizer: Any, flat: bool, hop: bool) -> list[str]:
    """What the requests of these steps end with, as text, since not a number equals nothing."""
    requests = [a_request(tokenizer, flat) for _ in counts]
    for step in steps:
        for request, part in zip(requests, delivered(step, counts, hop), strict=True):
            request._update_sample_logprobs(part)
    return [repr((request.logprobs, request.cumulative_logprob)) for request in requests]


class Words:
    """A tokenizer, as far as log-probabilities need one."""

    is_fast = False

    def convert_ids_to_tokens(self, ids: list[int], **_: Any) -> list[str]:
        return [f"<{number}>" for number in ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"<{number}>" for number in np.atleast_1d(ids))


@pytest.mark.parametrize("hop", [True, False], ids=["encoded", "in-process"])
@pytest.mark.parametrize("flat", [False, True], ids=["lists", "flat"])
@pytest.mark.parametrize("tokenizer", [None, Words()], ids=["tokens", "words"])
@pytest.mark.parametrize("counts", [None, [2, 0, 3, 1]], ids=["one", "several"])
@pytest.mark.parametrize("version", [None, 7], ids=["untold", "told"])
def test_requests_end_with_what_vllms_own_way_gives(
    seams: None,
    monkeypatch: pytest.MonkeyPatch,
    version: int | None,
    counts: list[int] | None,
    tokenizer: Any,
    flat: bool,
    hop: bool,
) -> None:
    """Also where a request that asks for more joins for a step: its neighbours' steps then are of both forms."""
    monkeypatch.setattr(_Engine, "processed", version)
    steps = [a_step(width, counts, seed) for seed, width in enumerate((1, 1, 4, 1))]
    asked = (steps, counts or [1] * 4, tokenizer, flat, hop)
    stock = processed(*asked)
    add_compact_logprobs({})
    add_compact_logprobs({})
    assert type(steps[0].slice_request(0, 1).logprobs) is tuple
    assert type(steps[2].slice_request(0, 1).logprobs) is np.ndarray
    assert processed(*asked) == stock


@pytest.mark.parametrize("hop", [True, False], ids=["encoded", "in-process"])
@pytest.mark.parametrize("widths", [(1, 1, 1), (1, 4, 1)], ids=["all cheap", "one dear"])
def test_tokens_take_along_the_version_of_their_step(
    seams: None, monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...], hop: bool
) -> None:
    """Of a step in which a neighbour asks for more it is not known, so nothing is said."""
    add_compact_logprobs({})
    request = a_request()
    for width, version in zip(widths, (7, 7, 8), strict=True):
        monkeypatch.setattr(_Engine, "processed", version)
        request._update_sample_logprobs(delivered(a_step(width, None), [1] * 4, hop)[0])
    spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]
    assert len(request.logprobs) == 3
    assert request.logprobs.spans() == (spans if widths == (1, 1, 1) else None)


@pytest.mark.parametrize("hop", [True, False], ids=["encoded", "in-process"])
def test_all_tokens_of_a_step_with_drafts_have_its_version(
    seams: None, monkeypatch: pytest.MonkeyPatch, hop: bool
) -> None:
    add_compact_logprobs({})
    request, counts = a_request(), [3, 0, 1, 2]
    for version in (7, 8):
        monkeypatch.setattr(_Engine, "processed", version)
        request._update_sample_logprobs(delivered(a_step(1, counts), counts, hop)[0])
    assert request.logprobs.spans() == [
        {"version": "7", "start": 0, "end": 3},
        {"version": "8", "start": 3, "end": 6},
    ]


def test_a_slice_that_arrived_can_be_cut_again(seams: None) -> None:
    from vllm.v1.outputs import LogprobsLists

    add_compact_logprobs({})
    arrived = LogprobsLists(*(np.array(part) for part in a_step(1, None).slice_request(0, 1)[:3]))
    assert arrived.slice_request(0, 1).logprobs.tolist() == arrived.logprobs[:1].tolist()


def test_the_entries_of_an_answer_are_those_that_validation_makes(seams: None) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out import api_router, serving

    names = {"GenerateLogProb": {"token_id": 7, "rank": 2}, "ChatCompletionLogProb": {"token": "token_id:7"}}

    def entries() -> list[Any]:
        return [
            getattr(serving, f"{name}sContent")(
                logprob=-0.5, **values, top_logprobs=[getattr(serving, name)(logprob=-0.5, **values)]
            )
            for name, values in names.items()
        ]

    stock = entries()
    add_compact_responses(serving, api_router)
    quick = entries()
    assert not isinstance(serving.GenerateLogProb, type)
    assert quick == stock
    assert [each.model_dump_json() for each in quick] == [each.model_dump_json() for each in stock]
    assert [each.model_fields_set for each in quick] == [each.model_fields_set for each in stock]


def test_answers_are_the_same_json_that_vllm_writes(seams: None) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out import api_router, serving

    content = {"é": [1, -0.1, 1e-7, None, True, {"7": 3.141592653589793}], 5: "\u2028"}
    stock = api_router.JSONResponse(content=content, status_code=201)
    add_compact_responses(serving, api_router)
    quick = api_router.JSONResponse(content=content, status_code=201)
    assert (quick.status_code, quick.media_type) == (stock.status_code, stock.media_type)
    assert json.loads(quick.body) == json.loads(stock.body)


def test_the_switch_turns_it_off(seams: None) -> None:
    add_compact_logprobs({SWITCH: "0"})
    assert type(a_step(1, None).slice_request(0, 1).logprobs) is np.ndarray


def test_code_that_is_not_known_stays_as_it_is(
    seams: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.serial_utils import MsgpackDecoder

    def of_another_release(self: Any, arr: Any, dtype: Any) -> None: ...

    monkeypatch.setattr(MsgpackDecoder, "_decode_ndarray", of_another_release)
    with caplog.at_level(logging.WARNING):
        add_compact_logprobs({})
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert type(a_step(1, None).slice_request(0, 1).logprobs) is np.ndarray
    assert MsgpackDecoder._decode_ndarray is of_another_release


@pytest.mark.parametrize("answers", [None, SimpleNamespace(), SimpleNamespace(ServingTokens=object)])
def test_a_route_that_is_not_known_makes_its_answers_itself(answers: Any, caplog: pytest.LogCaptureFixture) -> None:
    router = SimpleNamespace(JSONResponse=dict)
    compact_logprobs.add_compact_responses(answers, router)
    assert router.JSONResponse is dict
    assert "responses are built by vLLM" in caplog.text


def test_what_was_sampled_lists_no_alternatives_and_is_whole_when_it_is_copied() -> None:
    entry = compact_logprobs.SampledLogprobs(((7, -0.5),))
    copied = pickle.loads(pickle.dumps(entry))
    assert [*entry.items()] == [*copied.items()] == []
    assert entry[7] == copied[7] == -0.5
