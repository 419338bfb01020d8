"""A trainer that serves, without an agent: `python -m tests.integration.served_trainer <config> <root> <attempt>`."""

import signal
import sys
from pathlib import Path

import torch

from pipeline.api.records import Facts
from pipeline.config import RunConfig
from pipeline.system import logs, process
from pipeline.training.batches import Interrupted
from pipeline.training.dispatch.dispatch import Dispatch
from pipeline.training.dispatch.lead import lead_or_serve
from pipeline.training.dispatch.ranks import Deadlines
from pipeline.training.packing import Budget
from pipeline.training.service.engine import Engine


def main(config_text: str, root: str, attempt: str, *servers: str) -> None:
    process.die_with_parent()
    logs.configure("trainer")
    torch.set_num_threads(1)
    config = RunConfig.model_validate_json(config_text)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))

    def lead(dispatch: Dispatch) -> None:
        def pulse() -> None:
            dispatch.idle()
            if asked:
                raise Interrupted("asked to end")

        facts = Facts(servers[1:], servers[0] if servers else "")
        engine = Engine(dispatch, config, Path(root), str(Path(root).parent / "checkpoints"), attempt, facts, pulse)
        engine.restore()
        try:
            engine.run()
        except Interrupted:
            return

    lead_or_serve(lead, Budget(config.training.micro_batch_tokens), patience=Deadlines(operation=60, control=60))


if __name__ == "__main__":
    main(*sys.argv[1:])
