"""What each name used of a run that serves: the table of `serve.py --usage`.

Owns the question to the front, which has its store for itself, and how the answer is printed. The front proves itself
before it gets the run's secret.
"""

import json
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

from pipeline.errors import ConfigError, one_line
from pipeline.tinker.gateway_settings import Address
from pipeline.tinker.routes.usage import ALL
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
    """Print one line for each name, and return the exit code; `ConfigError` where no front answers."""
    print("\n".join(usage_lines(ask_usage(address))))
    return 0


def ask_usage(address: Address) -> list[dict[str, Any]]:
    """What the front at an address says of all names."""
    place = urlsplit(address.url)
    link = HTTPConnection(place.hostname or "", place.port, timeout=_SECONDS)
    try:
        connect(link, address.secret)
        link.request("GET", ALL, headers={SECRET: address.secret})
        answer = link.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise OSError(f"it answered {answer.status}")
        found: list[dict[str, Any]] = json.loads(body)
        return found
    except (OSError, HTTPException, ValueError) as error:
        raise ConfigError("serve", address.url, "a front that runs", f"start it again ({one_line(error)})") from None
    finally:
        link.close()


def usage_lines(names: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of the totals, tokens in columns of their own."""
    table = [["name", *_COLUMNS, "checkpoints"]]
    for each in names:
        amounts = (f"{each['total'][field]:,.0f}" for field in _COLUMNS.values())
        table.append([each["name"], *amounts, f"{each['checkpoint_bytes'] / 1e9:,.3f} GB"])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(cell.ljust(width) if not at else cell.rjust(width) for at, (cell, width) in enumerate(zipped))
        for zipped in (list(zip(row, widths, strict=True)) for row in table)
    ]
