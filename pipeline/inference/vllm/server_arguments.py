"""Whether vLLM's server takes the arguments of `inference.extra_args`.

Owns the question to vLLM's own parser, in a process of its own: to import vLLM takes many seconds. Promises that an
argument which the parser refuses is a `ConfigError` with the parser's words before anything is started; and a reason
where the parser cannot be asked. Run as a module, it is that process.
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
"""Exit codes: argparse's own, and that of a release whose parser is not found."""
_PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
"""Where releases have it, the newest first."""
_ARGPARSE = ("vllm.utils.argparse_utils", "vllm.utils")


def check_extra_args(config: RunConfig) -> None:
    """`ConfigError` for arguments that vLLM refuses; nothing is asked where there are none."""
    arguments = config.inference.extra_args
    if not (arguments and config.has_servers):
        return
    code, said = _parse_in_server(arguments)
    if code == _REFUSED:
        hint = f"{said}; see vllm serve --help=all"
        raise ConfigError(KEY, list(arguments), "arguments that vLLM's server takes", hint)


def unchecked_arguments(config: RunConfig) -> str:
    """Why the arguments could not be looked at here; empty where they were, or where there are none."""
    arguments = config.inference.extra_args
    code, said = _parse_in_server(arguments) if arguments and config.has_servers else (0, "")
    return f"{KEY} could not be checked here ({said}); a server that refuses them fails when it starts" if code else ""


@cache
def _parse_in_server(arguments: tuple[str, ...]) -> tuple[int, str]:
    """The exit code of the process, and what it said last: once for all points of a sweep."""
    command = [sys.executable, "-P", "-m", "pipeline.inference.vllm.server_arguments", *arguments]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PARSE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return _UNKNOWN, f"vLLM's parser took longer than {PARSE_SECONDS:.0f} s"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    said = lines[-1].partition("error: ")[2] or lines[-1] if lines else f"it ended with code {done.returncode}"
    return done.returncode, said


def main(arguments: list[str]) -> int:
    """0 if vLLM takes the arguments; argparse ends the process itself where it does not."""
    try:
        parsers, base = _first(_PARSERS, "make_arg_parser"), _first(_ARGPARSE, "FlexibleArgumentParser")
    except Exception as error:  # noqa: BLE001 whatever keeps vLLM from being imported on this machine
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
    """The first of these modules that there is and that has the attribute."""
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
