"""A command that measures a model through an OpenAI-compatible address, such as the harness of a benchmark.

Owns what the command is given, where it runs, and how it ends. Promises that over all attempts of a run it is run until
it has succeeded once, each time with its whole deadline; that it ends with the attempt, as does all that it started;
and that its failure is told with its last line.
"""

import asyncio
import os
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

from pipeline.errors import DeadlineError, TaskError
from pipeline.inference.vllm.plugin import MODEL
from pipeline.roles.role_context import RoleContext
from pipeline.rollout.load_balancing_proxy import LoadBalancingProxy
from pipeline.utils import subprocesses

DONE = "done"
CLIENTS = ("OPENAI", "ROLLCALL")
"""Whose variables `…_BASE_URL` and `…_API_KEY` the command finds: OpenAI's client, and a provider of that name."""
PAUSE = 0.5


async def run_command(context: RoleContext, servers: Sequence[str]) -> None:
    """Run `evaluation.command` unless it succeeded already; `TaskError` with its last line, or `DeadlineError`."""
    wanted, folder = context.config.evaluation, context.run.benchmark
    if not wanted.command or (folder / DONE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    context.report("ready", f"running {wanted.command[0]}")
    async with LoadBalancingProxy(servers, context.world.password) as relay:
        url, key = f"{relay.url}/v1", context.world.password
        told = {f"{whose}_BASE_URL": url for whose in CLIENTS} | {f"{whose}_API_KEY": key for whose in CLIENTS}
        child = subprocesses.Child(filled(wanted.command, url, folder), folder / "output.log", {**os.environ, **told})
        try:
            await _ended(child, wanted.command_seconds)
        finally:
            await asyncio.to_thread(child.kill)
    (folder / DONE).touch()


def filled(command: Sequence[str], url: str, output: Path) -> list[str]:
    """The command with the places of `{url}`, `{model}` and `{output}` filled; other braces stay as they are."""
    values = {"{url}": url, "{model}": MODEL, "{output}": str(output)}
    return [reduce(lambda text, name: text.replace(name, values[name]), values, part) for part in command]


async def _ended(child: subprocesses.Child, seconds: float) -> None:
    stop = asyncio.get_running_loop().time() + seconds
    while (code := child.poll()) is None:
        if asyncio.get_running_loop().time() > stop:
            raise DeadlineError("evaluation.command", seconds, f"its end; see {child.log}")
        await asyncio.sleep(PAUSE)
    if code:
        last = " ".join(subprocesses.tail(child.log, 1))
        raise TaskError(f"evaluation.command {subprocesses.describe_exit(code)}: {last} (see {child.log})")
