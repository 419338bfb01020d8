"""Composition of command-line overrides to a typed config, or to the points of a sweep.

Owns the use of Hydra's composition and grammar; Hydra's sweepers are in `slurm.submission.sweeps`. Promises that every
mistake in an override becomes one `ConfigError` with the closest match, before Hydra's own messages appear, and that
sweeps use Hydra's grammar.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic_core import to_jsonable_python

import conf
from pipeline.config import (
    NAMED,
    RunConfig,
    canonical_key,
    closest_match,
    is_list,
    known_keys,
    load_config,
    suggest_key,
)
from pipeline.errors import ConfigError
from slurm.submission.machine_resources import register_machine
from slurm.submission.override_errors import missing_element, refuse_list_mistakes, syntax_error

CONF = Path(conf.__file__).parent
OPEN = (
    *("task.options.", f"task.tasks.{NAMED}.options.", "reward.options.", "cluster.sbatch."),
    f"evaluation.sets.{NAMED}.task.",
)
"""Prefixes below which any key is accepted here: options of tasks, rewards and sbatch, which are checked later."""
MAX_POINTS = 1000
DEFAULTS = "schema_defaults"
"""The name under which `conf/config.yaml` includes the defaults of the schema."""


@dataclass(frozen=True)
class Expansion:
    """A sweep's overrides: those that all points share, and those of each point, in Hydra's order."""

    base: tuple[str, ...]
    points: tuple[tuple[str, ...], ...]


@cache
def register_defaults() -> None:
    """Register the schema's defaults with Hydra, so that a sweeper's override of any key is one of a known key."""
    tree: dict[str, Any] = {}
    for key, field in known_keys().items():
        if NAMED not in key and not field.is_required():
            *sections, name = key.split(".")
            section = tree
            for part in sections:
                section = section.setdefault(part, {})
            section[name] = to_jsonable_python(field.get_default(call_default_factory=True))
    ConfigStore.instance().store(DEFAULTS, tree, provider="rollcall")


def compose_config(overrides: Sequence[str], folder: Path = CONF) -> RunConfig:
    """The config that `conf/` and the overrides describe; `ConfigError` for the first mistake."""
    prepared = [_prepare(text, folder) for text in overrides]
    with _composing(overrides):
        return _load(_compose_tree(prepared, folder))


_Trees = dict[tuple[str, ...], Any]
"""Composed trees by choices of groups, with their interpolations unresolved."""
_CONF_TREES: _Trees = {}


class ConfigComposer:
    """`compose_config` for many points of a sweep: Hydra composes each choice of config groups only once.

    Hydra applies all choices of groups before all values, so the values can be applied to a composed tree, which takes
    a seventh of the time. The files of the folder must not change while a composer is used. All composers of a process
    share the trees of `conf/`: a sweeper prepares its trials one by one, each with a new composer.

        composer = ConfigComposer()
        configs = [composer.compose(["loss=grpo", f"seed={seed}"]) for seed in range(100)]
    """

    def __init__(self, folder: Path = CONF) -> None:
        self._folder = folder
        self._trees: _Trees = _CONF_TREES if folder == CONF else {}

    def compose(self, overrides: Sequence[str]) -> RunConfig:
        """The config that `compose_config` composes, or its error."""
        choices = config_groups(self._folder)
        groups: list[str] = []
        values: list[Override] = []
        for text in overrides:
            prepared = _prepare(text, self._folder)
            override = _parse(prepared)
            if override.is_delete() or override.package:
                return compose_config(overrides, self._folder)
            if override.key_or_group in choices:
                groups.append(prepared)
            else:
                values.append(override)
        with _composing(overrides):
            tree = OmegaConf.create(self._tree(tuple(groups)))
            for override in values:
                OmegaConf.update(tree, override.key_or_group, override.value(), force_add=True)
            return _load(tree)

    def _tree(self, groups: tuple[str, ...]) -> Any:
        if groups not in self._trees:
            self._trees[groups] = OmegaConf.to_container(_compose_tree(groups, self._folder), resolve=False)
        return self._trees[groups]


def _compose_tree(prepared: Sequence[str], folder: Path) -> DictConfig:
    register_defaults()
    with initialize_config_dir(str(folder.resolve()), version_base="1.3"):
        return compose("config", list(prepared))


def _load(composed: DictConfig) -> RunConfig:
    tree = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    if not isinstance(tree, dict):
        raise ConfigError("conf/config.yaml", tree, "a mapping")
    config: dict[str, Any] = {str(key): value for key, value in tree.items()}
    if "name" not in config:
        raise ConfigError("name", None, "a name for the run", "set name=… or choose an experiment=…")
    return load_config(config)


def compose_over(tree: Mapping[str, Any], overrides: Sequence[str], folder: Path = CONF) -> dict[str, Any]:
    """A config's tree with these overrides applied in order; `ConfigError` for the first invalid one.

    A config group replaces its section; the group's other keys are merged into the tree.
    """
    with _composing(overrides):
        changed = OmegaConf.create(dict(tree))
        for text in overrides:
            _prepare(text, folder)
            override = _parse(text)
            key, value = override.key_or_group, override.value()
            if override.is_delete():
                raise ConfigError(key, text, "key=value here", "set it to its default instead")
            if key in config_groups(folder):
                _merge_group(changed, key, folder / key / f"{value}.yaml")
            else:
                OmegaConf.update(changed, key, value, force_add=True)
        container = OmegaConf.to_container(changed, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def merge_trees(base: Mapping[str, Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """The trees merged key by key; later trees override earlier ones."""
    merged = dict(base)
    for other in others:
        for key, value in other.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = merge_trees(merged[key], value) if both else value
    return merged


def _merge_group(tree: DictConfig, group: str, file: Path) -> None:
    loaded = OmegaConf.load(file)
    assert isinstance(loaded, DictConfig)
    if "defaults" in loaded:
        raise ConfigError(
            group, file.stem, "a group without a defaults list, to apply to a config", "set its keys one by one"
        )
    sections = loaded if file.read_text().startswith("# @package _global_") else {group: loaded}
    for name, section in sections.items():
        OmegaConf.update(tree, str(name), section, merge=name != group, force_add=True)


@contextmanager
def _composing(overrides: Sequence[str]) -> Iterator[None]:
    """Turn Hydra's errors in the block into `ConfigError`; in it, `conf/` may ask for this machine's size."""
    register_machine()
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        if refusal := _refusal(error) or missing_element(error, overrides):
            raise refusal from None
        reason = " ".join(str(error).split())
        raise ConfigError("overrides", " ".join(overrides), "overrides that compose", reason) from None


def _refusal(error: BaseException) -> ConfigError | None:
    """The error of a resolver, from which OmegaConf makes its own."""
    cause = error.__cause__ or error.__context__
    return cause if cause is None or isinstance(cause, ConfigError) else _refusal(cause)


def expand_sweep(overrides: Sequence[str], folder: Path = CONF) -> Expansion:
    """The points of a sweep: every combination of the values of `a=1,2`, `range(…)`, `choice(…)` and `glob(…)`.

    Keys have no `+` and values have Hydra's spelling (`1e-4` is `0.0001`), so that equal points are equal texts. If a
    key occurs twice, the last one counts. `ConfigError` for values that cannot be enumerated.

        expand_sweep(["loss=grpo,gspo", "seed=1"])     base: seed=1     points: (loss=grpo,), (loss=gspo,)
    """
    base: dict[str, str] = {}
    axes: dict[str, list[str]] = {}
    for text in overrides:
        override = _parse(text)
        key = f"{override.key_or_group}@{override.package}" if override.package else override.key_or_group
        base.pop(key, None)
        axes.pop(key, None)
        if override.is_sweep_override():
            written = _written(override, folder)
            axes[key] = [f"{written}={value}" for value in _values(override, text, folder)]
        else:
            base[key] = text
    points = tuple(islice(product(*axes.values()), MAX_POINTS + 1))
    if len(points) > MAX_POINTS:
        raise ConfigError("sweep", ", ".join(axes), f"at most {MAX_POINTS} points", "sweep fewer values")
    return Expansion(tuple(base.values()), tuple(dict.fromkeys(points)))


def split_axes(overrides: Sequence[str], folder: Path = CONF) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fixed overrides, as for `compose_config`, and the sweeper's axes. If a key occurs twice, the last one counts.

    An axis may be an `interval(…)`, which has no list of points. `ConfigError` for an unknown key or group, and for an
    axis over `name` or `output`, since a sweeper does not choose directories.
    """
    fixed: dict[str, str] = {}
    axes: dict[str, str] = {}
    for text in overrides:
        override = _parse(text)
        key = override.key_or_group
        fixed.pop(key, None)
        axes.pop(key, None)
        if not override.is_sweep_override():
            _prepare(text, folder)
            fixed[key] = text
            continue
        _refuse_named(override, text)
        _refuse_unknown(override, text, folder)
        axes[key] = text
    return tuple(fixed.values()), tuple(axes.values())


