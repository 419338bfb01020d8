"""Rank 0's connections to the other roles in a run with RL.

Owns the wiring of RL: the streams of groups, the board, the servers that receive the weights, and evaluations. A run
without RL steps has none of them. Must not know losses, ranks or checkpoints.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import fmean

from pipeline.inference.weight_sync.publication import CPU
from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.weight_sender import WeightSender
from pipeline.roles.role_context import RoleContext
from pipeline.roles.server_membership import ServerMembership
from pipeline.roles.world_revisions import WorldRevisions
from pipeline.rollout.draft_acceptance import AcceptanceRate
from pipeline.run.fault_moments import FaultMoments
from pipeline.run.joined_servers import JoinedServers
from pipeline.run.metrics_log import read_rows
from pipeline.run.notices import publish_notice
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.actor_watch import ActorReport, ActorWatch
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loop.evaluations import Evaluations, Note, results_in, schedules_of
from pipeline.train.loop.group_batches import GroupBatches, Pulse
from pipeline.train.loop.rl import ReinforcementLearning
from pipeline.train.loop.weight_publisher import WeightPublisher
from pipeline.train.train_jobs import RlJob
from pipeline.transport import connect
from pipeline.transport.ledger import Ledger
from pipeline.transport.shared_state import SharedState

FORGET_SECONDS = 60.0
"""Seconds, in addition to those of an update, for which a joined server may be unreachable before it is forgotten."""


class RlServices:
    """Rank 0's connections to the actor, the preprocessor, Redis and the servers in one attempt."""

    def __init__(
        self,
        context: RoleContext,
        dispatch: RankGroup,
        ledger: Ledger,
        opened: ExitStack,
        pulse: Pulse,
        note: Note,
        moments: FaultMoments,
    ) -> None:
        """Connect; `opened` closes the connections, the weight groups first. `note` receives each evaluation."""
        self._context, self._dispatch, self._ledger = context, dispatch, ledger
        self._actor = replace(context, placement=context.world.of_role("actor")[0])
        config = context.config
        self._worlds, self._accepted = WorldRevisions(context.paths), AcceptanceRate()
        self._accepted.take(self._actor_numbers())  # what was drafted before belongs to another trainer's records
        streams = opened.enter_context(connect(context))
        self._board = SharedState(streams)
        sender = opened.enter_context(self._sender())
        opened.enter_context(self._membership(sender))
        self._publisher = WeightPublisher(
            dispatch,
            sender,
            pulse,
            partial(moments.reach, "update"),
            self._report_quorum,
        )
        vocabulary = dispatch.models["policy"].vocabulary
        watch = ActorWatch(self._read_actor)
        self._batches = GroupBatches(streams, self._board, ledger, config, pulse, vocabulary, actor=watch)
        self._evaluations = Evaluations(
            streams,
            context.paths.attempt,
            schedules_of(config),
            results_in(read_rows(context.run.metrics)),
            note,
            pulse,
            partial(moments.reach, "eval"),
            watch,
            config.training.data_seconds,
        )

    def _membership(self, sender: WeightSender) -> ServerMembership:
        joined = JoinedServers(self._context.paths)
        patience = self._context.config.inference.update_seconds + FORGET_SECONDS
        # A trainer that was killed may have posted servers that have left since.
        former = frozenset(self._board.servers()) - frozenset(self._own_servers())
        return ServerMembership(joined, sender, patience, former, self._own_servers)

    def _own_servers(self) -> list[str]:
        """The endpoints of the attempt's own servers, as of the newest revision of the world."""
        world = self._worlds.newest() or self._context.world
        return [placement.endpoint for placement in world.of_role("inference")]

    def _sender(self) -> WeightSender:
        context, config = self._context, self._context.config
        first = context.world.of_role("trainer")[0]
        meeting = MeetingPoint(first.address, first.ports[1], context.world.password)
        patience, post = config.cluster.startup_seconds, self._board.post_server
        device = self._dispatch.device if config.weights_backend == "nccl" else CPU
        on_host = config.training.staging_device == "host"
        lora = config.model.lora if config.model.lora.travels_alone else None
        return WeightSender(
            self._own_servers(),
            meeting,
            config.inference,
            patience,
            post,
            lora,
            device,
            on_host,
            on_leave=self._board.remove_server,
            quorum=config.server_quorum,
        )

    def _report_quorum(self, servers: int) -> None:
        detail = f"{servers} of {len(self._own_servers())} servers ready: rollouts begin"
        publish_notice(self._context.paths, self._context.placement.name, detail)

    @property
    def is_near_budget(self) -> bool:
        """Whether the entries that wait for a checkpoint take half of the streams' budget."""
        return self._batches.is_near_budget

    def algorithm(self, job: RlJob, warm_up: WarmUp) -> ReinforcementLearning:
        """The algorithm of an RL job on the streams."""
        return ReinforcementLearning(
            job,
            self._context.config,
            self._dispatch,
            self._batches,
            self._publisher,
            self._evaluations,
            warm_up,
        )

    def begin_checkpoint(self) -> tuple[str, ...]:
        """The stream entries that a checkpoint taken now covers."""
        return self._batches.begin_checkpoint()

    def release_covered(self, covered: tuple[str, ...]) -> None:
        """Acknowledge the entries of a durable checkpoint, after posting the ledger, which the board needs first."""
        self._board.post_ledger(self._ledger.snapshot())
        self._batches.acknowledge(covered)

    def _read_actor(self) -> ActorReport | None:
        """The actor's last report; None without one, and while the disk fails."""
        status = self._actor.status()
        return None if status is None else ActorReport(status.time, status.state, status.numbers)

    def _actor_numbers(self) -> Mapping[str, float]:
        status = self._actor.status()
        return {} if status is None else status.numbers

    def actor_metrics(self) -> dict[str, float]:
        """Numbers from the actor's report for one metrics record. Fractions: how idle servers and actor were during the
        last second, the prompt tokens that were in the servers' prefix caches, and the drafted tokens that servers
        accepted since the last record. With adaptive concurrency the groups in flight and their limit."""
        numbers = self._actor_numbers()
        adapts = self._context.config.rollout.adaptive_concurrency
        metrics = {
            "idle/actor": numbers.get("gate_blocked"),
            "idle/servers": _mean_of_servers(numbers, "idle/"),
            "prefix_cache/hit_rate": _mean_of_servers(numbers, "prefix_cache/"),
            "speculation/acceptance_rate": self._accepted.take(numbers),
            "concurrency/in_flight": numbers.get("in_flight") if adapts else None,
            "concurrency/limit": numbers.get("concurrency") if adapts else None,
        }
        return {name: value for name, value in metrics.items() if value is not None}


def _mean_of_servers(numbers: Mapping[str, float], prefix: str) -> float | None:
    """The mean over the servers of a number whose name is the prefix and the server; None without one."""
    values = [value for name, value in numbers.items() if name.startswith(prefix)]
    return fmean(values) if values else None
