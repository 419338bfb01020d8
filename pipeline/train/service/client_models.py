"""Clients' models on the dispatch.

Owns which model of the dispatch carries which client's model. Adapters of one form (rank, layers) take turns on one
copy of the base (`pipeline.train.model.adapter_swap`); a whole model has a copy of its own. Promises that a client's
mistake raises `RefusedRequest` before any rank does anything, so that every model stays as it was; and that what one
model computes does not depend on what others do. Must not know requests' numbers, commits or the front.

Whatever else is raised leaves gradients or parameters unknown: the trainer starts again from a commit then.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoints import TrainerState, complete_checkpoints
from pipeline.checkpoints.sharded_state import load_shards, save
from pipeline.config import LoraConfig, ModelConfig, OptimConfig, RunConfig
from pipeline.config.tinker_keys import ATTENTION_LAYERS, MLP_LAYERS
from pipeline.config.tinker_losses import TokenSum
from pipeline.errors import CheckpointError, DamagedCheckpointError, RollcallError
from pipeline.tinker.tinker_records import Adapter, Datum, Pass, PassResult, SaveResult, Step, StepResult
from pipeline.train.algorithms import SFT
from pipeline.train.batching.logprob_queries import QueryRow
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.model import adapter_swap as guests
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.model.optimizer import AdamSettings
from pipeline.train.model.token_queries import answer_queries
from pipeline.train.service.memory_check import MemoryCheck
from pipeline.train.worker_spec import ModelSpec
from pipeline.utils import atomic_dirs, heartbeat

log = logging.getLogger(__name__)
OPTIM = OptimConfig(lr=1e-4)
"""What an optimizer is made with; every step brings its own settings."""


class RefusedRequest(RollcallError):
    """A request that cannot be done; no model was changed."""


@dataclass(eq=False)
class _Slot:
    """A model of the dispatch: its name, and whose it is now."""

    name: str
    current: str = ""
    guests: set[str] = field(default_factory=set)
    warm: bool = False


@dataclass(eq=False)
class _ClientModel:
    """A client's model."""

    adapter: Adapter
    slot: _Slot
    pending: bool = False
    """Whether it has gradients that no step has used."""


