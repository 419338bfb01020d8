"""Clients' models on the dispatch.

Owns the mapping of clients' models to models of the dispatch. Adapters of one base and shape take turns on one
copy of the base (`pipeline.train.model.adapter_swap`); a whole model has a separate copy. Promises that a client's
mistake raises `RefusedRequest` before any operation on the ranks, so every model stays unchanged; and that the results
of one model do not depend on requests to others. Must not know requests' numbers, checkpoints or the gateway.

After any other error the gradients or parameters are undefined, and the trainer restarts from a checkpoint.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.algorithms.summed_losses import TokenSum
from pipeline.checkpoints import TrainerState, complete_checkpoints
from pipeline.checkpoints.sharded_state import load_shards, save
from pipeline.config import LoraConfig, ModelConfig, OptimConfig, RunConfig
from pipeline.config.tinker_keys import ATTENTION_LAYERS, MLP_LAYERS
from pipeline.errors import CheckpointError, DamagedCheckpointError, RollcallError
from pipeline.tinker.tinker_records import Adapter, Datum, Pass, PassResult, SaveResult, Step, StepResult
from pipeline.train.batching.logprob_queries import QueryRow
from pipeline.train.controller.rank_group import RankGroup
from pipeline.train.controller.rank_process import RankState
from pipeline.train.loop.compile_warmup import WarmUp
from pipeline.train.loss_specs import SFT
from pipeline.train.model import adapter_swap
from pipeline.train.model.model_worker import ModelWorker
from pipeline.train.model.optimizer import AdamSettings
from pipeline.train.model.token_queries import answer_queries
from pipeline.train.service.memory_check import MemoryCheck
from pipeline.train.worker_spec import FIRST_SCALE_OF_SUMS, ModelSpec
from pipeline.utils import atomic_dirs, heartbeat

log = logging.getLogger(__name__)
OPTIM = OptimConfig(lr=1e-4)
"""The initial settings of an optimizer; every step has its settings in its request."""


class RefusedRequest(RollcallError):
    """A request that cannot be executed; no model was changed."""


@dataclass(eq=False)
class _Slot:
    """A model of the dispatch, with the id of its current client model, and the ids of all that use it."""

    name: str
    current: str = ""
    users: set[str] = field(default_factory=set)
    warm: bool = False


@dataclass(eq=False)
class _ClientModel:
    """A client's model."""

    adapter: Adapter
    slot: _Slot
    pending: bool = False
    """Whether the model has gradients that no step has used."""