def prepare_fixed(overrides: Sequence[str], folder: Path = CONF) -> list[str]:
    """The overrides in the spelling that Hydra accepts, also for keys that `conf/` does not have."""
    return [_prepare(text, folder) for text in overrides]


def axis_ends(axis: str, most: int, folder: Path = CONF) -> list[str]:
    """The overrides to check before a sweeper starts: at most `most` values of an axis, or an interval's two ends."""
    override = _parse(axis)
    value, written = override.value(), _written(override, folder)
    if isinstance(value, IntervalSweep):
        return [f"{written}={end}" for end in (value.start, value.end)]
    return [f"{written}={one}" for one in _values(override, axis, folder)[:most]]


def spell_point(overrides: Sequence[str], fixed: Sequence[str], folder: Path = CONF) -> tuple[str, ...]:
    """A sweeper's overrides for a point, without the fixed ones, in the spelling of `expand_sweep`.

    spell_point(["loss=grpo", "++seed=1", "+optim.lr=1e-4"], ["seed=1"])     ("loss=grpo", "optim.lr=0.0001")
    """
    shared = {_parse(text).key_or_group for text in fixed}
    chosen = [text for text in overrides if text.partition("=")[0].lstrip("+~") not in shared]
    parsed = [_parse(text) for text in chosen]
    return tuple(f"{_written(override, folder)}={override.get_value_element_as_str()}" for override in parsed)