class ServedModels:
    """All models of all clients, by their ids."""

    def __init__(self, dispatch: RankGroup, config: RunConfig, weights: Path, attempt: str) -> None:
        self._dispatch, self._config, self._weights, self._attempt = dispatch, config, weights, attempt
        self._room = MemoryCheck(dispatch, config.training.mesh.ep, config.has_servers)
        self._clients: dict[str, _ClientModel] = {}
        self._slots: dict[str, _Slot] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._clients

    @property
    def adapters(self) -> dict[str, Adapter]:
        """What each model trains, by id."""
        return {id: client.adapter for id, client in self._clients.items()}

    def pending(self, id: str) -> bool:
        """Whether a model has gradients that no step has used."""
        return self._clients[id].pending

    def create(self, id: str, adapter: Adapter) -> None:
        """Make a model, fresh; `RefusedRequest` for one that the base cannot have, or that there is no room for."""
        shares = bool(adapter.rank) and _slot_key(adapter) in self._slots
        if reason := self._room.refusal_reason(served_model(self._config, adapter), reuses_base=shares):
            raise RefusedRequest(reason)
        slot = self._slot(adapter)
        self._clients[id] = _ClientModel(adapter, slot)
        if adapter.rank:
            self._enter(slot, id, adapter.seed)
        slot.current = id
        slot.guests.add(id)

    def warm_up(self, warm_up: WarmUp) -> None:
        """Have what trains each model be compiled, once. After one is made, and before it is trained."""
        for slot in self._slots.values():
            if not slot.warm:
                warm_up.run({slot.name: SFT}, [slot.name])
                slot.warm = True

    def remove(self, id: str) -> None:
        """Forget a model; a slot that nobody needs any more is given back."""
        client = self._clients.pop(id, None)
        if client is None:
            return
        slot = client.slot
        slot.guests.discard(id)
        if slot.current == id:
            slot.current = ""
        elif slot.guests:
            self._dispatch.run_on_ranks(slot.name, guests.drop_adapter, id, needs="run_on_ranks")
        if not slot.guests:
            self._dispatch.remove_model(slot.name)
            del self._slots[slot.name]

    def run_pass(self, id: str, given: Pass) -> PassResult:
        """The answers about all data and the sum of the loss; with `backward`, its gradient is added."""
        client = self._find(id)
        slot = self._bring(id)
        rows = [_row(datum) for datum in given.data]
        _refuse_foreign_tokens(rows, self._dispatch.models[slot.name].vocabulary)
        objective, budget = TokenSum(given.loss, given.settings), self._dispatch.budget
        needs: Any = "forward_backward" if given.backward else "forward"
        outcomes = self._dispatch.run_on_ranks(
            slot.name, answer_queries, rows, objective, budget, given.backward, needs=needs
        )
        client.pending = client.pending or given.backward
        answers: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(rows)
        for outcome in outcomes:
            for index, logprobs in zip(outcome.rows, outcome.logprobs, strict=True):
                answers[index] = given.data[index].answer(logprobs)
        metrics = {"loss:sum": float(sum(outcome.loss for outcome in outcomes))}
        return PassResult([each.tobytes() for each in answers], [datum.width for datum in given.data], metrics)

    def step(self, id: str, given: Step) -> StepResult:
        """One optimizer step on the gradients that were added up; one that is not finite changes nothing but them."""
        client = self._find(id)
        if not client.pending:
            raise RefusedRequest("optim_step without gradients: forward_backward comes first")
        slot = self._bring(id)
        settings = AdamSettings(given.lr, given.beta1, given.beta2, given.eps, given.weight_decay, given.clip_norm)
        step = self._dispatch.run_on_ranks(slot.name, ModelWorker.optim_step, settings, needs="optim_step")[0]
        client.pending = False
        norm = {"grad_norm:mean": step.grad_norm, "lr:mean": step.lr, "skipped:sum": float(step.skipped)}
        return StepResult({name: value for name, value in norm.items() if np.isfinite(value)})

    def save(self, id: str, folder: str, *, sampler: bool) -> SaveResult:
        """Write a model below the folder of weights; raises `CheckpointError` where the disk does not take it."""
        slot, place = self._bring_known(id), self._weights / folder
        if sampler:
            part = atomic_dirs.unfinished(place, self._attempt)
            part.parent.mkdir(parents=True, exist_ok=True)
            self._dispatch.save_hf_model(slot.name, part)
            atomic_dirs.replace(place, part)
            return SaveResult(sum(file.stat().st_size for file in place.rglob("*") if file.is_file()))
        place.mkdir(parents=True, exist_ok=True)
        needs: Any = {slot.name: "save_checkpoint"}
        size = self._dispatch.run_on_all_models(_save, slot.name, str(place), self._attempt, needs=needs)[0]
        return SaveResult(size)

    def look_for(self, folder: str) -> None:
        """`CheckpointError` unless there is what `save` wrote, every byte of it; no model is touched."""
        if (wrong := self._dispatch.run_on_all_models(_verify, str(self._weights / folder))[0]) is not None:
            raise wrong

    def load(self, id: str, folder: str, *, optimizer: bool) -> None:
        """Take what `save` wrote and `look_for` finds; without `optimizer`, with a fresh one. If it is damaged, the
        model is gone."""
        slot, place = self._bring_known(id), self._weights / folder
        needs: Any = {slot.name: "load_checkpoint"}
        damage = self._dispatch.run_on_all_models(_load, slot.name, str(place), optimizer, needs=needs)[0]
        if damage is not None:
            self.remove(id)
            raise damage
        self._clients[id].pending = False

    def run_on_model(self, id: str, function: Any, *args: Any, needs: Any) -> list[Any]:
        """Run `function(site, name, *args)` on every rank, with the model in its place under that name."""
        slot = self._bring_known(id)
        return self._dispatch.run_on_all_models(function, slot.name, *args, needs={slot.name: needs})

    def place(self, id: str) -> tuple[str, str | None]:
        """The model of the dispatch that an adapter belongs to, and the key under which it is parked there; None: it is
        the one that is on the model."""
        slot = self._find(id).slot
        return slot.name, None if slot.current == id else id

    def _find(self, id: str) -> _ClientModel:
        if id not in self._clients:
            raise RefusedRequest(f"there is no model {id}: making it failed, or it was unloaded")
        return self._clients[id]

    def _bring_known(self, id: str) -> _Slot:
        self._find(id)
        return self._bring(id)

    def _bring(self, id: str) -> _Slot:
        """Have the model be in its place."""
        slot = self._clients[id].slot
        if slot.current != id:
            self._dispatch.run_on_ranks(slot.name, swap_adapters, slot.current, id, None)
            slot.current = id
        return slot

    def _enter(self, slot: _Slot, id: str, seed: int) -> None:
        self._dispatch.run_on_ranks(slot.name, swap_adapters, slot.current, id, seed)

    def _slot(self, adapter: Adapter) -> _Slot:
        """The place of a new model; made if there is none."""
        name = _slot_key(adapter) if adapter.rank else self._free_name()
        if name not in self._slots:
            spec = self._spec(adapter)
            self._dispatch.init_model(name, spec)
            self._slots[name] = _Slot(name)
        return self._slots[name]

    def _free_name(self) -> str:
        """Names of whole models are used again: each costs process groups, which stay."""
        number = 0
        while f"whole-{number}" in self._slots:
            number += 1
        return f"whole-{number}"

    def _spec(self, adapter: Adapter) -> ModelSpec:
        training = self._config.training
        return ModelSpec(
            kind="policy",
            model=served_model(self._config, adapter),
            optim=OPTIM,
            seed=self._config.seed,
            activation_checkpointing=training.activation_checkpointing,
            compile=training.compile,
            reshard=training.reshard_after_forward,
            ep=training.mesh.ep,
        )


