"""What the controller of a run with RL has of the other roles.

Owns the wiring of RL: the streams of groups, the board, the servers that get the weights, and evaluations. A run
without steps of RL has none of it. Must not know losses, ranks or checkpoints.
"""

from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean

from pipeline.inference.weight_sync.server_sync import MeetingPoint
from pipeline.inference.weight_sync.weight_sender import CPU, WeightSender
from pipeline.roles.role_context import RoleContext
from pipeline.run.metrics_log import read_rows
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loop.evaluations import Evaluations, Note, results_in, schedules_of
from pipeline.train.loop.group_batches import GroupBatches, Pulse
from pipeline.train.loop.rl import ReinforcementLearning
from pipeline.train.loop.weight_publisher import WeightPublisher
from pipeline.train.train_jobs import RlJob
from pipeline.transport import connect
from pipeline.transport.ledger import Ledger
from pipeline.transport.shared_state import SharedState


class RlServices:
    """The actor, the preprocessor, Redis and the servers, as the controller of one attempt talks to them."""

    def __init__(
        self,
        context: RoleContext,
        dispatch: RankGroup,
        ledger: Ledger,
        opened: ExitStack,
        pulse: Pulse,
        note: Note,
    ) -> None:
        """Connect; `opened` closes it, the weight groups first. `note` is told each evaluation."""
        self._context, self._dispatch, self._ledger = context, dispatch, ledger
        self._actor = replace(context, placement=context.world.of_role("actor")[0])
        config = context.config
        streams = opened.enter_context(connect(context))
        self._board = SharedState(streams)
        self._publisher = WeightPublisher(dispatch, opened.enter_context(self._sender()), pulse)
        self._batches = GroupBatches(streams, self._board, ledger, config, pulse, dispatch.models["policy"].vocabulary)
        self._evaluations = Evaluations(
            streams,
            context.paths.attempt,
            schedules_of(config),
            results_in(read_rows(context.run.metrics)),
            note,
            pulse,
        )

    def _sender(self) -> WeightSender:
        context, config = self._context, self._context.config
        servers = [placement.endpoint for placement in context.world.of_role("inference")]
        place = context.world.of_role("trainer")[0]
        meeting = MeetingPoint(place.address, place.ports[1], context.world.password)
        patience, told = config.cluster.startup_seconds, self._board.post_server
        device = self._dispatch.device if config.weights_backend == "nccl" else CPU
        on_host = config.training.staging_device == "host"
        lora = config.model.lora if config.model.lora.travels_alone else None
        return WeightSender(servers, meeting, config.inference, patience, told, lora, device, on_host)

    @property
    def is_near_budget(self) -> bool:
        """Whether what waits for a commit takes half of the streams' budget."""
        return self._batches.is_near_budget

    def algorithm(self, job: RlJob, warm_up: WarmUp) -> ReinforcementLearning:
        """What trains a job of RL on the streams."""
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
        """The stream entries that a commit of now covers."""
        return self._batches.begin_checkpoint()

    def release_covered(self, covered: tuple[str, ...]) -> None:
        """What a durable commit covers; the board needs it before it is acknowledged."""
        self._board.post_ledger(self._ledger.snapshot())
        self._batches.acknowledge(covered)

    def idle_fractions(self) -> dict[str, float]:
        """How idle the servers and the actor were in the last second, as the actor reported: 0 … 1 each."""
        status = self._actor.status()
        numbers = status.numbers if status is not None else {}
        servers = [value for name, value in numbers.items() if name.startswith("idle/")]
        found = {"idle/actor": numbers.get("gate_blocked"), "idle/servers": fmean(servers) if servers else None}
        return {name: value for name, value in found.items() if value is not None}
