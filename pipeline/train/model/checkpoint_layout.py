"""The form that a model has in its Hugging Face directory: which tensors of the files make which of the network.

Owns the names on both sides, and all that is private to transformers in them: some models have other tensors in memory
than in their files, such as all experts of a layer in one. Promises that what is written has the names and shapes of
what was read, or, of a model that never had weights, those that transformers itself would write. Must not know ranks
or files: all but the random numbers is told from names and shapes.

    form = Form(directory, keys)                  # those of the files; none: a model that has no weights yet
    form.plain, form.fused                        # what is one tensor in the files, and what is made of several
    for names in form.groups:                     # and back, by groups that can only be written together
        form.public({name: whole(name) for name in names})
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils.loading_report import LoadStateDictInfo

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class MergedTensor:
    """Tensors of the network that are made together: `names`, of those of the files with the keys of `patterns`."""

    names: tuple[str, ...]
    patterns: Mapping[str, str]
    converter: Any

    @property
    def keys(self) -> dict[str, list[str]]:
        """The keys of each pattern, in order."""
        found: dict[str, list[str]] = {}
        for key, pattern in self.patterns.items():
            found.setdefault(pattern, []).append(key)
        return found

    @property
    def stacked(self) -> bool:
        """Whether the tensor is a stack with a row for each key of a pattern, as that of experts."""
        return len(self.names) == 1 and _is_stack(self.converter)


class CheckpointLayout:
    """The names and shapes of a model in memory and in its files.

    Attributes:
        plain: for each tensor of the network that is one of the files, its key there.
        fused: the others that the files hold.
        twice: of tied tensors, the key of a second one in the files; it must be equal to the first.
        strangers: keys that belong to nothing in the network, and that transformers does not know as harmless.
        untrained: keys that transformers knows as parts of such a model that the network leaves out, such as a tower
            for images, or layers that predict several tokens.
    """

    def __init__(self, directory: Path, keys: Collection[str] = ()) -> None:
        self._directory = directory
        with torch.device("meta"):
            self._twin = self._network()
        self._tied: Mapping[str, str] = dict(self._twin.all_tied_weights_keys)
        self._shapes: Tensors = self._twin.state_dict(keep_vars=True)
        self._conversions = get_model_conversion_mapping(self._twin)
        self.direct: dict[str, str] = {}
        self.fused: list[MergedTensor] = []
        self.twice: dict[str, str] = {}
        unplaced = self._sort(keys)
        self.unexpected_keys = self._explained(strangers=unplaced).unexpected_keys
        self.untrained = sorted(unplaced - set(self.unexpected_keys), key=dot_natural_key)
        self._twin._weight_conversions = self._reversible(bool(keys))

    @cached_property
    def tensors(self) -> Tensors:
        """All that a checkpoint of this model holds, by names in the network: parameters and lasting buffers, float32,
        on the meta device. What is tied is there once."""
        return {name: tensor for name, tensor in self._shapes.items() if name not in self._tied}

    @cached_property
    def decoder(self) -> str:
        """What the names of the decoder's tensors begin with."""
        decoder = self._twin.get_decoder()
        return next(f"{name}." for name, module in self._twin.named_modules() if module is decoder)

    @property
    def groups(self) -> list[list[str]]:
        """The names of `tensors`, those in one list that `public` must be given at once."""
        return self._grouped[0]

    @property
    def converted(self) -> set[str]:
        """The names of `tensors` of which `public` makes other numbers than it was given, or other tensors of them."""
        return self._grouped[1]

    @property
    def stacks(self) -> set[str]:
        """Of `converted`, those that are stacks, as that of experts: `public` makes tensors of each row alone, and
        names them by the row's number."""
        return self._grouped[2]

    @cached_property
    def _grouped(self) -> tuple[list[list[str]], set[str], set[str]]:
        reverse = [conversion.reverse_transform() for conversion in reversed(self._twin._weight_conversions)]
        renamings, converters = _parted(reverse)
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        groups: dict[str, list[str]] = {}
        converter_of: dict[str, Any] = {}
        for name in self.tensors:
            key, pattern = rename_source_key(name, renamings, converters, reverse=True)
            groups.setdefault(name if pattern is None else f"{pattern} {key}", []).append(name)
            if pattern is not None:
                converter_of[name] = by_pattern[pattern]
        stacks = {name for (name, *others) in groups.values() if not others and name in converter_of}
        stacks = {name for name in stacks if _is_stack(converter_of[name].reverse_transform())}
        return list(groups.values()), set(converter_of), stacks

    def public(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Whole tensors of the network as those of a checkpoint; where that is possible, views of what was given."""
        found: Tensors = revert_weight_conversion(self._twin, dict(tensors))
        return found

    def convert(self, fused: MergedTensor, read: Callable[[str], Tensor], rows: slice = slice(None)) -> Tensors:
        """The whole tensors of `fused`, by name; `read` gives one of the files. Of a stack, `rows` of it alone."""
        converter = deepcopy(fused.converter)
        for pattern, keys in fused.keys.items():
            for key in keys[rows]:
                converter.add_tensor(fused.names[0], key, pattern, partial(read, key))
        made = converter.convert(fused.names[0], model=self._twin, config=self._twin.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}

    def keys_of(self, fused: MergedTensor) -> set[str]:
        """The keys of all tensors that `convert` needs."""
        return set(self.public({name: self.tensors[name] for name in fused.names if name in self.tensors}))

    def missing(self, found: Collection[str]) -> list[str]:
        """The names of `tensors` that are not among `found`, but for those that may be."""
        return sorted(self._explained(missing=self.tensors.keys() - set(found)).missing_keys)

    def drawn(self, seed_of: Callable[[str], int]) -> Iterator[tuple[str, Tensor]]:
        """Random weights with the distributions of transformers, whole, by name.

        They are drawn module by module, each with the seed that `seed_of` its name gives: nobody has to draw, or hold,
        all others to know some. Only for what transformers fills while it makes a network, the network is made whole.
        """
        names = {module: f"{name}." if name else "" for name, module in self._twin.named_modules()}
        left = []
        for module, initialize in _initializers(self._twin):
            drawn = _drawn(module, initialize, seed_of(names[module]))
            for leaf in list(drawn):
                name = names[module] + leaf
                if name in self.tensors and drawn[leaf].sum().isnan():
                    left.append(name)
                elif name in self.tensors:
                    yield name, drawn.pop(leaf)  # which lets its memory go when the taker does
            del drawn  # before the next are
        if left:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(""))
                made = self._network().state_dict()
            yield from ((name, made[name]) for name in left)

    def _network(self) -> Any:
        config = AutoConfig.from_pretrained(self._directory)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def _sort(self, keys: Collection[str]) -> set[str]:
        """Find where each key belongs; those that belong nowhere."""
        renamings, converters = _parted(self._conversions)
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        patterns: dict[str, dict[str, str]] = {}
        strangers = set()
        for key in sorted(keys, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, self._twin.base_model_prefix, self._shapes)
            if name not in self._shapes and key in self._shapes:
                name, pattern = key, None
            if name not in self._shapes:
                strangers.add(key)
            elif pattern is None:
                own = self._tied.get(name, name)
                (self.twice if own in self.direct else self.direct)[own] = key
            else:
                patterns.setdefault(name, {})[key] = pattern
        for name, parts in patterns.items():
            converter = by_pattern[next(iter(parts.values()))]
            first, *others = converter.target_patterns
            names = (name, *(name.replace(first, other) for other in others))
            self.fused.append(MergedTensor(names, parts, converter))
        return strangers

    def _reversible(self, read: bool) -> list[Any]:
        """The conversions that `public` reverts: those that the files needed, or all that are no mere leniency."""
        if read:
            return [each for each in self._conversions if each.was_used()]
        usual = get_model_conversion_mapping(self._twin, add_legacy=False)
        return [each for each in usual if not isinstance(each, PrefixChange)]

    def _explained(self, missing: Collection[str] = (), strangers: Collection[str] = ()) -> Any:
        """Both without what transformers knows to be harmless."""
        info = LoadStateDictInfo(set(missing), set(strangers), set(), [], {}, set())
        self._twin._adjust_missing_and_unexpected_keys(info)
        return info


def expert_layers(network: Any) -> set[str]:
    """The names that files give to the matrices of each expert, such as `gate_proj`, of a network that holds all
    experts of a layer in one tensor; empty for one that does not."""
    converters = _parted(get_model_conversion_mapping(network))[1]
    patterns = [pattern for each in converters for pattern in each.source_patterns if "experts" in pattern]
    return {pattern.removesuffix(".weight").rpartition(".")[-1] for pattern in patterns}


def _is_stack(converter: Any) -> bool:
    """Whether a conversion from the files makes a tensor with a row for each key of a pattern."""
    first, *others = converter.operations
    apart = all(isinstance(each, Concatenate) and each.dim > 0 for each in others)
    return isinstance(first, MergeModulelist) and first.dim == 0 and apart


def _parted(conversions: Collection[Any]) -> tuple[list[Any], list[Any]]:
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    return renamings, [each for each in conversions if isinstance(each, WeightConverter)]


def _initializers(network: Any) -> list[tuple[nn.Module, Callable[[nn.Module], None]]]:
    """Every module, and the function that draws its weights; transformers says which, for models within models too."""
    found: list[tuple[nn.Module, Callable[[nn.Module], None]]] = []
    models = [module for module in network.modules() if isinstance(module, PreTrainedModel)]
    own = [model._init_weights for model in models]
    for model, initialize in zip(models, own, strict=True):
        model._init_weights = partial(lambda initialize, module: found.append((module, initialize)), initialize)
    try:
        network.initialize_weights()
    finally:
        for model in models:
            del model._init_weights
    return found


def _drawn(module: nn.Module, initialize: Callable[[nn.Module], None], seed: int) -> Tensors:
    """What a module itself keeps, by its own names; not a number where `initialize` leaves it alone."""
    kept: Tensors = {leaf: p for leaf, p in module._parameters.items() if p is not None}
    lasting = module._buffers.keys() - module._non_persistent_buffers_set
    kept |= {leaf: buffer for leaf in lasting if (buffer := module._buffers[leaf]) is not None}
    if not kept:
        return {}
    drawn = {
        leaf: torch.full_like(t, torch.nan if t.is_floating_point() else 0, device="cpu") for leaf, t in kept.items()
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        initialize(_meta_module(module, drawn))
    return drawn


def _meta_module(module: nn.Module, tensors: Tensors) -> nn.Module:
    """The same module with these tensors, sharing all else."""
    shell = copy(module)
    own = {leaf: nn.Parameter(tensors[leaf], False) for leaf in module._parameters if leaf in tensors}
    shell._parameters = {**module._parameters, **own}
    shell._buffers = {leaf: tensors.get(leaf, buffer) for leaf, buffer in module._buffers.items()}
    return shell
