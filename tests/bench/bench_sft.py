"""Supervised fine-tuning beside TRL's SFTTrainer: the same model, conversations, batches, optimizer and schedule.

    python -m tests.bench.bench_sft --trl /path/to/python [--rows 192] [--batch 16] [--epochs 2] [--lora 0]

`--trl` is the Python of an environment that has TRL; it is no dependency of the project:

    python -m venv trl && trl/bin/pip install trl peft

Both train a model of 0.9M parameters in float32 on the CPU, one thread, from the same weights. The batches are those of
Rollcall's seeded permutation, which TRL is given in that order. The template marks what the assistant says, as TRL
needs it (`assistant_only_loss`). Prints the losses of some steps, how far they are apart at most, and tokens a CPU
second, counted alike: tokens of all rows over the CPU seconds of all steps but the first two. The rule is that no
step's loss is further apart than 1 %. Without `--trl` it says how to get it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from pipeline.config import RunConfig, load_config
from pipeline.train.batching.conversation_rows import Conversations
from pipeline.train.controller.lead_or_serve import run_role_of_rank
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.sft import SupervisedFineTuning
from pipeline.train.train_jobs import SftJob, jobs_of
from pipeline.train.worker_spec import models_of
from tests.bench.tables import judge, markdown
from tests.fakes.chat_models import MARKED, make_chat_model
from tests.support.models.tiny import tiny_network
from tests.support.ranks.forked_ranks import run_ranks

LR, WARM_UP, LIMIT = 1e-3, 2, 0.01
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "user", "assistant", "def", "1", "+", "2", "="]


def make_model(folder: Path) -> Path:
    """A small Qwen3 with weights."""
    make_chat_model(folder, MARKED)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    drawn = {"initializer_range": 0.05, "tie_word_embeddings": False}
    tiny_network(0, vocab_size=size, **drawn, **shape, **heads).save_pretrained(folder)
    return folder


def make_data(path: Path, rows: int) -> Path:
    """Conversations of one to three turns whose answers repeat the question."""
    draw = Random(0)

    def text() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randrange(2, 20)))

    with path.open("w") as file:
        for _ in range(rows):
            messages = []
            for asked in [text() for _ in range(draw.randrange(1, 4))]:
                messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": asked}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def make_config(model: Path, data: Path, given: argparse.Namespace) -> RunConfig:
    start = {"epochs": given.epochs, "batch": given.batch, "lr": LR}
    return load_config(
        {
            "name": "bench",
            "cluster": {"scheduler": "local"},
            "model": {
                "path": str(model),
                "max_length": 1024,
                "lora": {"rank": given.lora, "alpha": 2 * given.lora or 16},
            },
            "task": {"name": "arithmetic"},
            "loss": {"name": "grpo"},
            "data": {"path": str(data)},
            "optim": {"schedule": "cosine"},
            "training": {"steps": 0, "prompts_per_step": 1, "sft": start, "micro_batch_tokens": 1 << 16},
        }
    )


def train(rank: int, tree: dict[str, Any], out: Path) -> None:
    """Rollcall's side, in a process of its own: losses, seconds and tokens of each step, and the order of the rows."""
    config, found = load_config(tree), {}

    def lead(dispatch: RankGroup) -> None:
        conversations = Conversations(config)
        (job,) = jobs_of(config, len(conversations.rows))
        assert isinstance(job, SftJob)
        dispatch.init_model("policy", models_of(config, "sft", job.optim, job.steps)["policy"])
        algorithm = SupervisedFineTuning(job, dispatch, conversations, lambda: None)
        algorithm.begin(0)
        steps = []
        for step in range(job.steps):
            began = time.process_time()
            metrics = algorithm.step(step)
            steps.append((metrics["loss"], time.process_time() - began, metrics["tokens/batch"]))
        found["steps"] = steps
        found["order"] = [row.prompt for step in range(job.steps) for row in conversations(step, job.batch)]

    run_role_of_rank(config, "", lead)
    out.write_text(json.dumps(found))


def tokens_per_second(steps: list[list[float]]) -> float:
    """Of (loss, CPU seconds, tokens) of each step."""
    return sum(tokens for _, _, tokens in steps[WARM_UP:]) / sum(seconds for _, seconds, _ in steps[WARM_UP:])


def train_with_trl(python: str, folder: Path, config: RunConfig, order: list[int]) -> dict[str, Any]:
    """TRL's side: what `tests/bench/trl_sft.py` wrote."""
    start, lora = config.training.sft, config.model.lora
    asked = {
        "model": config.model.path,
        "data": config.data.path,
        "order": order,
        "batch": start.batch,
        "lr": start.lr,
        "betas": (config.optim.beta1, config.optim.beta2),
        "clip_norm": config.optim.clip_norm,
        "lora": {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": list(lora.targets)} if lora.rank else None,
        "out": str(folder / "trl.json"),
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    script = Path(__file__).with_name("trl_sft.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [python, str(script), str(folder / "asked.json")],
        check=True,
        timeout=900,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    found: dict[str, Any] = json.loads((folder / "trl.json").read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default="", help="Python of an environment with TRL")
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: all weights")
    given = parser.parse_args()
    if not given.trl:
        print("skipped: give a Python that has TRL, made by: python -m venv trl && trl/bin/pip install trl peft; --trl")
        return 0
    if given.rows % given.batch:
        parser.error("rows are to be a multiple of batch: TRL ends an epoch with a smaller batch")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = make_config(make_model(folder / "model"), make_data(folder / "chat.jsonl", given.rows), given)
        run_ranks(1, train, config.model_dump(mode="json"), folder / "ours.json")
        ours = json.loads((folder / "ours.json").read_text())
        theirs = train_with_trl(given.trl, folder, config, ours["order"])
    losses = [(mine[0], other[0]) for mine, other in zip(ours["steps"], theirs["steps"], strict=True)]
    apart = [abs(mine - other) / other for mine, other in losses]
    shown = sorted({0, 1, 2, *range(0, len(losses), max(1, len(losses) // 6)), len(losses) - 1})
    titles = ("step", "Rollcall", "TRL", "difference")
    print(markdown(titles, [(step + 1, *losses[step], apart[step]) for step in shown]))
    speeds = [tokens_per_second(each["steps"]) for each in (ours, theirs)]
    print(f"\n{len(losses)} steps; apart at most {max(apart):.2e}, median {statistics.median(apart):.2e}\n")
    print(
        markdown(
            ("", "tokens/CPU s", "of TRL"), [("Rollcall", speeds[0], speeds[0] / speeds[1]), ("TRL", speeds[1], 1.0)]
        )
    )
    print(f"\nTRL {theirs['trl']}, transformers {theirs['transformers']}; one thread each")
    return judge(f"no step's loss is more than {LIMIT:.0%} apart", max(apart) <= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
