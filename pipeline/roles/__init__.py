"""The roles of a run, one module each.

| module | owns |
|---|---|
| `redis`, `trainer`, `inference`, `actor`, `preprocessor` | a role |
| `role_context` | what every role's process knows when it starts |
| `rank0` | the trainer's rank 0, whatever it trains |
| `trainer_session`, `rl_services` | upon that, a run of ours; what it has of the other roles |
| `offline_session`, `tinker_session` | a run that does the jobs of files; one that serves the API |
| `evaluator`, `benchmark_command` | what the actor does in a run that only evaluates |
| `sample_quota` | where a role keeps samples |
| `held_port` | programs of others that listen on a held port |

Every role's module has `launch(context) -> Launch`, which the agent calls to learn how to start the role and when it is
ready, and a `main` that runs in the role's own process. Heavy imports (torch, vllm, transformers) stay inside the
latter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RoleCommand:
    """How to start a role.

    A role that ends before the attempt was told to end has failed, whatever its exit code.

    Attributes:
        argv: the command.
        beats: how many of its processes on this node tell heartbeats (`pipeline.utils.heartbeat`). 0 for a program
            that is not ours: it is asked whether it is `ready` as long as it lives.
        env: variables added to the agent's own environment.
        ready: True once the role can do its work. Asked again and again in a thread of its own; may take seconds, and
            what it raises counts as "not yet".
        told_elsewhere: whether another node tells that it is ready, which may be seen late here.
    """

    argv: tuple[str, ...]
    ready: Callable[[], bool]
    has_heartbeat: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    reports_state: bool = False
