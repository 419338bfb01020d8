"""The roles of a run, one module each: `redis`, `trainer`, `inference`, `actor`, `preprocessor`.

Every role's module has `launch(context) -> Launch`, which the agent calls to learn how to start the role and when it is
ready, and a `main` that runs in the role's own process. Heavy imports (torch, vllm, transformers) stay inside the
latter. What the trainer's rank 0 does is in modules beside it (what each role knows when it starts: `context`):
`controller`, and upon that `session`, with `peers`, `job_session` and `service`. What the actor does in a run that only
evaluates is in `evaluator` and `benchmark`. `keeping` says where a role keeps samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launch:
    """How to start a role.

    A role that ends before the attempt was told to end has failed, whatever its exit code.

    Attributes:
        argv: the command.
        beats: how many of its processes on this node tell heartbeats (`pipeline.system.heartbeat`). 0 for a program
            that is not ours: it is asked whether it is `ready` as long as it lives.
        env: variables added to the agent's own environment.
        ready: True once the role can do its work. Asked again and again in a thread of its own; may take seconds, and
            what it raises counts as "not yet".
        told_elsewhere: whether another node tells that it is ready, which may be seen late here.
    """

    argv: tuple[str, ...]
    ready: Callable[[], bool]
    beats: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    told_elsewhere: bool = False
