"""A command that measures a model through an OpenAI-compatible address, such as the harness of a benchmark.

Owns the command's inputs, its folder, and its end. Promises that over all attempts of a run the command runs until it
has succeeded once, each time with the full deadline; that it ends with the attempt, with all its child processes; and
that its failure is reported with the last line of its log.
"""

import asyncio
import os
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

from pipeline.errors import DeadlineError, TaskError
from pipeline.inference.engine_protocol import POLICY
from pipeline.roles.role_context import RoleContext
from pipeline.rollout.load_balancing_proxy import LoadBalancingProxy
from pipeline.utils import subprocesses

DONE = "done"
CLIENTS = ("OPENAI", "ROLLCALL")
"""Prefixes of the variables `…_BASE_URL` and `…_API_KEY` for the command: OpenAI's client, and a provider of a custom
name."""
PAUSE = 0.5


async def run_command(context: RoleContext, servers: Sequence[str]) -> None:
    """Run `evaluation.command` unless it has succeeded before; `TaskError` with its last line, or `DeadlineError`."""
    keys, folder = context.config.evaluation, context.run.benchmark
    if not keys.command or (folder / DONE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    context.report("ready", f"running {keys.command[0]}")
    async with LoadBalancingProxy(servers, context.world.password) as proxy:
        url, key = f"{proxy.url}/v1", context.world.password
        variables = {f"{prefix}_BASE_URL": url for prefix in CLIENTS} | {f"{prefix}_API_KEY": key for prefix in CLIENTS}
        command, environment = filled(keys.command, url, folder), {**os.environ, **variables}
        child = subprocesses.Child(command, folder / "output.log", environment)
        try:
            await _ended(child, keys.command_seconds)
        finally:
            await asyncio.to_thread(child.kill)
    (folder / DONE).touch()


def filled(command: Sequence[str], url: str, output: Path) -> list[str]:
    """The command with `{url}`, `{model}` and `{output}` replaced; other braces stay unchanged."""
    values = {"{url}": url, "{model}": POLICY, "{output}": str(output)}
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
