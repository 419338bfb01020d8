"""The roles of a run, one module each.

| module | owns |
|---|---|
| `redis`, `trainer`, `inference`, `actor`, `preprocessor` | a role |
| `role_context` | the inputs of every role's process at its start |
| `world_revisions` | the assignment on disk, with its revisions after the losses of nodes |
| `rank0` | the trainer's rank 0, for every kind of training |
| `trainer_session` | rank 0 in a training run |
| `rl_services`, `replay_services` | its connections to the other roles; to a recorded run instead |
| `server_membership` | the servers that join and leave a running attempt, for rank 0 |
| `offline_session`, `tinker_session` | rank 0 in a run that executes job files; in one that serves the API |
| `evaluator`, `benchmark_command` | the actor's work in a run that only evaluates |
| `event_loop` | parts of the event loop that actor and evaluator share |
| `preloads` | the modules that a node's fork server imports for the roles |
| `sample_quota` | where a role stores samples |
| `held_port` | third-party programs that listen on a held port |

Every role's module has `launch(context) -> RoleCommand`, which the agent calls for the role's command and its readiness
check, and a `main` that runs in the role's process. Heavy imports (torch, vllm, transformers) stay inside the latter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

SERVICES, TRAINER = "services", "trainer"
"""Stages of a node's fork server, below that of the servers; see `preloads`."""


@dataclass(frozen=True)
class RoleCommand:
    """The command of a role, and its readiness check.

    A role that exits before the attempt is ending has failed, whatever its exit code.

    Attributes:
        argv: the command.
        has_heartbeat: the number of its processes on this node that send heartbeats (`pipeline.utils.heartbeat`). 0 for
            a third-party program, whose `ready` is instead polled throughout its life.
        env: variables added to the agent's environment.
        ready: True once the role can do its work. Polled in a separate thread; may take seconds, and an exception
            counts as "not yet".
        stage: the stage of a fork server that can start the command; empty for one that needs
            exec.
        nests: whether the command starts programs of that stage itself.
        reports_state: whether another node reports that it is ready, which may become visible here with a delay.
    """

    argv: tuple[str, ...]
    ready: Callable[[], bool]
    has_heartbeat: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""
    nests: bool = False
    reports_state: bool = False
