"""Environments of verifiers, served to a process with other dependencies.

Runs as a script with the interpreter for which verifiers is installed, and can import nothing of Rollcall. Owns the
episodes there: the endpoint of the policy, the reward, and the components of the rubric. Promises that three conditions
which verifiers passes over in silence are failures with a reason: a stage that timed out, a reward that was not scored,
and an error in the last attempt. Must not know how episodes are trained.

The protocol is lines of JSON, both ways, over a socket that is inherited as standard input. The parent first sends the
environments: `{"train": {…}, "held_out": {…}, "most": 100}`, with configurations in the format of `verifiers.v1`; the
second is null if there is none. The response is `{"counts": {…}}`, or `{"wrong": …, "key": …}`. Requests follow:

    {"id": 7, "part": "train", "index": 3, "url": "http://…/v1", "key": "…", "model": "…"}      an episode
    {"id": 7, "cancel": true}

Each request is answered by `{"id": 7, "reward": 0.5, "metrics": {…}}` or `{"id": 7, "failed": "…"}`, unless it was
cancelled. In addition, `{"alive": true}` is sent every second, from the event loop that runs the episodes.
"""

import asyncio
import itertools
import json
import os
import resource
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

ALIVE_SECONDS = 1.0
MAX_LINE = 1 << 26
HARNESS = "rollcall_chat"
"""The harness in this folder, by the name under which verifiers imports it."""


class PolicyRelay:
    """Forwards calls of the policy to the endpoint of their episode, which verifiers identifies by its trace.

    Verifiers keeps a client for each endpoint that it has used, so all episodes share the URL of this relay.
    """

    def __init__(self) -> None:
        self._targets: dict[str, tuple[str, str]] = {}

    async def __aenter__(self) -> "PolicyRelay":
        import aiohttp
        from aiohttp import web

        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )
        application = web.Application(client_max_size=MAX_LINE)
        application.router.add_route("*", "/v1/{route:.*}", self._pass_on)
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._http.close()

    def add(self, session: str, url: str, key: str) -> None:
        """Route calls of a session to an endpoint."""
        self._targets[session] = (url, key)

    def remove(self, session: str) -> None:
        """Remove the route of a session that is over."""
        self._targets.pop(session, None)

    async def _pass_on(self, request: Any) -> Any:
        from aiohttp import web

        session = request.headers.get("X-Session-ID", "")
        if session not in self._targets:
            reason = "this seat is not trained, so it needs a separate client"
            return web.json_response({"error": {"message": reason}}, status=400)
        url, key = self._targets[session]
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        target, body = f"{url}/{request.match_info['route']}", await request.read()
        async with self._http.request(request.method, target, data=body, headers=headers) as answer:
            kind = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
            return web.Response(body=await answer.read(), status=answer.status, headers=kind)


