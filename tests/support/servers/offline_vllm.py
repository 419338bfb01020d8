"""Greedy continuations by vLLM itself, without a server.

    python -m tests.support.servers.offline_vllm <model> <prompts> [<most tokens of a sequence>]

The prompts are a JSON list of lists of token ids; prints the JSON list of (token ids, their log-probabilities).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MOST = 24


def greedily(model: Path, prompts: list[list[int]], longest: int = 64) -> list[tuple[list[int], list[float]]]:
    """Each prompt's greedy continuation by vLLM, at most `longest` tokens with the prompt, and the log-probabilities of
    its tokens."""
    from pipeline.inference.vllm.server_command import server_environment
    from pipeline.topology.plan import Placement
    from tests.support.servers.vllm import tiny_config

    place = Placement(role="inference", index=0, rank=0, address="127.0.0.1", ports=(0,))
    secrets = model.parent / "world.json"
    environment = dict(os.environ) | server_environment(tiny_config(model), place, secrets)
    command = [sys.executable, "-m", __name__, str(model), json.dumps(prompts), str(longest)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[tuple[list[int], list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def main(model: str, prompts: str, longest: str = "64") -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=int(longest),
        max_num_seqs=4,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        gpu_memory_utilization=0.05,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        language_model_only=True,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=MOST, logprobs=0, ignore_eos=True, detokenize=False)
    tokens = [{"prompt_token_ids": prompt} for prompt in json.loads(prompts)]
    answers = [answer.outputs[0] for answer in llm.generate(tokens, greedy, use_tqdm=False)]
    found = [(list(answer.token_ids), [each[token].logprob for token, each in pairs(answer)]) for answer in answers]
    print(json.dumps(found))


def pairs(answer: Any) -> Any:
    return zip(answer.token_ids, answer.logprobs, strict=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
