"""The loop of a trainer that serves the API's clients.

Owns the order: restore, then take a request, execute it, deliver its result; and the schedule of checkpoints. Promises
that a client's mistake fails its request alone; that a result is delivered only for executed work; that the cursors of
a checkpoint match its content exactly; and that no checkpoint contains a request whose result the gateway lacks. An
error on a rank ends the trainer, and the next one continues from the checkpoint.

    loop = ServiceLoop(dispatch, config, root, checkpoints, attempt, facts, pulse)
    loop.restore(job)
    loop.run()                # until `pulse` raises `Interrupted`; then a last checkpoint
"""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.tinker_keys import ServeConfig
from pipeline.errors import CheckpointError, SupersededError, first_line
from pipeline.run.paths import AttemptPaths
from pipeline.tinker.tinker_records import (
    Acknowledged,
    Create,
    Failed,
    Load,
    Pass,
    Result,
    Save,
    ServerFacts,
    Step,
    Unload,
    Work,
    WorkResult,
)
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.compile_warmup import Phase, WarmUp
from pipeline.train.loop.group_batches import Interrupted
from pipeline.train.service.client_models import RefusedRequest, ServedModels
from pipeline.train.service.gateway_client import GatewayClient
from pipeline.train.service.service_checkpoints import ServiceCheckpoints

log = logging.getLogger(__name__)
WAIT_SECONDS = 0.5
"""Time that one turn waits for work; between two turns the controller sends its heartbeat."""
MAX_SAVES = 0.02
"""Maximum fraction of time with a save in progress, unless `serve.checkpoint_seconds` requires more. A checkpoint has
all models, so its cost grows with their number, while the rate of steps does not."""


