"""Long rows on one GPU, beside what others publish for the same shapes on one H100.

    python -m tests.gpu.long_context OUT.json [--rows 0.6b-rl-64k …] [--seconds 560] [--profile] [--dry-run]
    python -m tests.gpu.long_context OUT.json --device cpu --rows tiny tiny-lora

Whole steps on random weights in the shape of Qwen3, compiled layers, as `tests.gpu.context` takes them: each row in a
process of its own with its own time limit, so one that hangs or runs out of memory costs no other, and OUT.json is
written after each. None begins that the rest of `--seconds` does not hold. What is recomputed and resharded is what
`training.memory=auto` chooses for `--memory`; `--dry-run` prints it. Tokens/s count all tokens of the rows; MFU is as
docs/metrics.md counts it, those of others are as they publish them.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import RollcallError
from pipeline.topology.gpu_memory import trainer_memory
from pipeline.topology.memory_choice import choose_memory
from pipeline.topology.memory_fit import check_memory
from pipeline.train.model.model_size import sizes_of
from tests.fakes.configs import make_config
from tests.gpu import context


@dataclass(frozen=True)
class Case:
    """A step: `count` rows of `length` tokens, with adapters of rank `lora` (0: all weights).

    Attributes:
        loss: `sft`, or `grpo` for a step of RL on sampled rows.
        seconds: limit of the case.
        published: tokens/s and MFU of others, by name.
    """

    shape: str
    length: int
    count: int = 1
    lora: int = 0
    loss: str = "sft"
    seconds: float = 90.0
    published: dict[str, tuple[float, float]] | None = None


CASES = {
    "0.6b-rl-64k": Case("0.6b", 65_536, loss="grpo", seconds=110, published={"prime-rl": (10_147, 0.268)}),
    "4b-lora-rl-16k": Case("4b", 16_384, 1, 16, "grpo", 110, {"prime-rl": (6_229, 0.217)}),
    "8b-lora-sft-4k": Case("8b", 4096, 4, 16, "sft", 130, {"Automodel": (14_100, 0.43)}),
    "8b-lora-sft-4k-two-rows": Case("8b", 4096, 2, 16, "sft", 130, {"Automodel": (14_100, 0.43)}),
    "8b-lora-sft-4k-one-row": Case("8b", 4096, 1, 16, "sft", 130, {"Automodel": (14_100, 0.43)}),
    "0.6b-sft-16k": Case("0.6b", 16_384, published={"prime-rl": (25_486, 0.237)}),
    "4b-lora-rl-64k": Case("4b", 65_536, 1, 16, "grpo", 280, {"prime-rl": (4_164, 0.374)}),
    "1.7b-32k": Case("1.7b", 32_768, seconds=100),
    "1.7b-64k": Case("1.7b", 65_536, seconds=120),
    "0.6b-32k": Case("0.6b", 32_768),
    "tiny": Case("tiny", 256, 2, seconds=200),
    "tiny-lora": Case("tiny", 256, 2, 4, "grpo", 200),
}
"""The most wanted first."""
LEAST_SECONDS = 40.0


def config_of(case: Case, model: Path, memory: float) -> RunConfig:
    """The case as a plan of one GPU of `memory` GiB."""
    return make_config(
        resources={
            "device": "cuda",
            "gpu_memory": f"{memory:g}G",
            "trainer": {"processes": 1, "gpus": 1},
        },
        model={
            "path": str(model),
            "init": "pretrained",  # a run refuses adapters on random weights
            "lora": {"rank": case.lora},
            "dtype": "bfloat16",
            "max_length": case.length,
        },
        training={
            "steps": 0,
            "prompts_per_step": 1,
            "sft": {"steps": 1, "batch": case.count},
            "micro_batch_tokens": case.count * case.length,
            "compile": True,
            "memory": "auto",
        },
    )


def plan(case: Case, model: Path, memory: float) -> tuple[RunConfig, str]:
    """The config with what `training.memory=auto` chooses, and what it takes; `ConfigError` if nothing fits.

    The arithmetic reads no weights, but a plan has some.
    """
    folder = model / "plan"
    context.write_shape(case.shape, case.length, folder)
    (folder / "model.safetensors").touch()
    config = config_of(case, folder, memory)
    sizes = sizes_of(config.model)
    config, _ = choose_memory(config, sizes)
    check_memory(config, sizes)
    return config, str(trainer_memory(config, sizes))


def time_case(case: Case, given: argparse.Namespace, model: Path, seconds: float) -> dict[str, Any]:
    """The figures of a case, or its error."""
    context.write_shape(case.shape, case.length, model)
    try:
        config, need = plan(case, model, given.memory)
    except RollcallError as error:
        return {"error": str(error)}
    training = config.training
    settings = argparse.Namespace(
        steps=given.steps,
        shape=case.shape,
        recompute=training.activation_checkpointing,
        reshard=training.reshard_after_forward,
        compile=given.device == "cuda",
        device=given.device,
        lora=case.lora,
        loss=case.loss,
        rows=case.count,
        patience=seconds,
        profile=given.profile,
    )
    chosen = {"recompute": settings.recompute, "reshard": settings.reshard, "expected": need}
    if given.dry_run:
        return chosen
    return context.attempt(settings, model, case.length, 1, 1) | chosen | {"published": case.published}


def table(found: dict[str, dict[str, Any]]) -> str:
    """A line for each case, with the ratio to each published figure."""
    lines = [f"{'':16s} {'s/step':>8s} {'tokens/s':>9s} {'MFU':>6s} {'peak GiB':>8s}  beside"]
    for name, each in found.items():
        if "step_seconds" not in each:
            lines.append(f"{name:16s} {each.get('error') or each}")
            continue
        rate = each["tokens_per_second"]
        others = [f"{who} {speed:,.0f} ({rate / speed:.2f})" for who, (speed, _) in (each["published"] or {}).items()]
        numbers = f"{each['step_seconds']:8.3f} {rate:9,.0f} {each['mfu']:6.3f} {each['peak_gib']:8.1f}"
        lines.append(f"{name:16s} {numbers}  {', '.join(others)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", nargs="*", choices=CASES, default=[n for n in CASES if not n.startswith("tiny")])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--memory", type=float, default=76.0, help="GiB of the GPU that a plan may take")
    parser.add_argument("--profile", action="store_true", help="trace each case too: launches and times by phase")
    parser.add_argument("--dry-run", action="store_true", help="print what would be timed, and its memory")
    given = parser.parse_args()
    begun, found = time.perf_counter(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for name in given.rows:
            left = given.seconds - (time.perf_counter() - begun)
            if left < LEAST_SECONDS:
                found[name] = {"error": "not begun: time is over"}
            else:
                found[name] = time_case(CASES[name], given, Path(folder), min(CASES[name].seconds, left))
            given.out.write_text(json.dumps(found, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()
