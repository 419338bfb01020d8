"""Sampling through the API: the SDK's own client, a real gateway and trainer, and vLLM on the CPU."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import openai
import pytest
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from pipeline.tinker.checkpoint_catalog import MAX_EPHEMERAL
from pipeline.tinker.gateway_settings import MAX_ADAPTERS
from tests.integration.tinker_client import (
    adam,
    client_of,
    flood_of_a_dead_client,
    forget_clients,
    make_data,
    requests_done,
)
from tests.integration.tinker_server import TinkerServer, serving_samples
from tests.integration.tinker_truth import Truth
from tests.patience import WAIT_SECONDS
from tests.support.models.jobs import VOCABULARY
from tests.support.servers.vllm import EOS, SECRET, Served

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
PROMPT = [1, 5, 9, 3, 12]
BLOCK = 32
INFERENCE = {"max_sequences": 32, "extra_args": ["--block-size", str(BLOCK)]}
CLOSE = 2e-3
"""vLLM computes in another order than transformers; what a trained adapter changes is a hundred times as much."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TinkerServer, list[Served]]]:
    with serving_samples(tmp_path_factory.mktemp("samples"), ["127.0.0.9"], inference=INFERENCE) as made:
        yield made
    forget_clients()


@pytest.fixture(scope="module")
def server(running: tuple[TinkerServer, list[Served]]) -> TinkerServer:
    return running[0]


@pytest.fixture
def client(server: TinkerServer) -> Iterator[tinker.ServiceClient]:
    with client_of(server) as opened:
        yield opened


@pytest.fixture(scope="module")
def base(server: TinkerServer) -> Any:
    return AutoModelForCausalLM.from_pretrained(server.root / "base", dtype=torch.float64)


