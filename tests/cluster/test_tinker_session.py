"""A session of the Tinker API on a real Slurm, through all that may end under it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from safetensors.numpy import load_file

from pipeline.run.paths import RunPaths
from pipeline.tinker.gateway_settings import Address, address_file
from pipeline.utils import shared_files
from pipeline.utils.waiting import wait_for
from tests.cluster.slurm_cluster import SlurmCluster
from tests.cluster.slurm_run import SlurmRun
from tests.support.runs.launched import ROOT
from tests.support.servers.cutting_proxy import CuttingProxy, a_cutting_proxy

pytestmark = [pytest.mark.cluster, pytest.mark.trial, pytest.mark.timeout(1800)]
SCRIPT = Path(__file__).with_name("tinker_session.py")
STEPS = 50
SECONDS = 400.0


class Served:
    """A run that serves, as `launchers/serve.py` started it."""

    def __init__(self, slurm: SlurmCluster, root: Path, launcher: "subprocess.Popen[bytes]", log: Path) -> None:
        self.slurm, self.paths, self.launcher, self._log = slurm, RunPaths(root), launcher, log
        wait_for("the gateway", lambda: self.address is not None or self._over(), SECONDS, missing=self.said)
        wait_for("the job", lambda: self.paths.job.exists() or self._over(), SECONDS, missing=self.said)

    @property
    def address(self) -> Address:
        """Where the gateway listens; None before it has said so."""
        return shared_files.read_document(address_file(self.paths.api), Address)  # type: ignore[return-value]

    def _over(self) -> bool:
        assert self.launcher.poll() is None, self.said()
        return False

    def said(self) -> str:
        return self._log.read_text()

    @property
    def run(self) -> SlurmRun:
        return SlurmRun(self.slurm, self.paths)

    def processes(self, module: str) -> list[psutil.Process]:
        """The processes of a module of ours that belong to this run."""
        found = []
        for each in psutil.process_iter(["cmdline"]):
            words = each.info["cmdline"] or []
            if module in words and any(str(self.paths.root) in word for word in words):
                found.append(each)
        return found

    @property
    def server(self) -> psutil.Process | None:
        """The run's vLLM server, without what it started."""
        found = self.processes("vllm.entrypoints.openai.api_server")
        return min(found, key=lambda each: each.create_time(), default=None)


@contextmanager
def serving(slurm: SlurmCluster, output: Path, *arguments: str) -> Iterator[Served]:
    command = [sys.executable, str(ROOT / "launchers" / "serve.py"), "experiment=tinker", "cluster=slurm", "name=t"]
    command += [f"output={output}", "serve.port=0", "serve.checkpoint_steps=5", *arguments]
    command += ["serve.sampling=true", "resources.inference.nodes=1"]
    log = output / "launcher.log"
    with log.open("wb") as out:
        launcher = subprocess.Popen(slurm.wrap(command), cwd=ROOT, env=slurm.env, stdout=out, stderr=out)
    try:
        served = Served(slurm, output / "t", launcher, log)
        yield served
        slurm.run("scancel", served.run.job)
    finally:
        launcher.send_signal(signal.SIGINT)
        try:
            launcher.wait(60)
        finally:
            launcher.kill()


class Session:
    """The script of a client, as a process of its own."""

    def __init__(self, url: str, key: str, log: Path, steps: int = STEPS) -> None:
        self._log = log
        env = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": key}
        with log.open("wb") as out, log.with_suffix(".err").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(steps)], env=env, stdout=out, stderr=errors
            )

    def lines(self, word: str) -> list[str]:
        return [line for line in self._log.read_text().splitlines() if line.startswith(f"{word} ")]

    def wait_for_step(self, step: int) -> None:
        def there() -> bool:
            assert self._process.poll() in (None, 0), self.errors()
            return len(self.lines("step")) > step

        wait_for(f"step {step}", there, SECONDS, missing=self.errors)

    def end(self) -> tuple[Sequence[str], str]:
        """The losses of all steps, and the path of the adapter."""
        assert self._process.wait(SECONDS) == 0, self.errors()
        return self.lines("step"), self.lines("adapter")[0].split()[1]

    def errors(self) -> str:
        return self._log.with_suffix(".err").read_text()[-4000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def preempt(served: Served) -> None:
    """A job of a higher partition takes all nodes for three seconds."""
    attempts = len(served.run.attempts)
    served.slurm.submit("sleep 3", "--partition=high", f"--nodes={served.slurm.nodes}", "--exclusive")
    wait_for("a further attempt", lambda: len(served.run.attempts) > attempts, SECONDS, missing=served.said)


def kill_trainer(served: Served) -> None:
    attempts = len(served.run.attempts)
    trainers = served.processes("pipeline.roles.trainer")
    assert trainers
    for each in trainers:  # the trainer, and what it started
        with suppress(psutil.NoSuchProcess):
            each.kill()
    wait_for("a further attempt", lambda: len(served.run.attempts) > attempts, SECONDS, missing=served.said)


def kill_server(served: Served) -> None:
    """The only one; it is started again in the same attempt (decision 0024)."""
    attempts = len(served.run.attempts)
    server = served.server
    assert server is not None
    server.kill()
    wait_for("another server", lambda: served.server not in (None, server), SECONDS, missing=served.said)
    assert len(served.run.attempts) == attempts


def kill_gateway(served: Served) -> None:
    gone = served.address.pid
    os.kill(gone, signal.SIGKILL)
    wait_for("another gateway", lambda: served.address.pid != gone, SECONDS, missing=served.said)


def adapter(served: Served, path: str) -> dict[str, bytes]:
    folder = served.paths.api / "weights" / path.removeprefix("tinker://").replace(":", "-")
    (version,) = folder.iterdir()
    return {name: tensor.tobytes() for name, tensor in load_file(version / "adapter_model.safetensors").items()}


def test_a_session_of_fifty_steps_comes_to_the_same_bits_through_all_that_ends_under_it(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    with serving(cluster, tmp_path) as served:
        key = (served.paths.api / "key").read_text()
        undisturbed = Session(served.address.url, key, tmp_path / "undisturbed.log")
        losses, path = undisturbed.end()
        assert len(losses) == STEPS
        expected = adapter(served, path)
        gateway = urlsplit(served.address.url)
        with a_cutting_proxy(gateway.hostname or "", gateway.port or 0) as proxy:
            session = Session(f"http://127.0.0.1:{proxy.port}", key, tmp_path / "disturbed.log")
            try:
                disturb(session, served, proxy)
                found, path = session.end()
            finally:
                session.kill()
            assert proxy.lost == 2
        assert found == losses
        assert session.lines("sampled") == undisturbed.lines("sampled")
        assert adapter(served, path) == expected
        assert len(served.run.attempts) == 3
        assert served.run.fields()["JobState"] == "RUNNING"


def disturb(session: Session, served: Served, proxy: CuttingProxy) -> None:
    session.wait_for_step(7)
    preempt(served)
    session.wait_for_step(16)
    proxy.lose_next_answer()
    session.wait_for_step(22)
    kill_trainer(served)
    session.wait_for_step(28)
    kill_server(served)
    session.wait_for_step(33)
    kill_gateway(served)
    session.wait_for_step(41)
    proxy.lose_next_answer()