class ServiceLoop:
    """One attempt of a serving trainer; `root` is the gateway's folder, `checkpoints` the URL of the checkpoints."""

    def __init__(
        self,
        dispatch: RankGroup,
        config: RunConfig,
        root: Path,
        checkpoints: str,
        attempt: str,
        facts: ServerFacts,
        pulse: Callable[[], None],
        phase: Phase = nullcontext,
        paths: AttemptPaths | None = None,
    ) -> None:
        """`paths` are those of the attempt, if it belongs to a run."""
        self._config, self._pulse = config, pulse
        self._models = ServedModels(dispatch, config, root / "weights", attempt)
        self._commits = ServiceCheckpoints(checkpoints, attempt, dispatch, config.training.keep_checkpoints, paths)
        self._link = GatewayClient(root, attempt, facts, pulse)
        self._warm_up = WarmUp(config, dispatch, pulse, phase)
        self._cursors: dict[str, int] = {}
        """By model, the last request after which it had no accumulated gradients: the state that a checkpoint has."""
        self._done: dict[str, int] = {}
        """By model, the last completed request."""
        self._results: list[WorkResult] = []
        """Results that are not delivered to the gateway yet."""
        self._steps = 0
        self._dirty_since: float | None = None
        self._durable: dict[str, int] | None = None
        """The cursors of a durable checkpoint that are not delivered to the gateway yet."""
        self._saved_steps = 0
        self.on_progress: Callable[[int, int], None] = lambda models, steps: None

    def restore(self, job: str = "") -> None:
        """Load the last checkpoint of this run."""
        self._cursors = self._commits.restore(self._models, job)
        self._done = dict(self._cursors)
        if self._commits.none_yet:
            self._start_commit()  # without models: the requeue decision looks for a checkpoint as a sign of progress

    def run(self) -> None:
        """Serve until `pulse` raises `Interrupted`, then save a checkpoint."""
        try:
            self._serve()
        except Interrupted:
            self._commit_last()
            raise
        finally:
            self._link.close()

    def _serve(self) -> None:
        while True:
            self._pulse()
            self._models.warm_up(self._warm_up)
            work = self._turn(0.0 if self._durable else WAIT_SECONDS)
            self._commit_if_due()  # here, where the gateway has every result and no new request has begun
            if work is not None:
                self._results = self._do(work)

    def _turn(self, wait: float, *, ending: bool = False) -> Work | None:
        work = self._link.turn(lambda: dict(self._done), self._results, self._durable, wait, ending=ending)
        self._results, self._durable = [], None
        return work

    def _do(self, work: Work) -> list[WorkResult]:
        """Execute one request; its result, unless its client has one from an earlier trainer."""
        if work.seq <= self._done.get(work.model, -1):
            return []
        try:
            result = self._execute(work)
        except RefusedRequest as refusal:
            result = Failed(str(refusal), "user")
        except SupersededError:
            raise
        except CheckpointError as error:
            log.warning("%s: %s", work.request, error)
            result = Failed(first_line(error), "server")
        self._note(work)
        return [] if work.answered else [WorkResult(work.request, result)]

    def _execute(self, work: Work) -> Result:
        models, id, body = self._models, work.model, work.body
        match body:
            case Create():
                models.create(id, body.adapter)
            case Pass():
                return models.run_pass(id, body)
            case Step():
                return self._stepped(id, body)
            case Save():
                self._finish_commit()
                return models.save(id, body.folder, sampler=body.sampler)
            case Load():
                self._finish_commit()
                models.verify_saved(body.folder)
                if body.fresh:
                    models.create(id, body.adapter)
                models.load(id, body.folder, optimizer=body.optimizer)
            case Unload():
                models.remove(id)
        return Acknowledged()

    def _stepped(self, id: str, body: Step) -> Result:
        result = self._models.step(id, body)
        self._steps += 1
        self.on_progress(len(self._models.adapters), self._steps)
        return result

    def _note(self, work: Work) -> None:
        """Advance the model's cursors. Gradients of a `Pass` are in no checkpoint until the step after it."""
        id = work.model
        if isinstance(work.body, Unload) or id not in self._models:
            self._cursors.pop(id, None)
            self._done.pop(id, None)
            self._dirty_since = self._dirty_since or time.monotonic()
            return
        self._done[id] = work.seq
        if not self._models.pending(id):
            self._cursors[id] = work.seq
            if not isinstance(work.body, Pass | Save):
                self._dirty_since = self._dirty_since or time.monotonic()

    def _commit_if_due(self) -> None:
        """Note a checkpoint that has become durable; begin another if one is due."""
        serve = self._config.serve
        self._take_commit(self._commits.collect)
        if self._dirty_since is None or not self._commits.idle:
            return
        waited = time.monotonic() - self._dirty_since
        if save_is_due(serve, self._steps - self._saved_steps, waited, self._commits.rest):
            self._start_commit()

    def _finish_commit(self) -> None:
        """Wait for the save in progress: its collectives would interleave with those of a client's save or load."""
        self._take_commit(self._commits.finish)

    def _take_commit(self, collect: Callable[[], dict[str, int] | None]) -> None:
        """Note the cursors of a finished save. A failed one is only logged, and repeated later: a later trainer would
        repeat more requests, and this one loses nothing."""
        try:
            self._durable = collect() or self._durable
        except SupersededError:
            raise
        except CheckpointError as error:
            log.warning("a checkpoint could not be saved, and is tried again: %s", error)
            self._dirty_since = time.monotonic()

    def _start_commit(self) -> None:
        ready = {id: cursor for id, cursor in self._cursors.items() if id in self._models}
        self._commits.start(self._models, ready)
        self._saved_steps, self._dirty_since = self._steps, None

    def _commit_last(self) -> None:
        """Save the requests since the last checkpoint, so that the next trainer need not repeat them."""
        self._finish_commit()
        # A checkpoint with a request whose result the gateway lacks would lose the result: no trainer would execute the
        # request again. So without the gateway there is no last checkpoint.
        if self._results:
            try:
                self._turn(0.0, ending=True)
            except Interrupted:
                return
        if self._dirty_since is not None:
            self._start_commit()
            self._finish_commit()


def save_is_due(serve: ServeConfig, steps: int, waited: float, rest: float) -> bool:
    """Whether a checkpoint is due.

    Args:
        serve: the schedule.
        steps: optimizer steps since the last save began.
        waited: seconds since the first change after the last save.
        rest: seconds since the last save began, divided by its duration.
    """
    return waited >= serve.checkpoint_seconds or (steps >= serve.checkpoint_steps and rest >= 1 / MAX_SAVES)