class ServedModels:
    """All models of all clients, by their ids."""

    def __init__(self, dispatch: RankGroup, config: RunConfig, weights: Path, attempt: str) -> None:
        self._dispatch, self._config, self._weights, self._attempt = dispatch, config, weights, attempt
        self._memory = MemoryCheck(dispatch, config.training.mesh.ep, config.has_servers)
        self._clients: dict[str, _ClientModel] = {}
        self._slots: dict[str, _Slot] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._clients

    @property
    def adapters(self) -> dict[str, Adapter]:
        """The adapter of each model, by id; of rank 0 for a whole model."""
        return {id: client.adapter for id, client in self._clients.items()}

    def pending(self, id: str) -> bool:
        """Whether a model has gradients that no step has used."""
        return self._clients[id].pending

    def create(self, id: str, adapter: Adapter) -> None:
        """Create a new model; `RefusedRequest` for one that the base does not support, or that exceeds the memory."""
        reuses_base = bool(adapter.rank) and _slot_key(adapter) in self._slots
        if reason := self._memory.refusal_reason(served_model(self._config, adapter), reuses_base=reuses_base):
            raise RefusedRequest(reason)
        slot = self._slot(adapter)
        self._clients[id] = _ClientModel(adapter, slot)
        if adapter.rank:
            self._enter(slot, id, adapter.seed)
        slot.current = id
        slot.users.add(id)

    def warm_up(self, warm_up: WarmUp) -> None:
        """Compile each model's passes once; called after a model's creation, before its first request."""
        for slot in self._slots.values():
            if not slot.warm:
                warm_up.run({slot.name: SFT}, [slot.name])
                slot.warm = True

    def remove(self, id: str) -> None:
        """Remove a model, and its slot if no other model uses it."""
        client = self._clients.pop(id, None)
        if client is None:
            return
        slot = client.slot
        slot.users.discard(id)
        if slot.current == id:
            slot.current = ""  # the next adapter overwrites this one
        elif slot.users:
            self._dispatch.run_on_ranks(slot.name, adapter_swap.drop_adapter, id, needs="run_on_ranks")
        if not slot.users:
            self._dispatch.remove_model(slot.name)
            del self._slots[slot.name]

    def run_pass(self, id: str, request: Pass) -> PassResult:
        """The log-probabilities of all data and the sum of the loss; with `backward`, its gradient is accumulated."""
        client = self._find(id)
        slot = self._activate(id)
        rows = [_row(datum) for datum in request.data]
        _refuse_foreign_tokens(rows, self._dispatch.models[slot.name].vocabulary)
        objective, budget = TokenSum(request.loss, request.settings), self._dispatch.budget
        needs: Any = "forward_backward" if request.backward else "forward"
        outcomes = self._dispatch.run_on_ranks(
            slot.name, answer_queries, rows, objective, budget, request.backward, needs=needs
        )
        client.pending = client.pending or request.backward
        # Each rank returns the rows of its micro-batches; `outcome.rows` are their indices in the request.
        answers: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(rows)
        for outcome in outcomes:
            for index, logprobs in zip(outcome.rows, outcome.logprobs, strict=True):
                answers[index] = request.data[index].answer(logprobs)
        metrics = {"loss:sum": float(sum(outcome.loss for outcome in outcomes))}
        return PassResult([answer.tobytes() for answer in answers], [datum.width for datum in request.data], metrics)

    def step(self, id: str, request: Step) -> StepResult:
        """One optimizer step on the accumulated gradients. If they are not finite, they are dropped, and nothing else
        changes."""
        client = self._find(id)
        if not client.pending:
            raise RefusedRequest("optim_step without gradients: forward_backward comes first")
        slot = self._activate(id)
        settings = AdamSettings(
            request.lr, request.beta1, request.beta2, request.eps, request.weight_decay, request.clip_norm
        )
        step = self._dispatch.run_on_ranks(slot.name, ModelWorker.optim_step, settings, needs="optim_step")[0]
        client.pending = False
        norm = {"grad_norm:mean": step.grad_norm, "lr:mean": step.lr, "skipped:sum": float(step.skipped)}
        return StepResult({name: value for name, value in norm.items() if np.isfinite(value)})

    def save(self, id: str, folder: str, *, sampler: bool) -> SaveResult:
        """Write a model below the folder of weights, for servers (`sampler`) or as a checkpoint; `CheckpointError` if
        the disk refuses it."""
        slot, target = self._activate_known(id), self._weights / folder
        if sampler:
            part = atomic_dirs.unfinished(target, self._attempt)
            part.parent.mkdir(parents=True, exist_ok=True)
            self._dispatch.save_hf_model(slot.name, part)
            atomic_dirs.replace(target, part)
            return SaveResult(sum(file.stat().st_size for file in target.rglob("*") if file.is_file()))
        target.mkdir(parents=True, exist_ok=True)
        needs: Any = {slot.name: "save_checkpoint"}
        size = self._dispatch.run_on_all_models(_save, slot.name, str(target), self._attempt, needs=needs)[0]
        return SaveResult(size)

    def verify_saved(self, folder: str) -> None:
        """Raise `CheckpointError` unless the folder has a complete, undamaged checkpoint; no model changes."""
        if (error := self._dispatch.run_on_all_models(_verify, str(self._weights / folder))[0]) is not None:
            raise error

    def load(self, id: str, folder: str, *, optimizer: bool) -> None:
        """Load a checkpoint that passed `verify_saved`; without `optimizer`, with a new optimizer. If it is damaged,
        the model is removed."""
        slot, source = self._activate_known(id), self._weights / folder
        needs: Any = {slot.name: "load_checkpoint"}
        damage = self._dispatch.run_on_all_models(_load, slot.name, str(source), optimizer, needs=needs)[0]
        if damage is not None:
            self.remove(id)
            raise damage
        self._clients[id].pending = False

    def run_on_model(self, id: str, function: Any, *args: Any, needs: Any) -> list[Any]:
        """Run `function(site, name, *args)` on every rank, with the client's model active under that name."""
        slot = self._activate_known(id)
        return self._dispatch.run_on_all_models(function, slot.name, *args, needs={slot.name: needs})

    def location(self, id: str) -> tuple[str, str | None]:
        """The name of an adapter's model on the dispatch, and its key among the swapped-out adapters there; None: the
        adapter is active."""
        slot = self._find(id).slot
        return slot.name, None if slot.current == id else id

    def _find(self, id: str) -> _ClientModel:
        if id not in self._clients:
            raise RefusedRequest(f"there is no model {id}: its creation failed, or it was unloaded")
        return self._clients[id]

    def _activate_known(self, id: str) -> _Slot:
        self._find(id)
        return self._activate(id)

    def _activate(self, id: str) -> _Slot:
        """Make a client's model the current one of its slot."""
        slot = self._clients[id].slot
        if slot.current != id:
            self._dispatch.run_on_ranks(slot.name, swap_adapters, slot.current, id, None)
            slot.current = id
        return slot

    def _enter(self, slot: _Slot, id: str, seed: int) -> None:
        self._dispatch.run_on_ranks(slot.name, swap_adapters, slot.current, id, seed)

    def _slot(self, adapter: Adapter) -> _Slot:
        """The slot of a new model; created if there is none."""
        name = _slot_key(adapter) if adapter.rank else self._free_name()
        if name not in self._slots:
            spec = self._spec(adapter)
            self._dispatch.init_model(name, spec)
            self._slots[name] = _Slot(name)
        return self._slots[name]

    def _free_name(self) -> str:
        """The first free name of a whole model."""
        # Names are reused, since each new one creates process groups, which are never destroyed.
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
            loss_scale=FIRST_SCALE_OF_SUMS,  # the losses of clients are sums over tokens
        )