@torch.no_grad()
def log_softmax(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """float64[tokens, vocabulary]: of the token after each."""
    whole: torch.Tensor = model(input_ids=torch.tensor([list(tokens)])).logits[0].log_softmax(-1)
    return whole


def of_own(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """What the model says of its own tokens after a prompt."""
    whole = log_softmax(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
    return np.asarray(whole.gather(1, torch.tensor(list(tokens))[:, None])[:, 0])


def prompt_of(tokens: Sequence[int] = PROMPT) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def params(**given: Any) -> types.SamplingParams:
    return types.SamplingParams(**{"max_tokens": 12, "stop": [], **given})


def folder_of(server: TinkerServer, path: str) -> Path:
    (version,) = (server.api / "weights" / path.removeprefix("tinker://").replace(":", "-")).iterdir()
    return version


def test_samples_have_the_log_probabilities_of_the_base(client: tinker.ServiceClient, base: Any) -> None:
    sampler = client.create_sampling_client(base_model="tiny")
    answer = sampler.sample(prompt_of(), 4, params(seed=7)).result()
    assert len(answer.sequences) == 4
    assert len({tuple(each.tokens) for each in answer.sequences}) > 1
    for each in answer.sequences:
        assert (len(each.tokens), each.stop_reason) == (12, "length")
        np.testing.assert_allclose(each.logprobs, of_own(base, PROMPT, each.tokens), atol=CLOSE)


def test_the_most_samples_of_a_request_are_as_many_as_vllm_takes(
    running: tuple[TinkerServer, list[Served]], client: tinker.ServiceClient
) -> None:
    server, (served,) = running
    most = server.config.inference.max_sequences
    sampler = client.create_sampling_client(base_model="tiny")
    with pytest.raises(tinker.BadRequestError, match=r"inference\.max_sequences"):
        sampler.sample(prompt_of(), most + 1, params(max_tokens=1)).result()
    body = {"model": "base", "token_ids": PROMPT, "sampling_params": {"n": most + 1, "max_tokens": 1}}
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
    asked = Request(f"http://{served.endpoint}/inference/v1/generate", json.dumps(body).encode(), headers)
    with pytest.raises(HTTPError) as refused:
        urlopen(asked, timeout=WAIT_SECONDS)
    assert f"max_num_seqs ({most})" in refused.value.read().decode(), "the limit is vLLM's own"


def test_a_seed_gives_the_same_samples_again(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="tiny")
    drawn = [
        [each.tokens for each in sampler.sample(prompt_of(), 2, params(seed=s)).result().sequences] for s in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_sampling_stops_at_tokens_and_strings_and_says_so(server: TinkerServer, client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model=str(server.root / "base"))
    tokenizer = sampler.get_tokenizer()
    (free,) = sampler.sample(prompt_of(), 1, params(seed=3, max_tokens=30)).result().sequences
    before = free.tokens[: free.tokens.index(EOS)] if EOS in free.tokens else free.tokens
    stop = max(before, key=before.index)  # the one that comes first as late as possible
    end = free.tokens.index(stop) + 1
    for given in ([stop], [tokenizer.decode([stop])], tokenizer.decode([stop])):
        (cut,) = sampler.sample(prompt_of(), 1, params(seed=3, max_tokens=30, stop=given)).result().sequences
        assert (cut.tokens, cut.stop_reason) == (free.tokens[:end], "stop"), given
        assert len(cut.logprobs or []) == end


def test_top_k_top_p_and_temperature_narrow_the_choice(client: tinker.ServiceClient, base: Any) -> None:
    sampler = client.create_sampling_client(base_model="tiny")
    tokens, greedy = list(PROMPT), []
    for _ in range(6):
        greedy.append(int(log_softmax(base, tokens)[-1].argmax()))
        tokens.append(greedy[-1])
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 0.0}):
        for each in sampler.sample(prompt_of(), 2, params(max_tokens=6, **narrow)).result().sequences:
            assert each.tokens == greedy, narrow
    two = set(log_softmax(base, PROMPT)[-1].topk(2).indices.tolist())
    drawn = sampler.sample(prompt_of(), 32, params(max_tokens=1, top_k=2)).result().sequences
    assert {each.tokens[0] for each in drawn} == two


def test_log_probabilities_of_prompts_and_the_likeliest_tokens(client: tinker.ServiceClient, base: Any) -> None:
    sampler, expected = client.create_sampling_client(base_model="tiny"), log_softmax(base, PROMPT)
    own = [None, *(float(expected[at, token]) for at, token in enumerate(PROMPT[1:]))]
    found = sampler.compute_logprobs(prompt_of()).result()
    assert found[0] is None
    np.testing.assert_allclose(found[1:], own[1:], atol=CLOSE)  # type: ignore[arg-type]
    prompts = [PROMPT * times for times in range(1, 7)]
    at_once = [sampler.compute_logprobs(prompt_of(prompt)) for prompt in prompts]
    for prompt, future in zip(prompts, at_once, strict=True):
        np.testing.assert_allclose(future.result()[1:], of_own(base, prompt[:1], prompt[1:]), atol=CLOSE)  # type: ignore[arg-type]
    some = sampler.compute_logprobs(prompt_of(), prompt_logprobs_last_n=2).result()
    assert some[:-2] == [None] * 3
    np.testing.assert_allclose(some[-2:], own[-2:], atol=CLOSE)  # type: ignore[arg-type]
    answer = sampler.sample(
        prompt_of(),
        1,
        params(max_tokens=2),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
    ).result()
    np.testing.assert_allclose(answer.prompt_logprobs[1:], own[1:], atol=CLOSE)  # type: ignore[index,arg-type]
    assert answer.topk_prompt_logprobs is not None
    for at, ranked in enumerate(answer.topk_prompt_logprobs[1:]):
        best = expected[at].topk(3)
        assert ranked is not None
        assert [token for token, _ in ranked] == best.indices.tolist()
        np.testing.assert_allclose([each for _, each in ranked], best.values, atol=CLOSE)


def test_log_probabilities_of_named_tokens_of_the_base_and_of_an_adapter(
    server: TinkerServer, client: tinker.ServiceClient, base: Any
) -> None:
    trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=6).result()
    trainer.forward_backward(make_data(1), "cross_entropy").result()
    trainer.optim_step(adam(5e-2)).result()
    path = trainer.save_weights_for_sampler("named").result().path
    adapted = Truth(server.root / "base", folder_of(server, path)).model
    ids = torch.tensor([[3, -1], [7, 7], [-1, -1], [PROMPT[4], 11]])
    for sampler, model in (
        (client.create_sampling_client(base_model="tiny"), base),
        (client.create_sampling_client(model_path=path), adapted),
    ):
        expected = torch.where(ids >= 0, log_softmax(model, PROMPT)[:4].gather(1, ids.clamp(min=0)), 0.0)
        for given in (types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1)):
            answer = sampler.sample(
                prompt_of(), 1, params(temperature=0.5), include_prompt_logprobs=True, target_prompt_logprobs=given
            ).result()
            found = answer.target_prompt_logprobs
            assert found is not None
            assert (found.sparse_crow_indices is None) == (given.sparse_crow_indices is None)
            np.testing.assert_allclose(found.to_torch(), expected, atol=CLOSE)
            assert answer.prompt_logprobs is not None
            assert found.to_torch()[3, 0] == pytest.approx(answer.prompt_logprobs[4], abs=CLOSE), "the prompt's own"
    with pytest.raises(tinker.BadRequestError, match=r"expected \[4, K\]"):
        sampler.sample(prompt_of(), 1, params(), target_prompt_logprobs=types.TensorData.from_torch(ids[:3])).result()


