"""What FP8 and speculative decoding gain and cost a server: tokens a second, log-probabilities, updates.

    python -m tests.gpu.decoding OUT.json --model DIR [--prompts sums copies] [--ways plain fp8 ngram-4 …] …
    python -m tests.gpu.decoding OUT.json --shape 8b --ways plain fp8 --requests 64 256

Each way is one server on the first GPU, one after the other; this process sends the weights from the same GPU, as a
trainer does: those of a pretrained model's directory, or random ones of a shape. Of each way: tokens a second by the
number of requests at a time, the accepted fraction of the drafted tokens, milliseconds of an update, and of a
pretrained model how far the server's log-probabilities are from transformers' in float32, after the weights were
replaced by others and came back.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline.config import InferenceConfig
from pipeline.environments import load_task
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.rollout.server_client import Completion
from pipeline.rollout.server_pool import InferenceClient
from pipeline.utils import subprocesses
from slurm.submission.compose_config import compose_config
from tests.bench.tables import markdown
from tests.gpu.cold_starts import command_of
from tests.gpu.traffic import Traffic
from tests.gpu.weights import servers
from tests.gpu.workload import WORKLOADS
from tests.support.servers.answers import drafts_of
from tests.support.servers.vllm import SECRET

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8": {"quantization": "fp8"},
    "fp8-tensor": {"extra_args": ["--quantization", "fp8_per_tensor"]},
    "fp8-block": {"extra_args": ["--quantization", "fp8_per_block"]},
    "ngram-2": {"speculation": {"method": "ngram", "tokens": 2}},
    "ngram-4": {"speculation": {"method": "ngram", "tokens": 4}},
    "ngram-8": {"speculation": {"method": "ngram", "tokens": 8}},
    "draft-4": {"speculation": {"method": "draft", "tokens": 4}},
}
"""Keys of `inference`; a draft model is the policy's own directory."""
PROMPTS, PROBES, UPDATES, END = 64, 32, 5, 2
"""Prompts of each kind, samples whose log-probabilities are compared, updates, and the token that ends a completion."""
NamedTensors = list[tuple[str, Tensor]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="a pretrained model's directory")
    parser.add_argument("--shape", default="0.6b", choices=[*WORKLOADS], help="without --model")
    parser.add_argument("--ways", nargs="+", default=["plain", "fp8", "ngram-2", "ngram-4", "ngram-8"], choices=WAYS)
    parser.add_argument("--prompts", nargs="+", default=["sums", "copies"], choices=("sums", "copies"))
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--tokens", type=int, default=256, help="at most, of each completion")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds after which no further way begins")
    parser.add_argument("--no-compile", action="store_true", help="servers that compile nothing start sooner")
    parser.add_argument("--no-updates", action="store_true", help="weights of a shape stay the server's random ones")
    given = parser.parse_args(arguments)
    torch.cuda.set_device(0)
    result: dict[str, Any] = {
        "command": command_of(given),
        "gpu": torch.cuda.get_device_name(),
        "vllm": __import__("vllm").__version__,
        "ways": {},
    }
    began = time.monotonic()
    for name in given.ways:
        if time.monotonic() - began > given.deadline:
            break
        try:
            result["ways"][name] = measure(name, given)
        except Exception as error:  # noqa: BLE001 - the other ways are measured all the same
            result["ways"][name] = {"error": f"{type(error).__name__}: {error}"[-3000:]}
        given.out.write_text(json.dumps(result, indent=1))
        print(report(result["ways"]), flush=True)
    return int(any("error" in way for way in result["ways"].values()))


def measure(way: str, given: argparse.Namespace) -> dict[str, Any]:
    keys = WAYS[way] | ({"compile": False} if given.no_compile else {})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
        model = given.model or Path(folder) / "model"
        if not given.model:
            WORKLOADS[given.shape].write_model(model)
        if way.startswith("draft"):
            keys["speculation"] = keys["speculation"] | {"model": str(model)}
        began = time.monotonic()
        link = Path(folder) / "served"
        link.symlink_to(model)
        (endpoint,) = started.enter_context(servers(link, [0], 1, 4, **keys))
        found: dict[str, Any] = {"keys": keys, "start_seconds": time.monotonic() - began, "rows": []}
        if not given.no_updates:
            found["update_ms"] = [1e3 * seconds for seconds in update_times(endpoint, model, given, started)]
        prompts = {kind: prompts_of(model, kind) for kind in given.prompts} if given.model else {"random": ()}
        for kind, ids in prompts.items():
            for requests in given.requests:
                traffic = Traffic(
                    endpoint, SECRET, requests, given.seconds, given.tokens, ends=bool(ids), prompts=ids[:PROMPTS]
                )
                before = drafts_of(endpoint)
                with traffic.running() as answers:
                    pass
                drafted, accepted = (now - then for now, then in zip(drafts_of(endpoint), before, strict=True))
                row = {"prompts": kind, "requests": requests, "tokens_per_second": answers.tokens_per_second}
                found["rows"].append(row | {"accepted": accepted / drafted if drafted else None})
        if given.model:
            found["distance"] = {kind: distance(endpoint, model, ids) for kind, ids in prompts.items()}
    return found