def served_model(config: RunConfig, adapter: Adapter) -> ModelConfig:
    """The base with such an adapter, in the form of the config's model."""
    targets = (ATTENTION_LAYERS if adapter.attention else ()) + (MLP_LAYERS if adapter.mlp else ())
    lora = LoraConfig(rank=adapter.rank, alpha=config.serve.alpha, targets=targets) if adapter.rank else LoraConfig()
    base = {"path": config.serve.bases[adapter.base], "init": "pretrained"} if adapter.base else {}
    return config.model.model_copy(update={"lora": lora, **base})


def swap_adapters(worker: ModelWorker, leaving: str, coming: str, seed: int | None) -> None:
    """On every rank: one adapter for another; with a seed, a fresh one comes."""
    if leaving:
        guests.swap_out(worker, leaving)
    if seed is None:
        guests.swap_in(worker, coming)
    else:
        guests.init_adapter(worker, seed)


def _slot_key(adapter: Adapter) -> str:
    layers = ("-attention" if adapter.attention else "") + ("-mlp" if adapter.mlp else "")
    return f"{adapter.base} rank-{adapter.rank}{layers}".strip()


def _row(datum: Datum) -> QueryRow:
    columns = {name: np.frombuffer(values, np.float32) for name, values in datum.columns.items()}
    at, targets = np.frombuffer(datum.at, np.int64), np.frombuffer(datum.targets, np.int32)
    return QueryRow(np.frombuffer(datum.tokens, np.int32), at, targets, columns)


def _refuse_foreign_tokens(rows: Sequence[QueryRow], vocabulary: int) -> None:
    for index, row in enumerate(rows):
        for name, tokens in (("model_input", row.tokens), ("target_tokens", row.targets)):
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary:
                found = f"{tokens.min()} … {tokens.max()}"
                raise RefusedRequest(f"datum {index}: {name} holds {found}; the model knows 0 … {vocabulary - 1}")


def _save(site: RankState, name: str, place: str, attempt: str) -> int:
    """On every rank."""
    checkpoint = save(
        place, attempt, TrainerState(job="serve", step=0), site.worker(name).state(), group=site.background
    )
    return sum(record.size for record in checkpoint.manifest.files.values())


def _verify(site: RankState, place: str) -> CheckpointError | None:
    """On every rank, of which the first looks."""
    if site.rank:
        return None
    checkpoint = next(iter(complete_checkpoints(place)), None)
    if checkpoint is None:
        return CheckpointError(f"{place} holds no whole checkpoint")
    with heartbeat.busy_with(f"reading {place}", site.patience.checkpoint):
        try:
            checkpoint.verify()
        except CheckpointError as error:
            return error
    return None


def _load(site: RankState, name: str, place: str, optimizer: bool) -> DamagedCheckpointError | None:
    """On every rank, which all find the same. Damage is returned: an error raised on a rank ends the trainer."""
    worker = site.worker(name)
    checkpoint = next(iter(complete_checkpoints(place)))
    worker.restart_optimizer()
    state = worker.state()
    try:
        load_shards(checkpoint, state if optimizer else {"model": state["model"]}, group=site.background)
    except DamagedCheckpointError as damage:
        return damage
    worker.load_state(state)
    return None
