"""One attempt of a trainer that serves the API.

Owns the wiring (the gateway, the servers, the checkpoints) and the end of an attempt. A run that serves never finishes:
it ends on request, after a last checkpoint.
"""

import logging
import time

from pipeline.checkpoints import root_of
from pipeline.roles.rank0 import Rank0
from pipeline.roles.role_context import RoleContext
from pipeline.run.run_documents import SubmittedJob
from pipeline.tinker.server_pools import server_facts
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.service.service_loop import ServiceLoop
from pipeline.utils import shared_files

log = logging.getLogger(__name__)
REPORT_SECONDS = 2.0


class TinkerSession(Rank0):
    """Rank 0's part of one attempt."""

    def __init__(self, context: RoleContext, dispatch: RankGroup) -> None:
        super().__init__(context, dispatch)
        self._reported = 0.0

    def run(self) -> None:
        """Serve until the attempt is ending."""
        context = self._context
        placements = sorted(context.world.of_role("inference"), key=lambda placement: placement.index)
        servers = [placement.endpoint for placement in placements]
        engine = ServiceLoop(
            self._dispatch,
            context.config,
            context.run.api,
            root_of(context.config, context.run, context.paths.run_id),
            context.paths.attempt,
            server_facts(context.config.serve, servers, context.world.password),
            self._pulse,
            self._warming_up,
            context.paths,
        )
        engine.on_progress = self._report
        submitted = shared_files.read_document(context.run.job, SubmittedJob)
        engine.restore(submitted.job if submitted else "")
        self._get_ready("serving")
        try:
            engine.run()
        except Interrupted as reason:
            log.info("%s; the finished work is saved", reason)

    def _report(self, models: int, steps: int) -> None:
        now = time.monotonic()
        if now - self._reported > REPORT_SECONDS:
            self._reported = now
            self._context.report("ready", f"{models} models, {steps} steps in this attempt", **self._numbers)
