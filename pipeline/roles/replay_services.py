"""Rank 0's part of a run that replays the recorded samples of another run: `RlServices` without any other role."""

from pipeline.roles.role_context import RoleContext
from pipeline.rollout.recorded_groups import RecordedRun, replayed_run
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loop.group_batches import Pulse
from pipeline.train.loop.recorded_batches import NoServers, RecordedBatches
from pipeline.train.loop.rl import ReinforcementLearning
from pipeline.train.train_jobs import RlJob
from pipeline.transport.ledger import Ledger


class ReplayServices:
    """The recorded run as the source of batches."""

    is_near_budget = False

    def __init__(self, context: RoleContext, dispatch: RankGroup, ledger: Ledger, pulse: Pulse) -> None:
        """Raises `ConfigError` if the recorded run no longer has what the config needs."""
        self._config, self._dispatch = context.config, dispatch
        recorded = RecordedRun(replayed_run(context.config))
        recorded.check(context.config)
        vocabulary = dispatch.models["policy"].vocabulary
        self._batches = RecordedBatches(recorded, ledger, context.config, pulse, vocabulary)

    def algorithm(self, job: RlJob, warm_up: WarmUp) -> ReinforcementLearning:
        """The algorithm of an RL job on the recorded batches."""
        absent = NoServers()
        return ReinforcementLearning(job, self._config, self._dispatch, self._batches, absent, absent, warm_up)

    def begin_checkpoint(self) -> tuple[str, ...]:
        """No stream has entries for a checkpoint to cover."""
        return ()

    def release_covered(self, covered: tuple[str, ...]) -> None:
        """Nothing waits for a checkpoint."""

    def actor_metrics(self) -> dict[str, float]:
        """There are no servers and no actor."""
        return {}