def config_groups(folder: Path = CONF) -> dict[str, list[str]]:
    """The choices of each config group."""
    folders = {path for path in folder.iterdir() if path.is_dir() and any(path.glob("*.yaml"))}
    return {path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in sorted(folders)}


def _prepare(text: str, folder: Path) -> str:
    """The override in the spelling that Hydra accepts: a checked group choice, or a value for a known key."""
    text = _list_trackers(_quote_faults(text))
    override = _parse(text)
    if override.is_sweep_override():
        hint = "-m submits one run for each value"
        if is_list(known_keys().get(override.key_or_group)):
            hint += f"; a list has brackets: '{override.key_or_group}=[{text.partition('=')[2]}]'"
        raise ConfigError(override.key_or_group, text.partition("=")[2], "one value", hint)
    key, choices = override.key_or_group, config_groups(folder)
    if key in choices:
        value = override.value()
        if value not in choices[key]:
            raise ConfigError(key, value, f"one of {', '.join(choices[key])}", closest_match(str(value), choices[key]))
        return text
    _refuse_unknown(override, text, folder)
    if override.is_delete():
        return text
    refuse_list_mistakes(override)
    return "++" + text.lstrip("+")


def _refuse_unknown(override: Override, text: str, folder: Path) -> None:
    """Raise `ConfigError` unless the key is known, or below a prefix in `OPEN`."""
    keys, choices = known_keys(), config_groups(folder)
    key = canonical_key(override.key_or_group, keys)
    inside = [known for known in keys if known.startswith(f"{key}.")]
    if key in choices or any(NAMED in known for known in inside):  # a mapping by name is set whole, or by keys
        return
    if inside:
        raise ConfigError(key, text.partition("=")[2], "one key at a time", f"set {', '.join(inside)}")
    if key not in keys and not key.startswith(OPEN):
        value = text.partition("=")[2] if override.is_sweep_override() else override.value()
        raise ConfigError(override.key_or_group, value, "a known key", suggest_key(key, [*keys, *choices]))


def _refuse_named(override: Override, text: str) -> None:
    """Raise `ConfigError` for a sweep over `name` or `output`."""
    if override.key_or_group in ("name", "output"):
        hint = "each point of a sweep gets its own directory"
        raise ConfigError(override.key_or_group, text.partition("=")[2], "one value", hint)


def _quote_faults(text: str) -> str:
    """`faults=[…]` with quotes around each fault, whose brackets and equal signs Hydra would read as its own."""
    key, _, value = text.partition("=")
    if key.lstrip("+") != "faults" or "'" in value or '"' in value:
        return text
    faults = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    return f"{key}=[{','.join(repr(fault.strip()) for fault in faults.split(',') if fault.strip())}]"


def _list_trackers(text: str) -> str:
    """`tracking=[a,b]` as `tracking.trackers=[a,b]`: Hydra would use the last file's list alone."""
    key, equals, value = text.partition("=")
    return f"{key}.trackers{equals}{value}" if key == "tracking" and value.startswith("[") else text


def _parse(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(_list_trackers(_quote_faults(text)))
    except HydraException as error:
        raise syntax_error(text, str(error).splitlines()[0]) from None
    return override


def _values(override: Override, text: str, folder: Path) -> list[str]:
    """The values of an axis, at least one, in Hydra's spelling."""
    key, written = override.key_or_group, text.partition("=")[2]
    _refuse_named(override, text)
    if not override.is_discrete_sweep():
        raise ConfigError(key, written, "values that can be listed", "use choice(…) or range(start,stop,step)")
    try:
        values = list(islice(_listed(override, folder), MAX_POINTS + 1))
    except (HydraException, ValueError) as error:
        raise ConfigError(key, written, "values that can be listed", " ".join(str(error).split())) from None
    if not values:
        choices = ", ".join(config_groups(folder).get(key, ()))
        raise ConfigError(key, written, "at least one value", f"choose from: {choices}" if choices else "")
    return values


def _written(override: Override, folder: Path) -> str:
    """The key of a point's override: `seed` also for `+seed` and `++seed`, which are equivalent here."""
    if override.is_delete() or override.key_or_group in config_groups(folder):
        return str(override.get_key_element())
    return str(override.get_key_element()).lstrip("+")


def _listed(override: Override, folder: Path) -> Iterator[str]:
    value = override.value()
    if isinstance(value, Glob):
        return iter(value.filter(config_groups(folder).get(override.key_or_group, [])))
    return override.sweep_string_iterator()
