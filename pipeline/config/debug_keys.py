"""The keys that help to find a fault, `debug.*`: logs, profiles, memory snapshots and a debugger; docs/debugging.md."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.value_types import Bytes, Positive, Section, Texts

DEBUGGER_SECONDS = 7 * 86400.0
"""Deadlines of a run with a role under a debugger: nobody waits that long at a breakpoint."""
Window = Annotated[tuple[Positive, ...], Field(max_length=2)]


class DebugConfig(Section):
    """Help to find a fault. A resumed run may change these keys."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="Lowest level of the records in the roles' logs. With `debug` and `error` it is also that of the "
        "inference engine, which otherwise logs warnings.",
    )
    log_modules: Texts = Field(
        (),
        description="Modules whose records of every level are logged, with all modules below them, such as "
        "`[pipeline.transport, aiohttp]`.",
    )
    profile_steps: Window = Field(
        (),
        description="`[FIRST, LAST]`: training steps that each trainer process profiles with torch's profiler, one "
        "trace for each step. Steps of RL, or of SFT in a run without RL.",
    )
    memory_steps: Window = Field(
        (),
        description="`[FIRST, LAST]`: training steps over which each trainer process records the allocations of its "
        "GPU; a memory snapshot follows the last one.",
    )
    trace_bytes: Bytes = Field(
        1 << 30,
        description="Largest size of one process's traces and snapshots in an attempt; a file beyond it is removed, "
        "and the process records no more.",
    )
    role: str = Field(
        "",
        description="A role to run under a debugger: `trainer` (rank 0), `trainer.1` (another rank), `actor` or "
        "`preprocessor`. It waits for the debugger before it starts, and no role counts as hung.",
    )
    tool: Literal["pdb", "debugpy"] = Field(
        "pdb",
        description="The debugger of debug.role. `pdb`: Python's own, over a Unix socket that only you can open; "
        "`debugpy`: for an IDE, at debug.port of the role's node, which every user of that node can reach.",
    )
    port: Annotated[int, Field(ge=1024, le=65535)] = Field(5678, description="Port of debugpy, on 127.0.0.1.")


def in_window(window: Sequence[int], step: int) -> bool:
    """Whether `[first, last]` has the step; never for an empty window."""
    return bool(window) and window[0] <= step <= window[-1]
