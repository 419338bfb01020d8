"""Which servers sample from what.

A pool is the servers that samples may go to: those of one base with its adapters, or of whole models. Each has a
separate queue. A server's index decides its pool, so the command that starts it and its clients agree. Pure.

    serve: whole_servers=1, bases={"small": …}, base_servers=2
    index            0                 1      2      3, 4, …
    pool             whole models      small  small  the run's base
"""

from collections.abc import Sequence

from pipeline.config.tinker_keys import ServeConfig
from pipeline.tinker.tinker_records import Pool, ServerFacts


def pool_of(serve: ServeConfig, index: int) -> Pool:
    """The pool of a server."""
    if index < serve.whole_servers:
        return Pool(whole=True)
    number = (index - serve.whole_servers) // serve.base_servers if serve.base_servers else len(serve.bases)
    return Pool([*serve.bases, ""][min(number, len(serve.bases))])


def server_facts(serve: ServeConfig, endpoints: Sequence[str], password: str) -> ServerFacts:
    """What a trainer reports of all servers, in the order of their indices."""
    return ServerFacts(tuple(endpoints), password, tuple(pool_of(serve, index) for index in range(len(endpoints))))
