"""What forward passes of three models gain from side streams of one GPU: `python -m tests.gpu.forward_streams`.

Policy, reference and critic of one shape, with random weights in bfloat16, each answer about the same rows of 512
tokens. Timed: one model; the three in turn, as the trainer has it; each on a stream, started by one thread; and each
on a stream with a thread. Prints medians in milliseconds. Needs torch and transformers alone.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

SHAPES = {
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "4b": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
}
VOCABULARY, LENGTH, MODELS, WARM_UP = 151_936, 512, 3, 2


def a_network(shape: str) -> nn.Module:
    """Qwen3's decoder of that shape, without a head, on the GPU."""
    keys = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    config = Qwen3Config(**SHAPES[shape], **keys)
    with torch.device("cuda"):
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    network: nn.Module = whole.model.eval()
    return network


def in_turn(networks: Sequence[nn.Module], tokens_BT: Tensor) -> None:
    for network in networks:
        with torch.no_grad():
            network(input_ids=tokens_BT, use_cache=False)


def on_stream(network: nn.Module, stream: torch.cuda.Stream, tokens_BT: Tensor) -> None:
    stream.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        in_turn([network], tokens_BT)


def on_streams(networks: Sequence[nn.Module], streams: Sequence[torch.cuda.Stream], tokens_BT: Tensor) -> None:
    for network, stream in zip(networks, streams, strict=True):
        on_stream(network, stream, tokens_BT)


def in_threads(networks: Sequence[nn.Module], streams: Sequence[torch.cuda.Stream], tokens_BT: Tensor) -> None:
    pairs = zip(networks, streams, strict=True)
    threads = [threading.Thread(target=on_stream, args=(*pair, tokens_BT)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def milliseconds(work: Callable[[], None], rounds: int) -> float:
    """The median until the GPU has done it."""
    seconds = []
    for _ in range(WARM_UP + rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds[WARM_UP:])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.forward_streams")
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        "| model | tokens | one | three in turn | on streams | in threads |\n| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    for shape in given.shapes:
        networks = [a_network(shape) for _ in range(MODELS)]
        streams = [torch.cuda.Stream() for _ in networks]
        for rows in given.rows:
            tokens_BT = torch.randint(0, VOCABULARY, (rows, LENGTH), device="cuda")
            ways = (
                partial(in_turn, networks[:1], tokens_BT),
                partial(in_turn, networks, tokens_BT),
                partial(on_streams, networks, streams, tokens_BT),
                partial(in_threads, networks, streams, tokens_BT),
            )
            figures = " | ".join(f"{milliseconds(way, given.rounds):.1f}" for way in ways)
            print(f"| {shape} | {rows * LENGTH:,} | {figures} |", flush=True)
        del networks, ways
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
