"""The layout of a model in its Hugging Face directory: which tensors of the files make which tensors of the network.

Owns the names on both sides, and the use of transformers' private conversion API: some models have other tensors in
memory than in their files, such as all experts of a layer in one. Promises that written tensors have the names and
shapes of the tensors that were read, or, for a model without weights, those that transformers itself would write. Works
on names and shapes alone, except for `init_weights`. Must not know ranks or files.

    layout = CheckpointLayout(directory, keys)    # the keys of the files; without keys: a model that has no weights yet
    layout.direct, layout.merged                  # network tensors that equal one file tensor, and merged ones
    for names in layout.groups:                   # and back, by groups that can only be written together
        layout.public({name: whole(name) for name in names})
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
    """Tensors of the network that one conversion makes of several tensors of the files.

    Attributes:
        names: the tensors of the network.
        patterns: the source pattern of the conversion for each key of the files.
        converter: the conversion, a `WeightConverter` of transformers.
    """

    names: tuple[str, ...]
    patterns: Mapping[str, str]
    converter: Any

    @property
    def keys(self) -> dict[str, list[str]]:
        """The keys of each pattern, in order."""
        keys_by_pattern: dict[str, list[str]] = {}
        for key, pattern in self.patterns.items():
            keys_by_pattern.setdefault(pattern, []).append(key)
        return keys_by_pattern

    @property
    def stacked(self) -> bool:
        """Whether the tensor is a stack with one row per key of a pattern, such as the experts of a layer."""
        return len(self.names) == 1 and _is_stack(self.converter)


class CheckpointLayout:
    """The names and shapes of a model in memory and in its files.

    Attributes:
        direct: for each tensor of the network that equals one tensor of the files, its key there.
        merged: the other tensors of the files, by conversion.
        duplicate_keys: for tied tensors that the files hold twice, the second key; the two must be equal.
        unexpected_keys: keys without a tensor in the network that transformers does not list as harmless.
        untrained: keys that transformers lists as parts of such a model outside of the network, such as an image
            tower, or layers that predict several tokens.
    """

    def __init__(self, directory: Path, keys: Collection[str] = ()) -> None:
        self._directory = directory
        with torch.device("meta"):
            self._meta_model = self._network()
        self._tied: Mapping[str, str] = dict(self._meta_model.all_tied_weights_keys)
        self._shapes: Tensors = self._meta_model.state_dict(keep_vars=True)
        self._conversions = get_model_conversion_mapping(self._meta_model)
        self.direct: dict[str, str] = {}
        self.merged: list[MergedTensor] = []
        self.duplicate_keys: dict[str, str] = {}
        unmatched = self._sort(keys)
        self.unexpected_keys = self._filter_benign(unexpected=unmatched).unexpected_keys
        self.untrained = sorted(unmatched - set(self.unexpected_keys), key=dot_natural_key)
        self._meta_model._weight_conversions = self._reversible(bool(keys))

    @cached_property
    def tensors(self) -> Tensors:
        """The parameters and persistent buffers of a checkpoint, by names in the network: float32, on the meta device.

        Tied tensors occur once.
        """
        return {name: tensor for name, tensor in self._shapes.items() if name not in self._tied}

    @cached_property
    def decoder(self) -> str:
        """The prefix of the names of the decoder's tensors."""
        decoder = self._meta_model.get_decoder()
        return next(f"{name}." for name, module in self._meta_model.named_modules() if module is decoder)

    @property
    def groups(self) -> list[list[str]]:
        """The names of `tensors`, grouped: `public` needs all tensors of a group in one call."""
        return self._grouped[0]

    @property
    def converted(self) -> set[str]:
        """The names of `tensors` that `public` converts: it changes their values, or splits or merges them."""
        return self._grouped[1]

    @property
    def stacks(self) -> set[str]:
        """The names in `converted` that are stacks, such as experts: `public` makes separate tensors of each row, named
        by the row's number."""
        return self._grouped[2]

    @cached_property
    def _grouped(self) -> tuple[list[list[str]], set[str], set[str]]:
        reverse = [conversion.reverse_transform() for conversion in reversed(self._meta_model._weight_conversions)]
        renamings, converters = _split_by_kind(reverse)
        by_pattern = {pattern: conversion for conversion in converters for pattern in conversion.source_patterns}
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
        """Convert whole tensors of the network to tensors of a checkpoint; views of the arguments where possible."""
        public: Tensors = revert_weight_conversion(self._meta_model, dict(tensors))
        return public

    def convert(self, merged: MergedTensor, read: Callable[[str], Tensor], rows: slice = slice(None)) -> Tensors:
        """The whole tensors of `merged`, by name; `read` returns a key's tensor, `rows` selects rows of a stack."""
        converter = deepcopy(merged.converter)
        for pattern, keys in merged.keys.items():
            for key in keys[rows]:  # the converter calls `read` itself, one key after another
                converter.add_tensor(merged.names[0], key, pattern, partial(read, key))
        made = converter.convert(merged.names[0], model=self._meta_model, config=self._meta_model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}

    def keys_of(self, merged: MergedTensor) -> set[str]:
        """The keys of all tensors that `convert` needs."""
        return set(self.public({name: self.tensors[name] for name in merged.names if name in self.tensors}))

    def missing(self, names: Collection[str]) -> list[str]:
        """The names of `tensors` that are not in `names`, without those that transformers lists as optional."""
        return sorted(self._filter_benign(missing=self.tensors.keys() - set(names)).missing_keys)

    def init_weights(self, seed_of: Callable[[str], int]) -> Iterator[tuple[str, Tensor]]:
        """Draw random weights with the distributions of transformers; whole tensors, by name.

        Each module is drawn with the seed `seed_of(name)`, so the values of one module need neither the time nor the
        memory of all others. Tensors that transformers fills only while it builds a network need a whole network.
        """
        names = {module: f"{name}." if name else "" for name, module in self._meta_model.named_modules()}
        unfilled = []
        for module, initialize in _initializers(self._meta_model):
            drawn = _draw_module(module, initialize, seed_of(names[module]))
            for leaf in list(drawn):
                name = names[module] + leaf
                if name in self.tensors and drawn[leaf].sum().isnan():
                    unfilled.append(name)
                elif name in self.tensors:
                    yield name, drawn.pop(leaf)  # `pop`: the consumer holds the only reference
            del drawn  # released before the next module is drawn
        if unfilled:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of(""))
                whole = self._network().state_dict()
            yield from ((name, whole[name]) for name in unfilled)

    def _network(self) -> Any:
        config = AutoConfig.from_pretrained(self._directory)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    def _sort(self, keys: Collection[str]) -> set[str]:
        """Assign each key to a tensor of the network; returns the keys without one."""
        renamings, converters = _split_by_kind(self._conversions)
        by_pattern = {pattern: conversion for conversion in converters for pattern in conversion.source_patterns}
        patterns: dict[str, dict[str, str]] = {}
        unexpected = set()
        for key in sorted(keys, key=dot_natural_key):
            name, pattern = rename_source_key(
                key, renamings, converters, self._meta_model.base_model_prefix, self._shapes
            )
            # A renaming for old files may also match a key that already has its name in the network.
            if name not in self._shapes and key in self._shapes:
                name, pattern = key, None
            if name not in self._shapes:
                unexpected.add(key)
            elif pattern is None:
                own = self._tied.get(name, name)
                (self.duplicate_keys if own in self.direct else self.direct)[own] = key
            else:
                patterns.setdefault(name, {})[key] = pattern
        for name, parts in patterns.items():
            converter = by_pattern[next(iter(parts.values()))]
            first, *others = converter.target_patterns
            names = (name, *(name.replace(first, other) for other in others))
            self.merged.append(MergedTensor(names, parts, converter))
        return unexpected

    def _reversible(self, read: bool) -> list[Any]:
        """The conversions that `public` reverts: those that the files needed; without files, the current ones.

        Conversions for older files, and those that only add or remove a prefix, are left out.
        """
        if read:
            return [conversion for conversion in self._conversions if conversion.was_used()]
        usual = get_model_conversion_mapping(self._meta_model, add_legacy=False)
        return [conversion for conversion in usual if not isinstance(conversion, PrefixChange)]

    def _filter_benign(self, missing: Collection[str] = (), unexpected: Collection[str] = ()) -> Any:
        """Both sets of keys without those that transformers lists as harmless."""
        info = LoadStateDictInfo(set(missing), set(unexpected), set(), [], {}, set())
        self._meta_model._adjust_missing_and_unexpected_keys(info)
        return info


