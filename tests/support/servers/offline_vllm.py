"""Greedy continuations by vLLM itself, without a server.

    python -m tests.support.servers.offline_vllm <model> <answers> <prompts> [<most tokens of a sequence>]

The prompts are a JSON list of lists of token ids. The file `answers` gets the JSON list of (token ids, their
log-probabilities).
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from pipeline.utils.subprocesses import Child, tail
from pipeline.utils.waiting import wait_for
from tests.support import forks

ROOT = Path(__file__).parents[3]
MOST = 24
SECONDS = 600


def greedily(model: Path, prompts: list[list[int]], longest: int = 64) -> list[tuple[list[int], list[float]]]:
    """Each prompt's greedy continuation by vLLM, at most `longest` tokens with the prompt, and the log-probabilities of
    its tokens."""
    from pipeline.inference.vllm.server_command import server_environment
    from pipeline.topology.plan import Placement
    from tests.support.servers.vllm import tiny_config

    place = Placement(role="inference", index=0, rank=0, address="127.0.0.1", ports=(0,))
    secrets = model.parent / "world.json"
    environment = dict(os.environ) | server_environment(tiny_config(model), place, secrets) | {"PYTHONPATH": str(ROOT)}
    answers, log = model.parent / "answers.json", model.parent / "offline.log"
    command = [sys.executable, "-m", __name__, str(model), str(answers), json.dumps(prompts), str(longest)]
    child = Child(command, log, environment, forks.request())
    try:
        wait_for("vLLM's answers", lambda: child.poll() is not None, SECONDS)
    finally:
        code = child.kill()
    assert code == 0, "\n".join(tail(log))
    found: list[tuple[list[int], list[float]]] = json.loads(answers.read_text())
    return found


def main(model: str, file: str, prompts: str, longest: str = "64") -> None:
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
    Path(file).write_text(json.dumps(found))


def pairs(answer: Any) -> Any:
    return zip(answer.token_ids, answer.logprobs, strict=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
