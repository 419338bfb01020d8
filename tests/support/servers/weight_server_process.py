"""A server that takes and forwards weights, without a model, as a process of its own.

    python -m tests.support.servers.weight_server_process ADDRESS CHUNK_BYTES

Prints its endpoint. For each line on standard input it prints the SHA-256 digest of the weights that it has received.
"""

import hashlib
import sys

from pipeline.inference.weight_sync import server_shards
from tests.fakes.weight_server import WeightServer


def main(address: str, chunk_bytes: int) -> None:
    server_shards.WEIGHT_CHUNK = chunk_bytes
    with WeightServer(address) as server:
        print(server.endpoint, flush=True)
        for _ in sys.stdin:
            digest = hashlib.sha256()
            for name, tensor in sorted(server.weights.items()):
                digest.update(name.encode() + tensor.numpy().tobytes())
            print(digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
