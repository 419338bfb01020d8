"""What the tests of supervisors share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.cluster_keys import ClusterConfig
from pipeline.run.paths import AttemptPaths
from pipeline.topology.plan import RoleName
from slurm.agent import supervisor
from tests.protocol.small_roles import FOREVER, RANKS, UNTIL_TOLD, Attempt


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Attempt]:
    def make(
        startup_seconds: float = 20,
        heartbeat_seconds: float = 60,
        gpus: dict[RoleName, tuple[int, ...]] | None = None,
        restarts: int = 0,
        faults: str = "",
        ports: dict[RoleName, tuple[int, ...]] | None = None,
        spare: bool = False,
        **scripts: str,
    ) -> Attempt:
        cluster = ClusterConfig(
            scheduler="local",
            startup_seconds=startup_seconds,
            stop_seconds=1,
            grace_seconds=3,
            heartbeat_seconds=heartbeat_seconds,
        )
        usual = dict.fromkeys(RANKS, FOREVER) | {"trainer": UNTIL_TOLD}
        distinct = {role: f"{(usual | scripts)[role]}\n# {role}" for role in RANKS}
        paths = AttemptPaths(tmp_path, "r", "a-0")
        made = Attempt(paths, cluster, distinct, gpus or {}, restarts, faults, ports or {}, spare=spare)
        monkeypatch.setattr(supervisor, "role_command", made.launch)
        made.start()
        return made

    return make
