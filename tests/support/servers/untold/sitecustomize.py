"""First in a server's PYTHONPATH: our plugin takes its vLLM for a release that does not say which weights sampled a
token, and the answers of this release take what is said in its place, as those of older ones do."""

from typing import Any

from pipeline.inference.vllm import token_versions

_note = token_versions.note_versions


def note_versions() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out import protocol

    protocol.GenerateLogProbs.model_config["extra"] = "allow"
    models: list[Any] = [protocol.GenerateLogProbs, protocol.GenerateTokensChoice, protocol.GenerateTokensResponse]
    for model in models:
        model.model_rebuild(force=True)
    _note()


token_versions._FIELD = "_what_no_release_has"
token_versions.note_versions = note_versions