def update_times(endpoint: str, model: Path, given: argparse.Namespace, started: ExitStack) -> list[float]:
    """Seconds of updates, after which the server has the weights of the directory, or random ones of the shape."""
    first = weights_of(model, given.model is not None, 1)
    second = weights_of(model, False, 2) if given.model else first  # of a large shape, two do not fit
    holder = started.enter_context(subprocesses.hold_port())
    meeting = MeetingPoint("127.0.0.1", holder.getsockname()[1], SECRET)
    config, device = InferenceConfig(update_seconds=60), torch.device("cuda", 0)
    update = updater(started.enter_context(WeightSender([endpoint], meeting, config, 120, note, device=device)))
    update(first)
    return [update(each) for each in (second, first) * UPDATES]


def note(server: str, version: int | None) -> None:
    if version is None:
        print(f"{server} was evicted", flush=True)


def updater(sender: WeightSender) -> Callable[[NamedTensors], float]:
    version = 0

    def update(tensors: NamedTensors) -> float:
        """Send these weights as the next version; returns the seconds until the server has them."""
        nonlocal version
        version, began = version + 1, time.monotonic()
        report = sender.publish(version, tensors)
        if report.failures:
            raise RuntimeError(f"version {version}: {report.failures}")
        return time.monotonic() - began

    return update


@torch.no_grad()
def weights_of(directory: Path, pretrained: bool, seed: int) -> NamedTensors:
    """The parameters in bfloat16 on the first GPU, pretrained or random."""
    torch.manual_seed(seed)
    with torch.device("cuda"):
        model: nn.Module = (
            AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
            if pretrained
            else AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
        )
    return [(name, parameter.detach()) for name, parameter in model.to("cuda").named_parameters()]


def prompts_of(directory: Path, kind: str) -> tuple[tuple[int, ...], ...]:
    """`sums`: those of `experiment=smollm2`. `copies`: the same texts, to be repeated word by word."""
    config = compose_config(["experiment=smollm2", f"model.path={directory}", "model.init=pretrained", "name=prompts"])
    task, tokenizer = load_task(config.task, config.seed), AutoTokenizer.from_pretrained(directory)
    texts = [task.prompt(index).messages for index in range(PROMPTS)]
    if kind == "copies":
        four = [" ".join(each[-1]["content"] for each in texts[at : at + 4]) for at in range(PROMPTS - 4)]
        texts = [[{"role": "user", "content": f"Repeat this text exactly, word by word: {text}"}] for text in four]
    encoded = [
        tokenizer.apply_chat_template(list(each), add_generation_prompt=True, tokenize=True, return_dict=True)
        for each in texts
    ]
    return tuple(tuple(each["input_ids"]) for each in encoded)


def distance(endpoint: str, directory: Path, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
    """How far the server's log-probabilities are from transformers' in float32 over its own samples at temperature 1:
    mean and largest difference, and the estimate k3 of the KL divergence."""

    async def ask() -> list[Completion]:
        async with InferenceClient([endpoint], SECRET, 120) as client:
            client.update(endpoint, 1)
            requests = [
                client.generate(list(prompt), n=1, temperature=1.0, max_tokens=96, stop_token_ids=[END])
                for prompt in prompts[:PROBES]
            ]
            return [each for group in await asyncio.gather(*requests) for each in group]

    completions = asyncio.run(ask())
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to("cuda").eval()
    gaps = []
    with torch.no_grad():
        for prompt, each in zip(prompts, completions, strict=False):
            ids = torch.tensor([[*prompt, *each.tokens]], device="cuda")
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            true = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0].cpu()
            gaps.append(true - torch.tensor(each.logprobs))
    gap = torch.cat(gaps).double()
    kl = float((gap.exp() - 1 - gap).mean())
    return {"tokens": len(gap), "mean": float(gap.abs().mean()), "max": float(gap.abs().max()), "kl": kl}


def report(ways: dict[str, Any]) -> str:
    rows: list[tuple[Any, ...]] = []
    for name, way in ways.items():
        if "error" in way:
            rows.append((name, "", "", way["error"][-60:].replace("\n", " "), "", "", ""))
            continue
        for row in way["rows"]:
            gap = way.get("distance", {}).get(row["prompts"], {})
            accepted = "" if row["accepted"] is None else f"{row['accepted']:.2f}"
            rows.append(
                (
                    name,
                    row["prompts"],
                    row["requests"],
                    f"{row['tokens_per_second']:.0f}",
                    accepted,
                    f"{statistics.median(way['update_ms']):.0f}" if "update_ms" in way else "",
                    f"{gap['mean']:.4f}, {gap['kl']:.1e}" if gap else "",
                )
            )
    return markdown(("way", "prompts", "requests", "tokens/s", "accepted", "update ms", "distance, KL"), rows)


if __name__ == "__main__":
    raise SystemExit(main())
