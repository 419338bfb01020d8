"""What a session has to come to, in float64, by transformers and peft alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from tinker import types
from torch import Tensor
from transformers import AutoModelForCausalLM


class Truth:
    """A base with an adapter, in float64, trained by torch's own AdamW."""

    def __init__(self, base: Path, adapter: Path) -> None:
        network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
        self.model = PeftModel.from_pretrained(network, str(adapter), is_trainable=True).double()
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._adam: torch.optim.AdamW | None = None

    def logprobs(self, datum: types.Datum) -> Tensor:
        """[N] or [N, K], as `target_tokens`."""
        tokens = torch.tensor(datum.model_input.to_ints())[None]
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].to_numpy())
        whole = self.model(input_ids=tokens).logits[0].log_softmax(-1)
        return whole.gather(1, targets.reshape(len(whole), -1)).reshape(targets.shape)

    def loss(self, data: Sequence[types.Datum], name: str, settings: Mapping[str, float]) -> Tensor:
        return torch.stack([self._loss(datum, name, settings) for datum in data]).sum()

    def _loss(self, datum: types.Datum, name: str, settings: Mapping[str, float]) -> Tensor:
        lp = self.logprobs(datum)
        given = {
            key: torch.tensor(np.asarray(value.to_numpy())).double() for key, value in datum.loss_fn_inputs.items()
        }
        if name == "cross_entropy":
            return -(given["weights"] * lp).sum()
        q, a = given["logprobs"], given["advantages"]
        r = (lp - q).exp()
        low, high = settings.get("clip_low_threshold"), settings.get("clip_high_threshold")
        if name == "importance_sampling":
            return -(r * a).sum()
        if name == "ppo":
            return -torch.minimum(r * a, r.clamp(low or 0.8, high or 1.2) * a).sum()
        if name == "cispo":
            return -(r.detach().clamp(low or 0.0, high or 4.0) * lp * a).sum()
        if name == "gspo":  # by the gradient of the sequence's ratio, with each token's own part of it left alone
            inside = given["sequence_ratio_mask"] != 0
            s = torch.prod(r[inside]).pow(1 / int(inside.sum())).detach()
            own = s * lp.exp() / lp.exp().detach()
            bounded = s.clamp(low or 0.9997, high or 1.0004)
            return -torch.where(s * a <= bounded * a, own * a, bounded * a).sum()
        assert name == "dro"
        return -(lp * a - settings.get("beta", 0.05) / 2 * (lp - q) ** 2).sum()

    def step(self, params: types.AdamParams) -> None:
        if self._adam is None:
            self._adam = torch.optim.AdamW(self.trained.values())
        if params.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(self.trained.values(), params.grad_clip_norm)
        for group in self._adam.param_groups:
            group |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2)}
            group |= {"eps": params.eps, "weight_decay": params.weight_decay}
        self._adam.step()
        self._adam.zero_grad()

    def distance(self, weights: Mapping[str, Any]) -> float:
        """The largest difference to the tensors of an adapter that was saved, over the largest number in it."""
        mine = {name.replace(".default.", "."): p.detach().numpy() for name, p in self.trained.items()}
        assert mine.keys() == weights.keys()
        return max(float(np.abs(mine[name] - weights[name]).max() / np.abs(mine[name]).max()) for name in mine)
