"""Loading of a model that drafts tokens from its directory, whatever the load format of the policy is.

A server starts with the policy's weights uninitialized (`--load-format dummy`), since the trainer sends them. vLLM
loads the drafting model in the same way, and ignores `draft_load_config` for it (0.25 and 0.32): its weights would be
random too, and nearly no draft would be accepted.

The second model runner of vLLM has another proposer, which ignores the key too (`StandaloneARSpeculator`, 0.32, where
GPUs use it by default). So a server with a drafting model uses the first one, as 0.25 does by itself.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.inference.vllm.stock_functions import stock_function

SWITCH = "ROLLCALL_DRAFT_MODEL"
"""The environment variable of a server that has a drafting model, with the value 1."""
SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable that chooses its second model runner."""


def load_drafting_model(variables: Mapping[str, str] = os.environ) -> None:
    """Patch this vLLM process to load the drafting model from disk. A second call changes nothing."""
    if variables.get(SWITCH) != "1":
        return
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    stock = stock_function(
        DraftModelProposer, "_create_draft_vllm_config", "self", by=__name__, key="inference.speculation.method=draft"
    )
    if stock is None:
        return

    def create(self: Any) -> Any:
        load_config = self.speculative_config.draft_load_config
        return stock(self) if load_config is None else replace(stock(self), load_config=load_config)

    DraftModelProposer._create_draft_vllm_config = create
