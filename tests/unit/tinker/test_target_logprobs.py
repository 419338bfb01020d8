"""Log-probabilities of tokens that a client names: what is asked of servers, and what is refused."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.tinker import target_logprobs, tinker_wire
from pipeline.tinker.api_errors import ApiError
from pipeline.tinker.sample_queue import SampleQueue
from pipeline.tinker.target_logprobs import MAX_PARALLEL_SCORES, max_sequences, read_targets
from tests.unit.tinker.sampling_case import Script, sample, with_servers


def dense(*rows: list[int]) -> dict[str, Any]:
    return {"data": [id for row in rows for id in row], "dtype": "int64", "shape": [len(rows), len(rows[0])]}


SPARSE = {
    "data": [5, 6, 5],
    "dtype": "int64",
    "shape": [3, 4],
    "sparse_crow_indices": [0, 2, 2, 3],
    "sparse_col_indices": [0, 3, 1],
}


def targets_of(given: Any, length: int = 4) -> Any:
    return read_targets({"target_prompt_logprobs": given}, length)


def test_each_named_token_is_the_last_one_of_a_prompt_once() -> None:
    targets = targets_of(dense([5, -1], [7, 7], [-1, 5]))
    assert targets.cells == [(0, 5), (1, 7), (2, 5)]
    assert [targets.prompt([1, 2, 3, 4], cell) for cell in targets.cells] == [[1, 5], [1, 2, 7], [1, 2, 3, 5]]
    tensor = targets.tensor({(0, 5): -1.0, (1, 7): -2.0, (2, 5): -3.0})
    assert list(tensor.shape) == [3, 2]
    assert np.frombuffer(tensor.dense, "<f4").tolist() == [-1, 0, -2, -2, 0, -3]


def test_a_sparse_matrix_is_answered_by_one_of_the_same_layout() -> None:
    targets = targets_of(SPARSE)
    assert targets.cells == [(0, 5), (0, 6), (2, 5)]
    tensor = targets.tensor({(0, 5): -1.0, (0, 6): -2.0, (2, 5): -3.0})
    csr = tensor.sparse_csr
    assert np.frombuffer(csr.values, "<f4").tolist() == [-1, -2, -3]
    assert np.frombuffer(csr.crow_indices, "<i8").tolist() == SPARSE["sparse_crow_indices"]
    assert np.frombuffer(csr.col_indices, "<i8").tolist() == SPARSE["sparse_col_indices"]


def test_a_request_takes_as_many_places_as_are_scored_at_once() -> None:
    assert max_sequences({"num_samples": 3}, 4) == 3
    assert max_sequences({"num_samples": 1, "target_prompt_logprobs": SPARSE}, 4) == 3
    many = dense(*([list(range(40))] * 3))
    assert max_sequences({"target_prompt_logprobs": many}, 4) == MAX_PARALLEL_SCORES


def test_servers_score_the_tokens_beside_the_sample(tmp_path: Path) -> None:
    async def play(sampling: SampleQueue, scripts: list[Script]) -> None:
        written = await asyncio.wait_for(sample(sampling, target_prompt_logprobs=dense([2, -1], [3, 3])), 10)
        assert isinstance(written, bytes)
        first, *others = (body for _, body in scripts[0].asked)
        assert (first["token_ids"], first["sampling_params"]["max_tokens"]) == ([1, 2, 3], 4)
        assert sorted(body["token_ids"] for body in others) == [[1, 2], [1, 2, 3]]
        assert all(body["sampling_params"]["prompt_logprobs"] == 0 for body in others)
        message = tinker_wire.protocol().SampleResponse.FromString(written)
        assert np.frombuffer(message.target_prompt_logprobs.dense, "<f4").tolist() == [-1, 0, -2, -2]

    with_servers(tmp_path, play)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([1], "expected a tensor of dtype int64"),
        ({**dense([1], [1], [1]), "dtype": "float32"}, "expected a tensor of dtype int64"),
        (dense([1], [1]), r"expected \[3, K\]"),
        ({**dense([1], [1], [1]), "shape": [3, True]}, r"expected \[3, K\]"),
        ({**dense([1], [1], [1]), "shape": [3]}, r"expected \[3, K\]"),
        ({**dense([1], [1], [1]), "shape": [3, 1 << 60]}, "3 values; expected those of"),
        (dense([1], [1.5], [1]), "data: expected a list of whole numbers from -1"),  # type: ignore[list-item]
        (dense([-1], [-1], [-1]), "names no token"),
        ({**SPARSE, "sparse_crow_indices": [0, 2, 1, 3]}, "does not fit its shape"),
        ({**SPARSE, "sparse_crow_indices": [0, 3]}, "does not fit its shape"),
        ({**SPARSE, "sparse_col_indices": [0, 4, 1]}, "from 0 to 3"),
        ({**SPARSE, "sparse_col_indices": None}, "from 0 to 3"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_its_name(given: Any, says: str) -> None:
    with pytest.raises(ApiError, match=f"target_prompt_logprobs.*{says}"):
        targets_of(given)


def test_a_request_whose_scores_cost_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_logprobs, "MAX_SCORED_TOKENS", 9)
    with pytest.raises(ApiError, match="4 tokens at 13 tokens of prompts; expected at most 9"):
        targets_of(dense([1, -1], [1, -1], [1, 2]))
    assert targets_of(dense([1, -1], [1, -1], [1, -1])).cells == [(0, 1), (1, 1), (2, 1)]