def test_an_answer_says_how_much_of_the_prompt_was_in_the_cache(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="tiny")
    prompt = prompt_of([9, 4] * 20)
    hits = [sampler.sample(prompt, 1, params(max_tokens=2)).result().prompt_cache_hit_tokens for _ in range(2)]
    assert hits == [0, BLOCK]


def test_a_snapshot_is_the_adapter_that_was_saved_and_stays_it(
    server: TinkerServer, client: tinker.ServiceClient
) -> None:
    trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    samplers, truths = [], []
    for step in range(2):
        for number in range(3):
            trainer.forward_backward(make_data(10 * step + number), "cross_entropy").result()
            trainer.optim_step(adam(5e-2)).result()
        samplers.append(trainer.save_weights_and_get_sampling_client())
        path = trainer.save_weights_for_sampler(f"step-{step}").result().path
        samplers.append(client.create_sampling_client(model_path=path))
        truths += [Truth(server.root / "base", folder_of(server, path)).model] * 2
    answers = [sampler.sample(prompt_of(), 2, params()).result() for sampler in samplers]
    for answer, truth in zip(answers, truths, strict=True):
        for each in answer.sequences:
            np.testing.assert_allclose(each.logprobs, of_own(truth, PROMPT, each.tokens), atol=CLOSE)
    first, second = (np.array(samplers[at].compute_logprobs(prompt_of()).result()[1:]) for at in (0, 2))
    assert np.abs(first - second).max() > 100 * CLOSE, "the adapters differ enough to be told apart"


def test_a_server_holds_a_few_adapters_and_every_snapshot_can_be_sampled_from(
    running: tuple[TinkerServer, list[Served]], client: tinker.ServiceClient
) -> None:
    _, (sampler_server,) = running
    trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=2).result()
    samplers, expected = [], []
    for number in range(MAX_EPHEMERAL + 3):
        trainer.forward_backward(make_data(number), "cross_entropy").result()
        trainer.optim_step(adam(2e-2)).result()
        samplers.append(trainer.save_weights_and_get_sampling_client())
        expected.append(samplers[-1].compute_logprobs(prompt_of()).result())
    assert loaded(sampler_server) == MAX_ADAPTERS
    for sampler, before in zip(samplers, expected, strict=True):
        np.testing.assert_allclose(sampler.compute_logprobs(prompt_of()).result()[1:], before[1:], atol=CLOSE)  # type: ignore[arg-type]
    assert loaded(sampler_server) == MAX_ADAPTERS
    assert len({round(each[1] or 0.0, 4) for each in expected}) > MAX_ADAPTERS // 2


def test_the_base_is_the_base_beside_as_many_adapters_as_a_server_holds(
    running: tuple[TinkerServer, list[Served]], client: tinker.ServiceClient, base: Any
) -> None:
    _, (sampler_server,) = running
    trainer, samplers = client.create_lora_training_client(base_model="tiny", rank=4, seed=3).result(), []
    for number in range(MAX_ADAPTERS):
        for _ in range(2):
            trainer.forward_backward(make_data(number), "cross_entropy").result()
            trainer.optim_step(adam(5e-2)).result()
        path = trainer.save_weights_for_sampler(f"beside-{number}").result().path
        samplers.append(client.create_sampling_client(model_path=path))
        samplers[-1].compute_logprobs(prompt_of()).result()
    assert loaded(sampler_server) == MAX_ADAPTERS
    untrained = client.create_sampling_client(base_model="tiny")
    asked = [sampler.sample(prompt_of(), 1, params()) for _ in range(3) for sampler in (untrained, *samplers)]
    answers = [future.result().sequences[0] for future in asked]
    for answer in answers[:: len(samplers) + 1]:
        np.testing.assert_allclose(answer.logprobs, of_own(base, PROMPT, answer.tokens), atol=CLOSE)
    for answer in answers[len(samplers) :: len(samplers) + 1]:  # the newest adapter is far from the base
        assert np.abs(np.array(answer.logprobs) - of_own(base, PROMPT, answer.tokens)).max() > 10 * CLOSE


