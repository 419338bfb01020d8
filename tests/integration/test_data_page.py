"""docs/data.md, run word by word."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.run.metrics_log import read_rows
from tests.patience import WAIT_SECONDS
from tests.support.runs.launched import ROOT

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
            timeout=4 * WAIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    run = tmp_path / "runs" / "sft"
    assert "trained tokens are green:\n^1+2=3$" in said[0]
    assert "finished 5 steps" in said[0]  # 3 epochs of 3 rows
    for name in ("model", "best", "report.html"):
        assert (run / name).exists(), name
    rows = read_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [0, 5]
    assert not (tmp_path / "runs" / "look").exists()
    assert "rank 0: trainer.0" in said[1]
