"""What a rank holds in memory while its model is loaded, exported, saved in a checkpoint, resumed, and published.

    python -m tests.bench.bench_loading [--ranks 1 2 4] [--dtype bfloat16] [--experts 32]

Makes a model of some 300 MB in a temporary folder (`--experts`: a mixture of that many experts in each layer), then
a world of each size. Prints for each phase and rank the most private memory (MiB, `RssAnon`, every 2 ms) beyond what
the process held after it had a tiny model, and what of it is more than the rank's float32 shards and its copy: of the
publication, its part of the version that waits for the servers, and of a checkpoint, the shards that are being written
while training goes on. In addition it is a part of the model's bytes in its compute type, which must not be above 0.3.
Exits with 1 if it is. Checkpoints are of the model without an optimizer; the first keeps its copies for later ones.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from pipeline.checkpoints import TrainerState, newest_checkpoint
from pipeline.config import InferenceConfig, ModelConfig
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.train.batching.packing import Budget
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.model_saving import await_save, load_models, stage_models, start_save
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.loop.weight_publisher import WeightPublisher
from pipeline.train.worker_spec import ModelSpec
from pipeline.utils.subprocesses import hold_port
from tests.bench.tables import judge, markdown
from tests.support.models.tiny import tiny_network

MARGIN = 0.3
MIB = 1 << 20
COLUMNS = ("ranks", "phase", "rank", "peak", "shards", "copy", "beyond", "part of the model")
Row = tuple[str, int, float, float, float, float, float]
_watch: list["Peak"] = []


class Peak:
    """The most private memory of this process, in bytes, since this was made; a thread looks every 2 ms."""

    def __init__(self) -> None:
        gc.collect()
        self.most, self._over = private(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._over.set()
        self._thread.join()
        return self.most

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, private())


def private() -> int:
    """Bytes of memory that no other process has, and no file."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def begin(site: RankState) -> None:
    _watch.append(Peak())


def end(site: RankState) -> int:
    return _watch.pop().stop()


@contextmanager
def watched(dispatch: RankGroup, most: list[int]) -> Iterator[None]:
    """Fill `most` with the most private memory of each rank meanwhile."""
    dispatch.run_on_all_models(begin)
    yield
    most += dispatch.run_on_all_models(end)


def make_model(folder: Path, size: int = 1024, layers: int = 9, experts: int = 0) -> None:
    """Some 150M parameters in bfloat16, in several files; of a mixture, layers of as many parameters."""
    shape = {"hidden_size": size, "intermediate_size": 3 * size, "num_hidden_layers": layers, "head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    if experts:
        shape |= {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * size // experts}
    kind = "qwen3_moe" if experts else "qwen3"
    network = tiny_network(0, model_type=kind, vocab_size=8000, tie_word_embeddings=False, **shape, **heads)
    network.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100MB")
    (folder / "tokenizer.json").write_text("{}")


def init(dispatch: RankGroup, model: Path, how: str, dtype: str) -> None:
    config = ModelConfig.model_validate({"path": str(model), "init": how, "dtype": dtype})
    dispatch.init_model("policy", ModelSpec("policy", config))


def measure(dispatch: RankGroup, model: Path, dtype: str) -> list[Row]:
    """A row for each phase and rank."""
    init(dispatch, model.parent / "tiny", "random", dtype)
    dispatch.remove_model("policy")
    none: list[int] = []
    with watched(dispatch, none):
        pass
    rows: list[Row] = []

    def phase(name: str, work: Callable[[], object], waits: int = 0) -> None:
        most: list[int] = []
        with watched(dispatch, most):
            work()
        size = dispatch.layout("policy").bytes
        for rank, memory in enumerate(dispatch.memory()):
            peak, waiting = most[rank] - none[rank], waits // len(most)
            beyond = peak - memory["policy"].model - waiting
            parts = (peak / MIB, memory["policy"].model / MIB, waiting / MIB, beyond / MIB, beyond / size)
            rows.append((name, rank, *parts))

    phase("load", lambda: init(dispatch, model, "pretrained", dtype))
    dispatch.remove_model("policy")
    phase("draw", lambda: init(dispatch, model, "random", dtype))
    with tempfile.TemporaryDirectory() as out:
        phase("export", lambda: dispatch.save_hf_model("policy", Path(out)))
    with hold_port() as holder:
        meeting = MeetingPoint("127.0.0.1", holder.getsockname()[1], "s3cret")
        with WeightSender([], meeting, InferenceConfig(), 1.0, lambda server, version: None) as sender:
            publisher = WeightPublisher(dispatch, sender, lambda: None)
            phase("first publication", lambda: publisher.start(1), dispatch.layout("policy").bytes)
    shards = sum(memory["policy"].model for memory in dispatch.memory())
    with tempfile.TemporaryDirectory() as out:
        phase("checkpoint", lambda: save(dispatch, out), shards)
        checkpoint = newest_checkpoint(out)
        assert checkpoint is not None
        phase("resume", lambda: load_models(dispatch, checkpoint, ["policy"]), shards)
    return rows


def save(dispatch: RankGroup, root: str) -> None:
    """Write a checkpoint, and wait until it is complete."""
    parts = stage_models(dispatch, ["policy"])
    start_save(dispatch, root, "1-0", TrainerState(job="rl", step=1, models=("policy",)), parts, keep=1)
    await_save(dispatch, "the checkpoint")
    dispatch.saver.result()


def rank_main(model: Path, dtype: str, out: Path) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()

    def lead(dispatch: RankGroup) -> None:
        out.write_text(json.dumps(measure(dispatch, model, dtype)))

    run_controller_or_worker(lead, Budget(4096))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.model:
        rank_main(given.model, given.dtype, given.out)
        return 0
    table = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", experts=given.experts)
        make_model(Path(folder) / "tiny", size=64, layers=1, experts=given.experts)
        for ranks in given.ranks:
            for row in world(ranks, Path(folder), given.dtype):
                table.append((ranks, *row))
    print(markdown(COLUMNS, table))
    return judge(f"at most {MARGIN} of the model's bytes beyond its shards", all(row[-1] <= MARGIN for row in table))


def world(ranks: int, folder: Path, dtype: str) -> list[Row]:
    """What torchrun's ranks measure."""
    out = folder / f"{ranks}.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    own = ["-m", "tests.bench.bench_loading", "--model", str(folder / "model"), "--dtype", dtype, "--out", str(out)]
    subprocess.run([sys.executable, *launcher, *own], check=True, timeout=300)
    rows: list[Row] = json.loads(out.read_text())
    return rows


if __name__ == "__main__":
    sys.exit(main())
