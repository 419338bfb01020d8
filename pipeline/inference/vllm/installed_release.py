"""The installed vLLM: whether it can start servers, and what its release supports. Imports no vLLM."""

import importlib.util
import re
import sys
from importlib.metadata import entry_points, version

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.inference.vllm.plugin import register
from pipeline.utils.user_commands import user_command

_PLUGINS = "vllm.general_plugins"


def check_installed() -> None:
    """`ConfigError` unless vLLM is importable and will load Rollcall's plugin. Imports neither."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "resources.inference", "vllm", "vLLM in this Python", f"{user_command('install')} installs it"
        )
    check_plugin()


def check_plugin() -> None:
    """`ConfigError` unless every vLLM of this Python will call `plugin.register`.

    An installation records its entry points once. If the module has moved since, vLLM skips the plugin that it cannot
    import, and fails later for lack of Rollcall's weight-transfer engines.
    """
    entry = f"{register.__module__}:{register.__name__}"
    # Several installations may name it, as those of a wheel and a checkout; vLLM calls one of an equal name.
    installed = {plugin.value for plugin in entry_points(group=_PLUGINS, name="rollcall")}
    if installed != {entry}:
        hint = f"reinstall: {sys.executable} -m pip install -e ."
        raise ConfigError(f"entry point rollcall in {_PLUGINS}", ", ".join(sorted(installed)), entry, hint)


def check_returned_experts(config: RunConfig) -> None:
    """`ConfigError` for routing replay with a release of vLLM whose servers return no experts, or in another form."""
    if config.training.routing_replay != "none" and is_older_than([0, 22]):
        expected = f"none with vLLM {version('vllm')}, whose servers cannot return the experts of each token"
        raise ConfigError("training.routing_replay", "rollout", expected, "remove it, or install vLLM 0.22 or newer")


def is_older_than(release: list[int]) -> bool:
    """Whether vLLM is older than this release. A build from source without a release number has version 0.1, and counts
    as new."""
    return [0, 1] < [int(part) for part in re.findall(r"\d+", version("vllm"))[:2]] < release
