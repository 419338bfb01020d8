"""What a model does when it loads its weights, as copies; and when that is not all it does."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from pipeline.weights.copies import CopyPlan, NoPlan

NamedTensors = list[tuple[str, Tensor]]


class Fused(nn.Module):
    """Loads as vLLM's models do: a fused matrix by parts, the second half of another, a padded vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(6, 4))
        self.part = nn.Parameter(torch.zeros(3, 2))
        self.vocabulary = nn.Parameter(torch.ones(8, 4))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in ("q", "k"):
                self.fused.data.narrow(0, 3 * (name == "k"), 3).copy_(tensor)
            elif name == "part":
                self.part.data.copy_(tensor.narrow(1, 2, 2))
            elif name == "vocabulary":
                self.vocabulary[: tensor.shape[0]].data.copy_(tensor)
                self.vocabulary[tensor.shape[0] :].data.fill_(0)


def made(seed: int = 0) -> NamedTensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (3, 4), "k": (3, 4), "part": (3, 4), "vocabulary": (5, 4)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def test_recording_copies_nothing_and_applying_gives_what_loading_gives() -> None:
    tensors, model, stock = made(), Fused(), Fused()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = CopyPlan.record(model.load_weights, tensors)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        stock.load_weights(tensors)
    assert plan.differs(model, tensors, lambda: _load(model, tensors)) == ""
    for target in model.parameters():
        target.data.mul_(3)
    plan.apply()
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_plan_follows_the_bytes_in_the_staging_tensors() -> None:
    tensors, model, stock = made(), Fused(), Fused()
    _load(model, tensors)
    plan = CopyPlan.record(model.load_weights, tensors)
    for (_, tensor), (_, newer) in zip(tensors, made(1), strict=True):
        tensor.copy_(newer)
    plan.apply()
    _load(stock, made(1))
    assert all(torch.equal(value, stock.state_dict()[name]) for name, value in model.state_dict().items())


class Transposing(Fused):
    """Shuffles what it loads before it copies: more than copies."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, tensor.flip(0) if name == "k" else tensor) for name, tensor in weights)


def test_a_model_that_computes_while_it_loads_has_no_plan_and_says_with_what() -> None:
    with pytest.raises(NoPlan, match=r"aten\.flip"):
        CopyPlan.record(Transposing().load_weights, made())


class Deriving(Fused):
    """Keeps something that it computes from its weights once they are loaded, outside of its parameters."""

    derived: Tensor

    def after(self) -> None:
        self.derived = self.fused.detach().abs().amax(1)


class Shuffled(Fused):
    """Its rows change places once they are loaded."""

    def after(self) -> None:
        self.fused.data.copy_(self.fused.detach().flip(0))


@pytest.mark.parametrize(("kind", "named"), [(Deriving, "derived"), (Shuffled, "fused")])
def test_what_is_derived_or_moved_after_loading_is_noticed(kind: type[Fused], named: str) -> None:
    tensors, model = made(), kind()

    def reload() -> None:
        _load(model, tensors)
        model.after()  # type: ignore[operator]

    plan = CopyPlan.record(model.load_weights, tensors)
    assert named in plan.differs(model, tensors, reload)
    expected = kind()
    _load(expected, tensors)
    expected.after()  # type: ignore[operator]
    assert torch.equal(model.fused, expected.fused), "the model is as the reload leaves it"
    assert torch.equal(tensors[0][1], made()[0][1]), "the staging tensors are as they were"


def _load(model: Fused, tensors: NamedTensors) -> None:
    with torch.no_grad():
        model.load_weights(iter(tensors))
