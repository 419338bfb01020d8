"""The ways in which the ranks compute the recipes: cases, what came of one, and the mutations."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pipeline.config.training_keys import Recomputation
from pipeline.train.batching.packing import Budget
from pipeline.train.loss_specs import MetricsLevel
from tests.support.oracle.cases import AUX, BALANCED, FAMILIES, RECIPES, Arrays, Family, expert_count

WORLDS = (1, 2, 4)
Dtype = Literal["float32", "bfloat16", "float16"]
_NAMED = ("aux", "layers", "reshard", "offload", "compile", "staged", "replayed")


@dataclass(frozen=True)
class Case:
    """One way to compute a recipe.

    Attributes:
        recipe: its name in `RECIPES`.
        tokens, rows, packed, shared: the budget of a micro-batch.
        layers: whether each layer is an FSDP unit of its own.
        offload: whether a reference model and a second trained model compete for the device.
        reshard, checkpointing, compile, dtype, cp: as in `ModelSpec`; replicas: its `dp_replicate`.
        staged: whether the rows are sent once for all steps.
        level: of the metrics.
        tied: whether the model's head is its embedding.
        ep: of a mixture of experts, as in `ModelSpec`; 0: the model is none.
        family: the mixture's kind.
        aux: coefficient of the mixture's auxiliary loss.
        replayed: whether its rows have the experts of each token.
    """

    recipe: str
    tokens: int = 96
    rows: int | None = None
    packed: bool = True
    shared: bool = True
    layers: bool = False
    reshard: bool = False
    offload: bool = False
    checkpointing: Recomputation = "none"
    compile: bool = False
    staged: bool = False
    replicas: int = 1
    cp: int = 1
    level: MetricsLevel = "basic"
    dtype: Dtype = "float32"
    tied: bool = True
    ep: int = 0
    family: Family = ""
    aux: float = 0.0
    replayed: bool = False

    def model(self, folder: Path) -> Path:
        """Where `write_models` put the case's model."""
        return folder / (self.family or ("mixture" if self.ep else "tied" if self.tied else "untied"))

    @property
    def budget(self) -> Budget:
        return Budget(tokens=self.tokens, rows=self.rows, packed=self.packed, shared=self.shared)

    def __str__(self) -> str:
        limit = f"{self.tokens}tokens" if self.rows is None else f"{self.rows}rows"
        words = [self.recipe, self.budget.packing, limit]
        words += [name for name in _NAMED if getattr(self, name)]
        words += [] if self.checkpointing == "none" else [f"{self.checkpointing}checkpointing"]
        words += [f"replicas{self.replicas}"] if self.replicas > 1 else []
        words += [self.family] if self.family else []
        words += [f"ep{self.ep}"] if self.ep else []
        words += [f"cp{self.cp}"] if self.cp > 1 else []
        words += [] if self.tied or self.ep else ["untied"]
        return "-".join(words)


BUDGETS = [(96, 1, True), (96, 1, False), (96, 2, True), (96, 2, False), (24, None, True), (24, None, False)]
"""By number of rows and by tokens; packed and padded take turns."""
SWITCHES: tuple[dict[str, Any], ...] = (
    {"layers": True},
    {"offload": True},
    {"checkpointing": "full"},
    {"offload": True, "checkpointing": "selective", "layers": True, "staged": True},
    {"layers": True, "reshard": True},
)


def cases(ranks: int) -> list[Case]:
    """Every recipe on 2 ranks packed, padded and shared, and on 1 rank, by number of rows or by tokens; and each switch
    with several recipes, among them always one with a critic or with adapters. On 4 ranks a third of them, and all that
    is replicated or shares lines: the rest of it is in `all_cases` and `context_cases`. Some are of a mixture; the rest
    of them in `mixture_cases`."""
    turn = WORLDS.index(ranks)
    plain, switched = [*_plain(turn)], [*_switched(turn)]
    if ranks == 2:
        plain = [*dict.fromkeys([*plain, *(Case(recipe, tokens=24) for recipe in RECIPES)])]
    if ranks > 2:
        plain, switched = plain[::3], switched[::3]
    return [*plain, *switched, *_replicated(ranks), *_mixtures(ranks), *_context(ranks)]


def suite_cases(ranks: int) -> list[Case]:
    """The cases of the suite: `suite_candidates` without those that add no pair of options."""
    return [case for world, case in _covering_cases() if world == ranks]