def loaded(server: Served) -> int:
    """Adapters that the server has now."""
    request = Request(f"http://{server.endpoint}/v1/models", headers={"Authorization": f"Bearer {SECRET}"})
    with urlopen(request, timeout=WAIT_SECONDS) as answer:
        return len(json.load(answer)["data"]) - 1


def test_what_cannot_be_sampled_is_the_sdks_own_error(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="tiny")
    for tokens, says in (([1] * 64, "expected fewer than 64"), ([VOCABULARY + 3], "refuses")):
        with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match=says):
            sampler.sample(prompt_of(tokens), 1, params()).result()
    trainer = client.create_lora_training_client(base_model="tiny", rank=4).result()
    path = trainer.save_state("state").result().path
    with pytest.raises(tinker.BadRequestError, match="save_weights_for_sampler makes what can be sampled from"):
        client.create_sampling_client(model_path=path).sample(prompt_of(), 1, params()).result()
    assert sampler.sample(prompt_of(), 1, params()).result().sequences


def test_openais_client_chats_with_the_adapter_that_was_saved(
    server: TinkerServer, client: tinker.ServiceClient, base: Any
) -> None:
    trainer = client.create_lora_training_client(base_model="tiny", rank=4, seed=4).result()
    for number in range(3):
        trainer.forward_backward(make_data(number), "cross_entropy").result()
        trainer.optim_step(adam(5e-2)).result()
    path = trainer.save_weights_for_sampler("chat").result().path
    truth = Truth(server.root / "base", folder_of(server, path)).model
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, timeout=WAIT_SECONDS) as asking:
        assert {"tiny", path} <= {model.id for model in asking.models.list()}
        assert asking.models.retrieve(path).id == path
        for name, model in (("tiny", base), (path, truth)):
            completion = asking.completions.create(
                model=name, prompt=PROMPT, logprobs=1, extra_body={"return_token_ids": True}, **greedy
            )
            (choice,) = completion.choices
            assert completion.model == name
            assert choice.logprobs is not None
            tokens: list[int] = choice.token_ids  # type: ignore[attr-defined]
            found = np.array(choice.logprobs.token_logprobs, float)
            np.testing.assert_allclose(found, of_own(model, PROMPT, tokens), atol=CLOSE)
        messages: Any = [{"role": "user", "content": "1+1"}]
        said = asking.chat.completions.create(model=path, messages=messages, logprobs=True, top_logprobs=2, **greedy)
        assert said.usage is not None
        assert said.usage.prompt_tokens == 5  # the template's ^ and = stand around what the user says
        assert said.choices[0].logprobs is not None
        assert len(said.choices[0].logprobs.content or []) == said.usage.completion_tokens
        streamed = asking.chat.completions.create(
            model=path, messages=messages, stream=True, stream_options={"include_usage": True}, **greedy
        )
        *parts, last = list(streamed)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == said.choices[0].message.content
        assert (last.choices, last.usage and last.usage.completion_tokens) == ([], said.usage.completion_tokens)
        tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        with pytest.raises(openai.BadRequestError, match="tool-call-parser"):
            asking.chat.completions.create(model=path, messages=messages, tools=[tool])
        with pytest.raises(openai.NotFoundError, match="no checkpoint"):
            asking.chat.completions.create(model=path + "-other", messages=messages)
        with pytest.raises(openai.BadRequestError, match="the server refuses"):
            asking.completions.create(model=path, prompt=[VOCABULARY + 3], **greedy)
        with pytest.raises(openai.AuthenticationError):
            asking.with_options(api_key="tml-other").models.list()


def test_many_samples_of_a_killed_client_hold_up_nobody_and_are_not_drawn_after_a_restart(
    server: TinkerServer, client: tinker.ServiceClient
) -> None:
    sampler, flood = client.create_sampling_client(base_model="tiny"), 300
    before = requests_done(server)
    flood_of_a_dead_client(server, "asample", flood)
    assert sampler.sample(prompt_of(), 1, params()).result().sequences
    assert requests_done(server) - before < flood // 2, "all that time most of the flood waited"
    server.kill_gateway()
    server.start_gateway()
    done = requests_done(server)
    for _ in range(3):
        assert sampler.sample(prompt_of(), 1, params()).result().sequences
    assert requests_done(server) - done == 3
