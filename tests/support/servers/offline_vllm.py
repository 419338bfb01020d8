"""Greedy continuations by vLLM itself, without a server.

    python -m tests.support.servers.offline_vllm <model> <prompts>

The prompts are a JSON list of lists of token ids; prints the JSON list of (token ids, their log-probabilities).
"""

import json
import sys
from typing import Any

MOST = 24


def main(model: str, prompts: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        gpu_memory_utilization=0.05,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
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