@cache
def _covering_cases() -> list[tuple[int, Case]]:
    """The candidates of all worlds, without each case whose every pair of options (the recipe with the packing, the
    number of ranks with a switch, …) other cases have too; the most expensive are left out first. Of each recipe at
    least three cases with a tied head stay, whose metrics are compared."""
    chosen = [(ranks, case) for ranks in reversed(WORLDS) for case in suite_candidates(ranks)]
    counts = Counter(pair for ranks, case in chosen for pair in pairs_of(ranks, case))
    for ranks, case in tuple(chosen):
        pairs = pairs_of(ranks, case)
        if all(counts[pair] > (3 if pair == _compared(case.recipe) else 1) for pair in pairs):
            chosen.remove((ranks, case))
            counts.subtract(pairs)
    return chosen


def pairs_of(ranks: int, case: Case) -> set[tuple[object, object]]:
    """All pairs of two options of a case, each with its name."""
    budget = ("tokens", "rows", "packed", "shared")
    options = {name: value for name, value in vars(case).items() if name not in budget}
    options |= {"ranks": ranks, "packing": case.budget.packing, "limit": (case.rows, case.tokens)}
    options |= {"compared": case.level if case.tied else ""}
    return set(combinations(options.items(), 2))


def _compared(recipe: str) -> tuple[object, object]:
    """The pair of a case whose metrics are compared with those of other cases."""
    return ("recipe", recipe), ("tied", True)


def suite_candidates(ranks: int) -> list[Case]:
    """Half of the time of `cases`: every recipe on 1 rank and on 2; each switch with a policy on one of them, and with
    a critic or adapters on the other; every family of mixtures. On 4 ranks: what has shards in addition to replicas,
    shared lines or experts."""
    turn = WORLDS.index(ranks)
    pairs = zip(*[iter(_switched(turn))] * 2, strict=True)
    switched = [pair[(number + turn) % 2] for number, pair in enumerate(pairs)]
    if ranks == 1:
        plain = [*_plain(turn), *_plain(turn, places=(3,))]
    elif ranks == 2:
        pairs = zip(*[iter(_plain(turn))] * 2, strict=True)
        plain = [pair[number % 2] for number, pair in enumerate(pairs)]
        plain += [Case(recipe, tokens=24) for recipe in [*RECIPES][::3]]
    else:
        plain, switched = [*_plain(turn)][::8], switched[::2]
    few = [*_replicated(ranks, few=True), *_mixtures(ranks, few=True), *_context(ranks, few=True)]
    return [*dict.fromkeys([*plain, *switched, *few])]


def _plain(turn: int, places: Sequence[int] = ()) -> Iterator[Case]:
    for number, recipe in enumerate(RECIPES):
        for place in places or ((0,), (2, 5), (1,))[turn]:
            tokens, rows, packed = BUDGETS[(number + place) % len(BUDGETS)]
            level: MetricsLevel = ("basic", "with_entropy", "none")[(number + place) % 3]
            yield Case(recipe, tokens, rows, packed, number % 3 > 0, staged=place > 2, level=level)


def _switched(turn: int) -> Iterator[Case]:
    plain = [name for name, recipe in RECIPES.items() if recipe.model == "policy" and not recipe.lora]
    other = ["value", "lora", "value_free"]
    for number, switches in enumerate(SWITCHES):
        for recipe in (plain[(3 * number + turn) % len(plain)], other[(number + turn) % len(other)]):
            packed, tied = (number + turn) % 2 == 0, 0 < number < 3
            yield Case(recipe, rows=2, packed=packed, tied=tied, **switches)  # type: ignore[arg-type]


def _replicated(ranks: int, *, few: bool = False) -> Iterator[Case]:
    if ranks > 1:
        for recipe in (("ppo", "lora") if ranks == 2 else ("value", "lora")) if few else ("ppo", "value", "lora"):
            yield Case(recipe, rows=2, replicas=2, offload=recipe == "ppo")


def _mixtures(ranks: int, *, few: bool = False) -> Iterator[Case]:
    if ranks == 1:
        yield from (_mixture("grpo", 1), _mixture("gspo", 1, family="glm", rows=None, tokens=24))
        yield from (_mixture("grpo", 1, family="gpt_oss", rows=None, tokens=24, replayed=new) for new in (False, True))
        yield _mixture("ppo", 1, rows=None, tokens=24, aux=AUX)
    if ranks == 2:
        yield _mixture("value", 2, layers=True, reshard=True)
        yield _mixture("grpo", 1, family="gpt_oss", cp=2, rows=None, tokens=24)
        yield _mixture("lora", 2, family="gpt_oss", packed=False)
        yield _mixture("cispo", 2, family="deepseek", layers=True, checkpointing="full")
        yield _mixture("gspo", 2, aux=AUX, layers=True, reshard=True, checkpointing="full")
        yield _mixture("grpo", 1, family="glm", aux=AUX, cp=2, rows=None, tokens=24)
        yield _mixture("cispo", 2, family="glm", checkpointing="full", replayed=True)
        yield _mixture("grpo", 2, family="mixtral", layers=True)
    if ranks == 2 and not few:
        yield from (_mixture("cispo", 1), _mixture("grpo", 2))
        yield _mixture("cispo", 2, family="glm", checkpointing="full")
        yield from (_mixture("lora", 2), _mixture("lora", 1, layers=True, checkpointing="selective"))
        yield _mixture("grpo", 1, cp=2, rows=None, tokens=24, replayed=True)
        yield _mixture("gspo", 2, family="deepseek", packed=False, replayed=True, aux=AUX)
    if ranks == 4:
        yield from (_mixture("grpo", 2, replicas=2), _mixture("lora", 2, cp=2, replicas=2, aux=AUX))
        yield _mixture("cispo", 4, cp=2, checkpointing="full")
    if ranks == 4 and not few:
        yield from (_mixture("sft", 2, checkpointing="full"), _mixture("gspo", 4))
        yield _mixture("value", 2, cp=2, layers=True)


