"""docs/data.md, run word by word; and a run on a dataset that is interrupted in the middle of an epoch."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pipeline.rundir.metrics import read_rows
from tests.integration.launched import ROOT, Launched
from tests.patience import WAIT_SECONDS

pytestmark = [pytest.mark.integration, pytest.mark.slow]
PAGE = ROOT / "docs" / "data.md"


def test_the_page_runs_word_by_word(tmp_path: Path) -> None:
    for name in ("launchers", "conf"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = []
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        done = subprocess.run(
            ["bash", "-e", "-c", block],
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    run = tmp_path / "runs" / "sft"
    assert "what is trained is green:\n^1+2=3$" in said[0]
    assert "finished 5 steps" in said[0]  # 3 epochs of 3 rows
    for name in ("model", "best", "report.html"):
        assert (run / name).exists(), name
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [0, 5]
    assert not (tmp_path / "runs" / "look").exists()
    assert "rank 0: trainer.0" in said[1]


ROWS, BATCH, EPOCHS = 24, 4, 30
SETTINGS = (
    "experiment=sft",
    f"training.warm_start.batch={BATCH}",
    f"training.warm_start.epochs={EPOCHS}",
    "training.warm_start.lr=1e-3",
    "training.warm_start.steps=0",
    "training.steps=0",
    "training.eval_every=20",
    "training.checkpoint_every=1000",
    "data.eval_rows=4",
    "resources.trainer.processes=1",
    "task.options={}",
)


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    lines = []
    for number in range(ROWS + 4):
        said = {"role": "assistant", "content": str(3 * number)}
        lines.append(json.dumps({"messages": [{"role": "user", "content": f"3*{number}"}, said]}))
    path.write_text("\n".join(lines))
    return path


def losses(launched: Launched, kind: str = "train") -> dict[int, float]:
    name = "loss" if kind == "train" else "eval/loss"
    rows: list[dict[str, Any]] = [row for row in read_rows(launched.run.metrics) if row["kind"] == kind]
    return {row["step"]: row[name] for row in rows}


def test_a_run_that_is_interrupted_within_an_epoch_ends_with_the_same_model(tmp_path: Path, chat: Path) -> None:
    settings = (*SETTINGS, f"data.path={chat}")
    whole = Launched.start(tmp_path, "whole", *settings)
    assert whole.end() == 0, whole.output()
    cut = Launched.start(tmp_path, "cut", *settings)
    cut.wait("some steps", lambda: len(losses(cut)) >= 8, WAIT_SECONDS)
    cut.interrupt(signal.SIGTERM)
    assert cut.end() == 143, cut.output()
    done = len(losses(cut))
    assert 8 <= done < ROWS * EPOCHS // BATCH
    resumed = Launched.start(tmp_path, "cut", *settings)
    assert resumed.end() == 0, resumed.output()
    assert losses(resumed) == losses(whole)
    assert losses(resumed, "eval") == losses(whole, "eval")
    for name in ("model", "best"):
        mine, theirs = (load_file(run.root / name / "model.safetensors") for run in (resumed.run, whole.run))
        assert all(np.array_equal(mine[key], theirs[key]) for key in theirs), name

    chat.write_text(chat.read_text().replace('"3*5"', '"3*6"'))
    (resumed.run.finished).unlink()
    changed = Launched.start(tmp_path, "cut", *settings)
    assert changed.end() != 0
    assert "its rows are not those that this run has trained so far" in changed.output()
    for launched in (whole, cut, resumed, changed):
        launched.close()
