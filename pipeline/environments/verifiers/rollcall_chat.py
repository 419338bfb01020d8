"""A chat loop as a harness of verifiers that needs no installed program; runs in the process of `verifiers_bridge`.

Owns the conversation of one seat: system prompt, prompt, turns of the policy, and the environment's tools over MCP,
until the policy calls none. Promises that every call of the policy passes through verifiers' interception, which counts
turns and ends the episode at the environment's stop condition; and that a conversation that reaches the context length
ends without an error, and is scored by the environment.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]

FULL = "context_length_exceeded"


class ChatHarness(Harness[HarnessConfig]):  # type: ignore[misc]
    """Plays one seat of an environment in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        """Run one segment of the conversation."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)))
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            while trace.stop_condition is None:
                reply = await _ask(http, endpoint, secret, body, trace)
                if reply is None:
                    break
                messages.append({key: value for key, value in reply.items() if value is not None})
                calls = reply.get("tool_calls")
                if not calls:
                    break
                for call in calls:
                    messages.append(await _answered(call, dispatch, connections))
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _ask(
    http: aiohttp.ClientSession, endpoint: str, secret: str, body: dict[str, Any], trace: Any
) -> dict[str, Any] | None:
    """The policy's message; None when the context is full, or the environment has ended the conversation."""
    url, headers = f"{endpoint.rstrip('/')}/chat/completions", {"Authorization": f"Bearer {secret}"}
    async with http.post(url, json=body, headers=headers) as response:
        text = await response.text()
    if response.status == 200:
        message: dict[str, Any] = json.loads(text)["choices"][0]["message"]
        return message
    if FULL in text or trace.stop_condition is not None:
        return None
    raise RuntimeError(f"the policy could not be called: status {response.status}: {text[:500]}")


async def _answered(call: dict[str, Any], dispatch: dict[str, Any], connections: dict[str, Any]) -> dict[str, Any]:
    """The message with a tool's result, or with the error of the call."""
    name = call["function"]["name"]
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except json.JSONDecodeError as error:
        content: Any = f"error: the arguments are no JSON: {error}"
    else:
        if name not in dispatch:
            content = f"error: there is no tool {name}; there are {', '.join(dispatch) or 'none'}"
        elif not isinstance(arguments, dict):
            content = "error: the arguments are no object"
        else:
            content = await call_mcp(connections, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
