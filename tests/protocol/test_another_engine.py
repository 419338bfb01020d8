"""An inference engine that is a new folder of `pipeline/inference`, and nothing else but a key of the run."""

from pathlib import Path

import pytest

from tests.support.copied_checkout import CopiedCheckout

ENGINE = """
from pipeline.utils.fork_server import Stage

class EchoEngine:
    socket_variables = cache_variables = ()

    def check_installed(self):
        print("echo is installed")

    def check_model(self, config, family, experts):
        print(f"echo serves {family}")

    def check_config(self, config):
        print(f"echo takes {config.inference.extra_args}")

    def check_gpus(self, config, gpus):
        pass

    def warnings(self, config):
        yield "echo repeats its prompt"

    def imports(self, config):
        return Stage("server", ())

    def command(self, config, placement, clients):
        return ("echo", config.model.path, *config.inference.extra_args)

    def environment(self, config, placement, world):
        return {"ECHO_WORLD": str(world)}

    def adapter_environment(self, config, folder):
        return {}


ENGINE = EchoEngine()
"""
LAUNCH = """
from types import SimpleNamespace
from pathlib import Path
from pipeline.roles.inference import launch
from pipeline.topology.plan import Placement
from slurm.submission.compose_config import compose_config
config = compose_config(["experiment=demo", "cluster=local", "inference.engine=echo", "inference.extra_args=[--twice]"])
place = Placement(role="inference", index=0, rank=0, address="127.0.0.2", ports=(4321,))
paths = SimpleNamespace(world=Path("/run/world.json"), adapters=lambda name: Path("/run") / name)
command = launch(SimpleNamespace(config=config, placement=place, paths=paths, world=SimpleNamespace(password="")))
print(command.argv[0], command.argv[-1], command.env["ECHO_WORLD"])
"""


@pytest.fixture
def checkout(tmp_path: Path) -> CopiedCheckout:
    copy = CopiedCheckout.make(tmp_path / "checkout")
    folder = copy.root / "pipeline" / "inference" / "echo"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "echo_engine.py").write_text(ENGINE)
    return copy


def test_a_new_folder_is_all_that_another_engine_needs(checkout: CopiedCheckout) -> None:
    chosen = ("experiment=demo", "cluster=local", "inference.engine=echo", "inference.extra_args=[--twice]")
    shown = checkout.launch("submit.py", *chosen, f"output={checkout.root / 'runs'}", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    for line in ("echo is installed", "echo serves qwen3", "echo takes ('--twice',)"):
        assert line in shown.stdout
    assert "warning: echo repeats its prompt" in shown.stderr

    started = checkout.run("-c", LAUNCH)
    assert started.stdout.splitlines()[-1] == "echo --twice /run/world.json", started.stderr