def served_model(config: RunConfig, adapter: Adapter) -> ModelConfig:
    """The config's model on the adapter's base, with a client's adapter; a whole model for rank 0."""
    targets = (ATTENTION_LAYERS if adapter.attention else ()) + (MLP_LAYERS if adapter.mlp else ())
    lora = LoraConfig(rank=adapter.rank, alpha=config.serve.alpha, targets=targets) if adapter.rank else LoraConfig()
    base = {"path": config.serve.bases[adapter.base], "init": "pretrained"} if adapter.base else {}
    return config.model.model_copy(update={"lora": lora, **base})


def swap_adapters(worker: ModelWorker, leaving: str, coming: str, seed: int | None) -> None:
    """Replace the active adapter of a rank's model by another; with a seed, by a new one. Runs on every rank."""
    if leaving:
        adapter_swap.swap_out(worker, leaving)
    if seed is None:
        adapter_swap.swap_in(worker, coming)
    else:
        adapter_swap.init_adapter(worker, seed)


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
                ids = f"{tokens.min()} … {tokens.max()}"
                raise RefusedRequest(f"datum {index}: {name} has token ids {ids}; expected 0 … {vocabulary - 1}")


def _save(site: RankState, name: str, folder: str, attempt: str) -> int:
    """Save a model and its optimizer, and return the size in bytes; runs on every rank."""
    checkpoint = save(
        folder, attempt, TrainerState(job="serve", step=0), site.worker(name).state(), group=site.background
    )
    return sum(record.size for record in checkpoint.manifest.files.values())


def _verify(site: RankState, folder: str) -> CheckpointError | None:
    """The error of a missing or damaged checkpoint, or None; runs on every rank, and only rank 0 reads."""
    if site.rank:
        return None
    checkpoint = next(iter(complete_checkpoints(folder)), None)
    if checkpoint is None:
        return CheckpointError(f"{folder} holds no whole checkpoint")
    with heartbeat.busy_with(f"reading {folder}", site.patience.checkpoint):
        try:
            checkpoint.verify()
        except CheckpointError as error:
            return error
    return None


def _load(site: RankState, name: str, folder: str, optimizer: bool) -> DamagedCheckpointError | None:
    """Load a model; runs on every rank, with the same result on all. Damage is returned, not raised, since an error on
    a rank ends the trainer."""
    worker = site.worker(name)
    checkpoint = next(iter(complete_checkpoints(folder)))
    worker.restart_optimizer()
    state = worker.state()
    try:
        load_shards(checkpoint, state if optimizer else {"model": state["model"]}, group=site.background)
    except DamagedCheckpointError as damage:
        return damage
    worker.load_state(state)
    return None
