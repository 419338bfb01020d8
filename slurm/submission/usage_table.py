"""The usage of each name on a serving run: the table of `serve.py --usage`.

Owns the request to the gateway, the only process that opens its store, and the printed table. The gateway authenticates
itself before the client sends the run's secret.
"""

import json
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from pipeline.errors import ConfigError, one_line
from pipeline.tinker.gateway_settings import Address
from pipeline.tinker.routes.usage_routes import ALL
from pipeline.tinker.trainer_routes import SECRET
from pipeline.utils.authenticated_http import connect

_SECONDS = 10.0
_COLUMNS = {
    "requests": "requests",
    "prompt": "prompt_tokens",
    "sampled": "sampled_tokens",
    "trained": "trained_tokens",
    "scored": "scored_tokens",
    "trainer s": "trainer_seconds",
    "sampling s": "sampling_seconds",
}


def print_usage(address: Address) -> int:
    """Print one line for each name. Returns the exit code; `ConfigError` if no gateway answers."""
    print("\n".join(usage_lines(ask_usage(address))))
    return 0


def ask_usage(address: Address) -> list[dict[str, Any]]:
    """The usage records of all names, from the gateway at `address`; `ConfigError` if none answers."""
    url = urlsplit(address.url)
    link = HTTPConnection(url.hostname or "", url.port, timeout=_SECONDS)
    try:
        connect(link, address.secret)
        link.request("GET", ALL, headers={SECRET: address.secret})
        answer = link.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise OSError(f"status {answer.status}")
        usages: list[dict[str, Any]] = json.loads(body)
        return usages
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError("serve", address.url, "a running gateway", f"start it again ({one_line(error)})") from None
    finally:
        link.close()


def usage_lines(names: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a table of totals, with a column for each kind of token."""
    table = [["name", *_COLUMNS, "checkpoints"]]
    for entry in names:
        amounts = (f"{entry['total'][field]:,.0f}" for field in _COLUMNS.values())
        table.append([entry["name"], *amounts, f"{entry['checkpoint_bytes'] / 1e9:,.3f} GB"])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in enumerate(zipped))
        for zipped in (list(zip(row, widths, strict=True)) for row in table)
    ]
