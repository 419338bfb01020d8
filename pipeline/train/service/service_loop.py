"""The loop of a trainer that serves.

Owns the order of things: restore, then take a request, do it, bring its result; and when to commit. Promises that a
client's mistake fails its request alone; that results are told only for what was really done; that the cursor of a
commit covers exactly what the commit holds; and that nothing is committed whose result the front lacks. What fails on a
rank ends the trainer: the next one goes on from the commit.

    engine = Engine(dispatch, config, root, attempt, job, facts, pulse)
    engine.run()              # until `pulse` raises `Interrupted`; then a last commit
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
"""How long one turn waits for work; between two the controller shows that it lives."""
MAX_SAVES = 0.02
"""The share of the time in which commits are under way, unless `serve.checkpoint_seconds` wants more. A commit holds
all models, so it costs the more the more there are, and their steps together come no faster than those of one."""


class ServiceLoop:
    """One attempt of a trainer that serves; `root` is the front's folder, `checkpoints` the URL of the commits."""

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
        """`paths` are those of the attempt, where it belongs to a run."""
        self._config, self._pulse = config, pulse
        self._models = ServedModels(dispatch, config, root / "weights", attempt)
        self._commits = ServiceCheckpoints(checkpoints, attempt, dispatch, config.training.keep_checkpoints, paths)
        self._link = GatewayClient(root, attempt, facts, pulse)
        self._warm_up = WarmUp(config, dispatch, pulse, phase)
        self._cursors: dict[str, int] = {}
        """Of each model, the last request after which it had no gradients: what a commit may say of it."""
        self._done: dict[str, int] = {}
        self._results: list[WorkResult] = []
        """What the front has not been told yet."""
        self._steps = 0
        self._dirty_since: float | None = None
        self._durable: dict[str, int] | None = None
        """The cursors of a commit that is durable, which the front has not been told yet."""
        self._steps_told = 0
        self.on_progress: Callable[[int, int], None] = lambda models, steps: None

    def restore(self, job: str = "") -> None:
        """Be where the last commit of this run left off."""
        self._cursors = self._commits.restore(self._models, job)
        self._done = dict(self._cursors)
        if self._commits.none_yet:
            self._start_commit()  # of no model: whoever looks for progress finds some, and asks for another attempt

    def run(self) -> None:
        """Serve until `pulse` raises `Interrupted`, then commit."""
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
            self._commit_if_due()  # here, where the front has every result
            if work is not None:
                self._results = self._do(work)

    def _turn(self, wait: float, *, ending: bool = False) -> Work | None:
        work = self._link.turn(lambda: dict(self._done), self._results, self._durable, wait, ending=ending)
        self._results, self._durable = [], None
        return work

    def _do(self, work: Work) -> list[WorkResult]:
        """Do one request; its result, unless its client has one from an earlier trainer."""
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
                models.look_for(body.folder)
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
        """Where the model is now; what a `Pass` adds is not in a commit until the step after it."""
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
        """Note that a commit has become durable; begin another if it is time."""
        serve = self._config.serve
        self._take_commit(self._commits.collect)
        if self._dirty_since is None or not self._commits.idle:
            return
        waited = time.monotonic() - self._dirty_since
        if save_is_due(serve, self._steps - self._steps_told, waited, self._commits.rest):
            self._start_commit()

    def _finish_commit(self) -> None:
        """Have no commit be under way: its collectives would mix with those of what is saved or loaded now."""
        self._take_commit(self._commits.finish)

    def _take_commit(self, collect: Callable[[], dict[str, int] | None]) -> None:
        """Note the cursors of a commit that ended. One that failed costs a later trainer some work, not this one its
        models: another is made in a while."""
        try:
            self._durable = collect() or self._durable
        except SupersededError:
            raise
        except CheckpointError as error:
            log.warning("a commit failed, and is tried again: %s", error)
            self._dirty_since = time.monotonic()

    def _start_commit(self) -> None:
        ready = {id: cursor for id, cursor in self._cursors.items() if id in self._models}
        self._commits.start(self._models, ready)
        self._steps_told, self._dirty_since = self._steps, None

    def _commit_last(self) -> None:
        """What was done since the last commit would come again; so commit it while there is time; but not what the
        front lacks the result of, and is not there to take: nobody would ever do that again."""
        self._finish_commit()
        if self._results:
            try:
                self._turn(0.0, ending=True)
            except Interrupted:
                return
        if self._dirty_since is not None:
            self._start_commit()
            self._finish_commit()


def save_is_due(serve: ServeConfig, steps: int, waited: float, rest: float) -> bool:
    """Whether to commit `steps` steps after the last commit, the first change since being `waited` seconds old; `rest`
    is how many times as long as it took the last commit is over."""
    return waited >= serve.checkpoint_seconds or (steps >= serve.checkpoint_steps and rest >= 1 / MAX_SAVES)