def expert_layers(network: Any) -> set[str]:
    """The names in the files of the matrices of one expert, such as `gate_proj`.

    Empty unless the network holds all experts of a layer in one tensor.
    """
    converters = _split_by_kind(get_model_conversion_mapping(network))[1]
    patterns = [pattern for conversion in converters for pattern in conversion.source_patterns if "experts" in pattern]
    return {pattern.removesuffix(".weight").rpartition(".")[-1] for pattern in patterns}


def _is_stack(converter: Any) -> bool:
    """Whether a conversion from the files makes a tensor with one row per key of a pattern."""
    first, *others = converter.operations
    apart = all(isinstance(conversion, Concatenate) and conversion.dim > 0 for conversion in others)
    return isinstance(first, MergeModulelist) and first.dim == 0 and apart


def _split_by_kind(conversions: Collection[Any]) -> tuple[list[Any], list[Any]]:
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    return renamings, [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]


def _initializers(network: Any) -> list[tuple[nn.Module, Callable[[nn.Module], None]]]:
    """Every module with the function that draws its weights, as transformers pairs them, also for nested models.

    `initialize_weights` walks the network and calls `_init_weights` of the innermost model for each module. The
    functions are replaced by recorders during one walk.
    """
    pairs: list[tuple[nn.Module, Callable[[nn.Module], None]]] = []
    models = [module for module in network.modules() if isinstance(module, PreTrainedModel)]
    own = [model._init_weights for model in models]
    for model, initialize in zip(models, own, strict=True):
        model._init_weights = partial(lambda initialize, module: pairs.append((module, initialize)), initialize)
    try:
        network.initialize_weights()
    finally:
        for model in models:
            del model._init_weights
    return pairs


def _draw_module(module: nn.Module, initialize: Callable[[nn.Module], None], seed: int) -> Tensors:
    """The tensors of one module without its submodules, by their names in it; NaN where `initialize` sets nothing."""
    tensors: Tensors = {leaf: p for leaf, p in module._parameters.items() if p is not None}
    lasting = module._buffers.keys() - module._non_persistent_buffers_set
    tensors |= {leaf: buffer for leaf in lasting if (buffer := module._buffers[leaf]) is not None}
    if not tensors:
        return {}
    drawn = {
        leaf: torch.full_like(t, torch.nan if t.is_floating_point() else 0, device="cpu") for leaf, t in tensors.items()
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        initialize(_with_tensors(module, drawn))
    return drawn


def _with_tensors(module: nn.Module, tensors: Tensors) -> nn.Module:
    """A shallow copy of the module with these tensors."""
    shell = copy(module)
    own = {leaf: nn.Parameter(tensors[leaf], False) for leaf in module._parameters if leaf in tensors}
    shell._parameters = {**module._parameters, **own}
    shell._buffers = {leaf: tensors.get(leaf, buffer) for leaf, buffer in module._buffers.items()}
    return shell
