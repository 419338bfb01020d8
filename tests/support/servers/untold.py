"""`python -m tests.support.servers.untold …`: `pipeline.roles.held_port`, for a release of vLLM that does not say which
weights sampled a token.

Our plugin takes this release for such a one, and the answers of this release take what is said in its place, as those
of older ones do. vLLM forks its other processes from this one.
"""

import sys
from typing import Any

from pipeline.inference.vllm import token_versions
from pipeline.roles import held_port

_note = token_versions.note_versions


def note_versions() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out import protocol

    protocol.GenerateLogProbs.model_config["extra"] = "allow"
    models: list[Any] = [protocol.GenerateLogProbs, protocol.GenerateTokensChoice, protocol.GenerateTokensResponse]
    for model in models:
        model.model_rebuild(force=True)
    _note()


if __name__ == "__main__":
    token_versions._FIELD = "_what_no_release_has"
    token_versions.note_versions = note_versions
    held_port.main(sys.argv[1:])