class LoadedEnvironment:
    """One environment with its tasks."""

    def __init__(self, config: dict[str, Any], most: int, relay: PolicyRelay) -> None:
        import verifiers.v1 as vf

        self._relay = relay
        agent = config["agent"]
        if "harness" not in agent and vf.default_harness_id(config["taskset"]["id"]) == "bash":
            config = {**config, "agent": {**agent, "harness": {"id": HARNESS}}}
        self._env = vf.load_environment(vf.resolve_env_config(config))
        tasks = iter(self._env.taskset) if not most else itertools.islice(self._env.taskset, most)
        if not most and not self._env.taskset.bounded:
            raise ValueError("its tasks have no end; set task.options.size")
        self._tasks = list(tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def serving(self) -> Any:
        """A context that must be open while the environment runs episodes."""
        return self._env.serving()

    async def episode(self, index: int, url: str, key: str, model: str) -> dict[str, Any]:
        """The report of an episode of task `index`."""
        import verifiers.v1 as vf

        client = vf.EvalClientConfig(base_url=self._relay.url, api_key_var="ROLLCALL_UNUSED")
        sessions: list[str] = []

        def on_trace(trace: Any) -> None:
            if trace.agent.trainable:  # other seats have separate clients, and their turns are not the policy's
                sessions.append(trace.id)
                self._relay.add(trace.id, url, key)

        try:
            slot = self._env.slots(self._tasks[index])[0]
            episode = await self._env.run_slot(slot, vf.ModelContext(model=model, client=client), on_trace=on_trace)
        finally:
            for session in sessions:
                self._relay.remove(session)
        return report_of(episode)


def report_of(episode: Any) -> dict[str, Any]:
    """The reward with its components by name, or the reason why there is none."""
    traces = list(episode.traces)
    errors = [error for part in (episode, *traces) if not part.ok for error in part.errors]
    if errors:
        return {"failed": f"{errors[-1].type}: {errors[-1].message}"}
    late = next((part for part in (*traces, episode) if part.is_timeout), None)
    if late is not None:
        return {"failed": f"it ran out of time: {getattr(late, 'stop_condition', None) or 'episode_timeout'}"}
    trained = [trace for trace in traces if trace.agent.trainable]
    if len(trained) != 1:
        return {"failed": f"it has {len(trained)} traces of agents that learn; one can be trained"}
    (trace,) = trained
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.ok:
        return {"failed": f"not scored: {', '.join(unscored) or trace.stop_condition}"}
    metrics = {f"rewards/{name}": reward.score for name, reward in trace.rewards.items()}
    metrics |= {f"env/{name}": value for name, value in trace.metrics.items() if value is not None}
    return {"reward": trace.reward if trace.rewards else None, "metrics": metrics}


async def serve(channel: socket.socket) -> None:
    """Serve until the parent closes the connection."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=MAX_LINE)

    def send(value: dict[str, Any]) -> None:
        writer.write(json.dumps(value, default=str).encode() + b"\n")

    setup = json.loads(await reader.readline())
    async with AsyncExitStack() as stack:
        try:
            relay = await stack.enter_async_context(PolicyRelay())
            parts = {}
            for part in ("train", "held_out"):
                if setup[part] is not None:
                    parts[part] = LoadedEnvironment(setup[part], setup["most"], relay)
                    await stack.enter_async_context(parts[part].serving())
        except Exception as error:  # noqa: BLE001 an environment is foreign code: any error is reported
            send({"wrong": f"{type(error).__name__}: {error}"})
            await writer.drain()
            return
        send({"counts": {name: len(environment) for name, environment in parts.items()}})
        await _answer(reader, send, parts)


async def _answer(reader: asyncio.StreamReader, send: Any, parts: dict[str, LoadedEnvironment]) -> None:
    running: dict[int, asyncio.Task[None]] = {}

    async def alive() -> None:
        while True:
            send({"alive": True})
            await asyncio.sleep(ALIVE_SECONDS)

    async def run(number: int, request: dict[str, Any]) -> None:
        try:
            environment = parts[request["part"]]
            report = await environment.episode(request["index"], request["url"], request["key"], request["model"])
        except Exception as error:  # noqa: BLE001 as above
            report = {"failed": f"{type(error).__name__}: {error}"}
        finally:
            running.pop(number, None)
        send({"id": number, **report})

    beating = asyncio.create_task(alive())
    while line := await reader.readline():
        request = json.loads(line)
        number = request["id"]
        if request.get("cancel"):
            if number in running:
                running[number].cancel()
        else:
            running[number] = asyncio.create_task(run(number, request))
    beating.cancel()


def main() -> None:
    """Run the process. Its standard input is the socket; its output belongs to the environment."""
    channel = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # every episode in flight has connections here
    sys.path.append(str(Path(__file__).parent))  # the harness's folder, last so that it shadows no package
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        channel.sendall(json.dumps({"wrong": str(error), "key": "python"}).encode() + b"\n")
        sys.exit(1)
    asyncio.run(serve(channel))
    os._exit(0)  # threads that an environment left behind must not keep the process alive


if __name__ == "__main__":
    main()