def family_cases(ranks: int) -> list[Case]:
    """Dense and each kind of mixture × full, adapters, adapters on experts too × packed, shared prefixes; the ranks are
    shards, spread experts, shared lines and replicas by turns."""
    meshes = [{"ep": ep, "cp": cp, "replicas": n} for ep in (1, 2, 4, 8) for cp in (1, 2) for n in (1, 2)]
    meshes = [mesh for mesh in meshes if ranks % (max(mesh["ep"], mesh["cp"]) * mesh["replicas"]) == 0]
    kinds = [(family, recipe) for family in ("dense", *FAMILIES) for recipe in ("grpo", "lora", "lora_sft")]
    chosen = []
    for number, ((family, recipe), shared) in enumerate(product(kinds, (False, True))):
        mesh = meshes[(number * 5) % len(meshes)]
        mesh = mesh | {"ep": 0 if family == "dense" else min(mesh["ep"], expert_count(family))}
        chosen.append(Case(recipe, 24, shared=shared, tied=False, family="" if family == "dense" else family, **mesh))
    return chosen


def _mixture(recipe: str, ep: int, **switches: Any) -> Case:
    if ep > 1 and switches.get("checkpointing") == "selective":
        switches["checkpointing"] = "full"
    return Case(recipe, **({"rows": 2} | switches), ep=ep, tied=False)


def mixture_cases(ranks: int) -> list[Case]:
    """A mixture with each recipe, each number of ranks for its experts, and each switch in turn; adapters are on its
    experts too."""
    spread = [(ep, replicas) for ep in (1, 2, 4) for replicas in (1, 2) if ranks % (ep * replicas) == 0]
    switches: list[dict[str, Any]] = [
        {},
        *SWITCHES,
        {"packed": False},
        {"rows": None, "tokens": 24},
        {"shared": False},
        {"replayed": True},
    ]
    return [
        _mixture(recipe, ep, replicas=replicas, family=family, **switches[(number + turn) % len(switches)])
        for turn, (ep, replicas) in enumerate(spread)
        for number, (recipe, family) in enumerate(product(RECIPES, FAMILIES))
        if family not in BALANCED or not (RECIPES[recipe].lora or RECIPES[recipe].model == "critic")
    ]


def _context(ranks: int, *, few: bool = False) -> Iterator[Case]:
    """Lines that two ranks share: packed, with shared prefixes, with whole rows and parts of rows on a rank; on 4 ranks
    beside shards and replicas."""
    if ranks == 2:
        yield Case("grpo", 24, cp=2, level="with_entropy")
        yield Case("gspo", cp=2, shared=False, layers=True, tied=False)
        yield Case("distillation", 24, cp=2)
        yield Case("value", 24, cp=2, staged=True, checkpointing="selective")
        yield Case("lora", rows=1, cp=2)
    if ranks == 2 and not few:
        yield Case("ppo", rows=2, cp=2, offload=True)
    if ranks == 4:
        yield Case("cispo", 24, cp=2, layers=True, reshard=True)
        yield Case("value_free", 24, cp=2, replicas=2)
    if ranks == 4 and not few:
        yield Case("sft", 24, cp=2, shared=False)
        yield Case("lora_sft", cp=2, replicas=2, layers=True)
        yield _mixture("grpo", 4, cp=2)


