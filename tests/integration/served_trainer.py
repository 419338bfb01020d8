"""A trainer that serves, without an agent: `python -m tests.integration.served_trainer <config> <root> <attempt>`."""

import signal
import sys
from pathlib import Path

import torch

from pipeline.config import RunConfig
from pipeline.tinker.server_pools import server_facts
from pipeline.train.batching.packing import Budget
from pipeline.train.controller.lead_or_serve import run_controller_or_worker
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import Deadlines
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.service.service_loop import ServiceLoop
from pipeline.utils import logs, subprocesses


def main(config_text: str, root: str, attempt: str, *servers: str) -> None:
    subprocesses.exit_with_parent()
    logs.configure("trainer")
    torch.set_num_threads(1)
    config = RunConfig.model_validate_json(config_text)
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))

    def lead(dispatch: RankGroup) -> None:
        def pulse() -> None:
            dispatch.keepalive()
            if asked:
                raise Interrupted("asked to end")

        facts = server_facts(config.serve, servers[1:], servers[0] if servers else "")
        engine = ServiceLoop(
            dispatch, config, Path(root), str(Path(root).parent / "checkpoints"), attempt, facts, pulse
        )
        engine.restore()
        try:
            engine.run()
        except Interrupted:
            return

    run_controller_or_worker(
        lead, Budget(config.training.micro_batch_tokens), patience=Deadlines(operation=60, control=60)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
