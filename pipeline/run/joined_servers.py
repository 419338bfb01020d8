"""The servers that join a running attempt: one record each, in the attempt's directory.

Owns `servers/<name>.json`. The agent of a server writes the record once the server is ready, after each restart again,
and removes it before the server stops. The trainer reads the records: a new one is a server that needs weights, a
removed one is a server that leaves. If the agent is killed, its record stays, and the trainer removes it when the
server has been unreachable for a while. A record belongs to one attempt, so an attempt finds none of an earlier one.

    joined = JoinedServers(paths)
    joined.write(JoinedServer(name="inference.4", endpoint="10.1.0.7:41003", since=time.time()))
    ...                                                        # requests arrive once the server has weights
    joined.remove("inference.4")
"""

from collections.abc import Mapping

import msgspec

from pipeline.run.paths import AttemptPaths
from pipeline.utils import shared_files
from pipeline.utils.shared_dir import FileSharedDir

_ENDING = ".json"


class JoinedServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that is ready to get weights.

    Attributes:
        name: its role name, which no other server of the attempt has.
        endpoint: `host:port`.
        since: seconds since the epoch at which it became ready, so that a restarted server has another record.
    """

    name: str
    endpoint: str
    since: float


class JoinedServers:
    """The records of one attempt. Every method raises `OSError` if the disk fails."""

    def __init__(self, paths: AttemptPaths) -> None:
        self._folder = paths.joined_servers

    def write(self, server: JoinedServer) -> None:
        """Record a server that is ready, in place of its earlier record."""
        shared_files.write_document(self._folder / f"{server.name}{_ENDING}", server)

    def remove(self, name: str) -> None:
        """Remove the record of a server that leaves, or has been unreachable; nothing without one."""
        (self._folder / f"{name}{_ENDING}").unlink(missing_ok=True)

    def read(self) -> Mapping[str, JoinedServer]:
        """The servers of the attempt, by endpoint. Lists the folder, which shows other nodes' files on NFS."""
        names = [name for name in FileSharedDir(self._folder).names() if name.endswith(_ENDING) and name[0] != "."]
        records = [self._read(name) or self._read(name) for name in sorted(names)]  # replaced during the first read
        return {record.endpoint: record for record in records if record is not None}

    def has(self, name: str) -> bool:
        """Whether the server has a record."""
        return (self._folder / f"{name}{_ENDING}").exists()

    def _read(self, name: str) -> JoinedServer | None:
        return shared_files.read_document(self._folder / name, JoinedServer)
