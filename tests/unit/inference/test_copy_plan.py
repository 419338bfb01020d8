"""What a model does when it loads its weights, as copies; and when that is not all it does."""

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

from pipeline.inference.vllm.copy_plan import CopyPlan, NoPlan
from pipeline.inference.weight_sync.transports.gloo import WeightLayout

CPU = torch.device("cpu")
NamedTensors = list[tuple[str, Tensor]]


class Fused(nn.Module):
    """Loads as vLLM's models do: a fused matrix by parts, the second half of another, a padded vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(6, 4))
        self.part = nn.Parameter(torch.zeros(3, 20))
        self.vocabulary = nn.Parameter(torch.ones(8, 4))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in ("q", "k"):
                self.fused.data.narrow(0, 3 * (name == "k"), 3).copy_(tensor)
            elif name == "part":
                self.part.data.copy_(tensor.narrow(1, 20, 20))
            elif name == "vocabulary":
                self.vocabulary[: tensor.shape[0]].data.copy_(tensor)
                self.vocabulary[tensor.shape[0] :].data.fill_(0)


def made(seed: int = 0) -> NamedTensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (3, 4), "k": (3, 4), "part": (3, 40), "vocabulary": (5, 4)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


LAYOUT = WeightLayout.of(made())


def recorded(model: Fused) -> CopyPlan:
    plan = CopyPlan.record(model.load_weights, LAYOUT)
    plan.stage(CPU)
    return plan


def staged(plan: CopyPlan, tensors: NamedTensors) -> None:
    """The staging buffer as a trainer that sends these tensors fills it."""
    views = [view for _, view in plan.shard.staged.views(plan.staging)]
    for each, view in zip(plan.shard.slices, views, strict=True):
        view.copy_(each.of(tensors[each.tensor][1]))


def reloading(model: Fused) -> Callable[[Iterator[tuple[str, Tensor]]], None]:
    def reload(tensors: Iterator[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            model.load_weights(tensors)

    return reload


def loaded(tensors: NamedTensors, kind: type[Fused] = Fused) -> Fused:
    model = kind()
    reloading(model)(iter(tensors))
    return model


def same(model: Fused, other: Fused) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_recording_copies_nothing_and_applying_gives_what_loading_gives() -> None:
    model = Fused()
    plan = recorded(model)
    assert same(model, Fused())
    assert plan.verify_against_reload(model, reloading(model)) == ""
    for seed in (0, 1):
        staged(plan, made(seed))
        plan.apply()
        assert same(model, loaded(made(seed)))


def test_no_more_is_staged_than_what_is_copied() -> None:
    plan = recorded(Fused())
    part = next(each for each in plan.shard.slices if each.tensor == 2)
    assert (part.shape, part.strides, part.offset) == ((3, 20), (40, 1), 20)
    assert not plan.shard.is_whole


class Broadcasting(Fused):
    """Loads one row into several."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q":
                self.fused.data.copy_(tensor[0])


def test_what_is_broadcast_is_staged_once() -> None:
    model = Broadcasting()
    plan = recorded(model)
    assert [each.shape for each in plan.shard.slices] == [(4,)]
    staged(plan, made())
    plan.apply()
    assert same(model, loaded(made(), Broadcasting))


class Transposing(Fused):
    """Shuffles what it loads before it copies: more than copies."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, tensor.flip(0) if name == "k" else tensor) for name, tensor in weights)


class Reading(Fused):
    """Looks at a value, which decides what it does."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, tensor) for name, tensor in weights if tensor[0, 0].item() < 9)


class Casting(Fused):
    """Computes another type."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, tensor.to(torch.bfloat16)) for name, tensor in weights)


class Replacing(Fused):
    """Copies what it was not given."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, self.vocabulary.data[:3] if name == "k" else tensor) for name, tensor in weights)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (Transposing, r"aten\.flip"),
        (Reading, r"aten\._local_scalar_dense"),
        (Casting, r"aten\._to_copy"),
        (Replacing, r"no part of them, torch\.float32\[3, 4\]"),
    ],
)
def test_a_model_that_computes_while_it_loads_has_no_plan_and_says_with_what(kind: type[Fused], named: str) -> None:
    with pytest.raises(NoPlan, match=named):
        recorded(kind())


class Deriving(Fused):
    """Keeps something that it computes from its weights once they are loaded, outside of its parameters."""

    derived: Tensor

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(weights)
        self.after()

    def after(self) -> None:
        self.derived = self.fused.detach().abs().amax(1)


class Shuffled(Deriving):
    """Its rows change places once they are loaded."""

    def after(self) -> None:
        self.fused.data.copy_(self.fused.detach().flip(0))


class Forgetful(Deriving):
    """Loads a tensor by another way than the one that was recorded."""

    def after(self) -> None:
        self.part.data.mul_(2)


@pytest.mark.parametrize(("kind", "named"), [(Deriving, "derived"), (Shuffled, "fused"), (Forgetful, "part")])
def test_what_is_derived_or_moved_after_loading_is_noticed(kind: type[Fused], named: str) -> None:
    model = kind()
    plan = CopyPlan.record(lambda tensors: Fused.load_weights(model, tensors), LAYOUT)
    plan.stage(CPU)
    assert named in plan.verify_against_reload(model, reloading(model))