def context_cases(ranks: int) -> list[Case]:
    """Every recipe with lines that two ranks share, packed and with shared prefixes, by each budget and each switch; on
    4 ranks in one replica and in two."""
    switches = ({}, *SWITCHES)
    wanted = product(RECIPES, (True, False), ((96, None), (24, None), (96, 2), (96, 1)), range(1, ranks // 2 + 1))
    return [
        Case(recipe, *budget, shared=shared, cp=2, replicas=replicas, tied=number % 3 > 0, **switches[number % 6])
        for number, (recipe, shared, budget, replicas) in enumerate(wanted)
    ]


def all_cases(ranks: int) -> list[Case]:
    """The product of recipes, budgets, and what changes the computation, but for `compile`; rows are staged in two
    cases of five, and replicated also where there are ranks for it."""
    switches = product(RECIPES, BUDGETS, *[(False, True)] * 3, [1, 2] if ranks > 1 else [1])
    return [
        Case(
            recipe,
            *budget,
            number % 4 > 0,
            layers=a,
            offload=b,
            checkpointing=("full" if number % 2 else "selective") if c else "none",
            staged=number % 5 > 2,
            replicas=replicas,
        )
        for number, (recipe, budget, a, b, c, replicas) in enumerate(switches)
    ]


def compiled_cases(ranks: int) -> list[Case]:
    """Every recipe compiled, packed and padded; and a mixture whose experts are spread where there are ranks for it."""
    modes: tuple[Recomputation, ...] = get_args(Recomputation)
    spread = [_mixture("cispo", 2, compile=True, layers=True, aux=AUX, checkpointing=mode) for mode in ("none", "full")]
    dense = [
        Case(recipe, rows=2, packed=packed, compile=True, checkpointing=modes[number % 3], offload=number % 3 > 1)
        for number, recipe in enumerate(RECIPES)
        for packed in (True, False)
    ]
    return [*dense, *(spread if ranks % 2 == 0 else [])]


def few_compiled_cases(ranks: int) -> list[Case]:
    """Some of them: compilation takes its time."""
    return [case for case in compiled_cases(ranks) if case.recipe in ("grpo", "value", "lora", "cispo")]


@dataclass
class Result:
    """What the ranks computed in one case.

    Attributes:
        start: trained parameters before the first step.
        answers: what `forward` said of each row before it.
        metrics, gradients: of each step.
        parameters: trained parameters after the last step.
        seen: evidence that switches and mutations did something: how often, over all ranks.
    """

    start: Arrays = field(default_factory=dict)
    answers: list[NDArray[np.float32]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: list[Arrays] = field(default_factory=list)
    parameters: Arrays = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)


Mutation = Literal[
    "local_normalisation",
    "dropped_micro_batch",
    "duplicated_shard",
    "averaged_gradients",
    "unreduced_replicas",
    "summed_answers",
    "cut_prefix",
    "leaking_attention",
    "wrong_positions",
    "strange_kin",
    "shifted_targets",
    "stale_parameters",
    "stale_moments",
    "forgotten_correction",
    "wrong_expert",
    "neighbor_experts",
    "lost_chunk",
    "wrong_adapter",
    "lost_sink",
    "aux_per_micro_batch",
    "own_tokens_in_aux",
    "unreplicated_bias",
]
PACKED, PADDED = Case("grpo", rows=2), Case("grpo", rows=2, packed=False)
OFFLOADED = replace(PACKED, offload=True)
SPREAD = _mixture("grpo", 2)
MUTATIONS: dict[Mutation, Case] = {
    "local_normalisation": PADDED,
    "dropped_micro_batch": PACKED,
    "duplicated_shard": PACKED,
    "averaged_gradients": PADDED,
    "unreduced_replicas": replace(PACKED, replicas=2),
    "summed_answers": Case("reinforce", rows=2, cp=2),
    "cut_prefix": Case("grpo", 24, cp=2),
    "leaking_attention": replace(PACKED, shared=False),
    "wrong_positions": PACKED,
    "strange_kin": Case("grpo", 24),
    "shifted_targets": PADDED,
    "stale_parameters": OFFLOADED,
    "stale_moments": OFFLOADED,
    "forgotten_correction": Case("dapo", rows=2),
    "wrong_expert": SPREAD,
    "neighbor_experts": replace(SPREAD, replayed=True),
    "lost_chunk": SPREAD,
    "wrong_adapter": _mixture("lora", 2),
    "lost_sink": _mixture("grpo", 1, family="gpt_oss"),
    "aux_per_micro_batch": _mixture("grpo", 1, aux=AUX),
    "own_tokens_in_aux": _mixture("grpo", 1, aux=AUX, cp=2),
    "unreplicated_bias": _mixture("grpo", 1, family="glm"),
}


def mutations(dtype: Dtype) -> dict[Mutation, Case]:
    """The mutations with this compute type; in 16 bits on losses without jumps, whose bounds suffice to tell."""
    if dtype == "float32":
        return MUTATIONS
    smooth = {"grpo": "sft", "dapo": "cispo"}
    return {
        name: replace(case, dtype=dtype, recipe=smooth.get(case.recipe, case.recipe))
        for name, case in MUTATIONS.items()
    }
