"""Validation of `inference.extra_args` by vLLM's own parser.

The parser runs in a separate process, since importing vLLM takes many seconds; this module is the process's main
program too. Refused arguments give a `ConfigError` with the parser's message before anything starts. If the parser
cannot run on this machine, `unchecked_arguments` returns the reason.
"""

import importlib
import os
import subprocess
import sys
from functools import cache
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, one_line

KEY = "inference.extra_args"
PARSE_SECONDS = 180.0
_REFUSED, _UNKNOWN = 2, 3
"""Exit codes: argparse's for refused arguments, and ours for a parser that cannot be imported."""
_PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""The modules of the parser in different releases, the newest first."""
_ARGPARSE = ("vllm.utils.argparse_utils", "vllm.utils")


def check_extra_args(config: RunConfig) -> None:
    """Raise `ConfigError` for arguments that vLLM refuses. Without arguments, no process is started."""
    arguments = config.inference.extra_args
    if not (arguments and config.has_servers):
        return
    code, message = _parse_in_server(arguments)
    if code == _REFUSED:
        hint = f"{message}; see vllm serve --help=all"
        raise ConfigError(KEY, list(arguments), "arguments that vLLM's server takes", hint)


def unchecked_arguments(config: RunConfig) -> str:
    """A warning if the arguments could not be checked on this machine, with the reason; else empty."""
    arguments = config.inference.extra_args
    code, reason = _parse_in_server(arguments) if arguments and config.has_servers else (0, "")
    if not code:
        return ""
    return f"{KEY} could not be checked here ({reason}); a server that refuses them fails when it starts"


@cache
def _parse_in_server(arguments: tuple[str, ...]) -> tuple[int, str]:
    """The exit code of the parser's process, and its last message. Cached, so that a sweep starts it once."""
    command = [sys.executable, "-P", "-m", "pipeline.inference.vllm.server_arguments", *arguments]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PARSE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return _UNKNOWN, f"vLLM's parser took longer than {PARSE_SECONDS:.0f} s"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    message = lines[-1].partition("error: ")[2] or lines[-1] if lines else f"it ended with code {done.returncode}"
    return done.returncode, message


def main(arguments: list[str]) -> int:
    """Parse the arguments. Returns 0 if vLLM accepts them; argparse exits with its own code if not."""
    try:
        parsers, base = _first(_PARSERS, "make_arg_parser"), _first(_ARGPARSE, "FlexibleArgumentParser")
    except Exception as error:  # noqa: BLE001 an import of vLLM can fail with any error
        print(one_line(error), file=sys.stderr)
        return _UNKNOWN
    parser = parsers.make_arg_parser(base.FlexibleArgumentParser(prog="vllm"))
    parsed = parser.parse_args(arguments)
    try:
        parsers.validate_parsed_serve_args(parsed)
    except (TypeError, ValueError) as error:
        parser.error(one_line(error))
    return 0


def _first(modules: tuple[str, ...], attribute: str) -> Any:
    """The first of these modules that exists and has the attribute. `ImportError` if there is none."""
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
            continue
        if hasattr(module, attribute):
            return module
    raise ImportError(f"this release of vLLM has no {attribute} in {' or '.join(modules)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
