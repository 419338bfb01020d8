"""One attempt of a trainer that serves the API.

Owns the wiring: which front, which servers, which checkpoints; and how an attempt ends. A run that serves is never
finished: it ends when it is told to, after a last commit.
"""

import logging
import signal
import time

from pipeline.api.records import Facts
from pipeline.checkpoints import root_of
from pipeline.roles.context import RoleContext
from pipeline.rundir.documents import SubmittedJob
from pipeline.rundir.events import Listener
from pipeline.system import files
from pipeline.training.batches import Interrupted
from pipeline.training.dispatch.dispatch import Dispatch
from pipeline.training.service.engine import Engine

log = logging.getLogger(__name__)
REPORT_SECONDS = 2.0


class ServiceSession:
    """The controller's part of one attempt."""

    def __init__(self, context: RoleContext, dispatch: Dispatch) -> None:
        self._context, self._dispatch = context, dispatch
        self._listener = Listener(context.events, ranks=1 + max(place.rank for place in context.world.placements))
        self._told = 0.0

    def run(self) -> None:
        """Serve until the attempt is ending."""
        context = self._context
        servers = tuple(place.endpoint for place in context.world.of_role("inference"))
        engine = Engine(
            self._dispatch,
            context.config,
            context.run.api,
            root_of(context.config, context.run, context.paths.run_id),
            context.paths.attempt,
            Facts(servers, context.world.password),
            self._pulse,
        )
        engine.on_progress = self._report
        submitted = files.read_document(context.run.job, SubmittedJob)
        engine.restore(submitted.job if submitted else "")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # from now on events say when to commit and end
        context.announce("ready", "serving")
        try:
            engine.run()
        except Interrupted as reason:
            log.info("%s; what is done is committed", reason)

    def _report(self, models: int, steps: int) -> None:
        now = time.monotonic()
        if now - self._told > REPORT_SECONDS:
            self._told = now
            self._context.report("ready", f"{models} models, {steps} steps in this attempt")

    def _pulse(self) -> None:
        """Show the ranks that the controller lives; raises `Interrupted` when the attempt is ending."""
        self._dispatch.idle()
        heard = self._listener.heard()
        ending = heard.get("failed") or heard.get("draining")
        if ending is not None:
            raise Interrupted(f"{ending.name} by {ending.by}")
