"""A copy of the packages, to which a test adds a folder, and the launchers of that copy."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 60.0


@dataclass(frozen=True)
class CopiedCheckout:
    """The packages and launchers in `root`; `variables` are added to the environment of its commands."""

    root: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def make(cls, root: Path, **variables: str) -> "CopiedCheckout":
        for name in ("pipeline", "slurm", "conf", "launchers"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        return cls(root, variables)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Python with these arguments, which imports the packages of this copy."""
        environment = os.environ | {"PYTHONPATH": str(self.root)} | self.variables
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    def launch(self, launcher: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.root / "launchers" / launcher), *arguments)
