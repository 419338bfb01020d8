"""The experts of each token, from vLLM servers on CPUs. `--enable-return-routed-experts` works on GPUs only.

The routers of a server report their choice (vLLM's `RoutedExpertsCapturer`). The worker adds the rows of a step to its
output, and the scheduler joins the rows of each request, since a step may compute a part of a prompt only. The response
is that of vLLM on GPUs: the experts of all tokens that were read, from `routed_experts_prompt_start` on. A request of
which some tokens were never computed, because their prefix was cached, returns none from there on; so the server runs
without a prefix cache.

With an unknown release of vLLM, the server ends at its start: a run without any record would be one without replay.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.inference.vllm.stock_functions import stock_function

SWITCH = "ROLLCALL_ROUTED_EXPERTS"
"""The environment variable of a server on CPUs that is 1 if it returns the experts of each token."""
Rows = NDArray[np.generic]
"""[tokens, layers, experts of a token]."""


class RequestRouting:
    """The rows of one request, by token.

    >>> routing = RequestRouting(start=1)
    >>> routing.note(0, np.arange(3)), routing.take(3)
    (None, array([1, 2]))
    >>> routing.note(4, np.arange(4, 5)), routing.take(5)  # token 3 is unknown, so none after it is sent
    (None, None)
    """

    def __init__(self, start: int) -> None:
        """`start`: the first token whose row is sent."""
        self._parts: list[Rows] = []
        self._count, self._sent = 0, start

    def note(self, first: int, rows: Rows) -> None:
        """Add the rows of the tokens from `first` on. Tokens that were computed again keep their first row."""
        fresh = rows[self._count - first :] if first <= self._count else rows[:0]
        self._parts.append(fresh)
        self._count += len(fresh)

    def take(self, end: int) -> Rows | None:
        """The rows up to token `end` that were not sent yet; None if there are none."""
        end = min(end, self._count)
        if end <= self._sent:
            return None
        self._parts = [np.concatenate(self._parts)]
        rows, self._sent = self._parts[0][self._sent : end], end
        return rows


class RoutingCollector:
    """The rows of all requests of a scheduler, with the methods of vLLM's `AuxOutputSchedulerConnector`."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestRouting] = {}

    def build_connector_meta(self, scheduler_output: Any, requests: Mapping[str, Any]) -> None:
        """Begin the requests of a step. Workers need no orders."""
        for name in scheduler_output.num_scheduled_tokens:
            if name not in self._requests:
                request = requests[name]
                # A request that was preempted begins again; the rows of all tokens but its newest were sent.
                sent = request.num_tokens - 1 if request.num_output_tokens else 0
                start = min(request.sampling_params.routed_experts_prompt_start, request.num_prompt_tokens)
                self._requests[name] = RequestRouting(max(start, sent))

    def note(self, step: Mapping[str, tuple[int, Rows]]) -> None:
        """Add the rows of a step, by request: the first token, and its rows."""
        for name, (first, rows) in step.items():
            if name in self._requests:  # else it was aborted while the step ran
                self._requests[name].note(first, rows)

    def take_output(self, request: Any, output: Any) -> Rows | None:
        """The rows that go with the request's new tokens; the newest token was not read yet."""
        return self._requests[request.request_id].take(request.num_tokens - 1)

    def request_finished(self, request: Any) -> None:
        """Forget a request that ended, or was preempted."""
        self._requests.pop(request.request_id, None)

    def reset(self) -> None:
        """After the prefix cache was cleared: rows stay, since tokens keep their first ones."""


def return_routed_experts(variables: Mapping[str, str] = os.environ) -> None:
    """Patch this vLLM process to return them, if the switch is on. A second call changes nothing."""
    if variables.get(SWITCH) != "1":
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    parameters, key = ("self", "scheduler_output", "model_runner_output"), "training.routing_replay"
    update_from_output = stock_function(Scheduler, "update_from_output", *parameters, by=__name__, key=key)
    if update_from_output is None:
        return
    CPUModelRunner.load_model = _capturing(CPUModelRunner.load_model)
    CPUModelRunner.execute_model = _keeping(CPUModelRunner.execute_model)
    CPUModelRunner.sample_tokens = _attaching(CPUModelRunner.sample_tokens)
    Scheduler.__init__ = _collecting(Scheduler.__init__)
    Scheduler.update_from_output = _noting(update_from_output)


def _capturing(stock: Callable[..., Any]) -> Callable[..., Any]:
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.model_executor.layers.fused_moe import routed_experts_capturer as vllm_capturer

        result = stock(self, *args, **kwargs)
        self._rollcall_capturer = vllm_capturer.RoutedExpertsCapturer(
            self.scheduler_config.max_num_batched_tokens, self.vllm_config
        )
        vllm_capturer.bind_routed_experts_capturer(self.model, self._rollcall_capturer)
        return result

    return load_model


def _keeping(stock: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, scheduler_output, *args, **kwargs)
        # The batch and its computed tokens stay those of this step until the next one.
        self._rollcall_rows = step_rows(
            self.input_batch.req_ids,
            self.input_batch.num_computed_tokens_cpu,
            scheduler_output.num_scheduled_tokens,
            self._rollcall_capturer.snapshot_routing_data(scheduler_output.total_num_scheduled_tokens).numpy(),
        )
        return output

    return execute_model


def step_rows(
    names: list[str], computed: NDArray[np.integer[Any]], scheduled: Mapping[str, int], rows: Rows
) -> dict[str, tuple[int, Rows]]:
    """By request, its first token of a step and the rows from there on. The step's `rows` are in the order of the
    batch's `names`; `computed` has the tokens of each request that were computed before."""
    result, first = {}, 0
    for name, before in zip(names, computed.tolist(), strict=False):
        count = scheduled.get(name, 0)
        if count:
            result[name] = before, rows[first : first + count]
        first += count
    return result


def _attaching(stock: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, *args, **kwargs)
        output.aux_output_connector_output = self._rollcall_rows
        return output

    return sample_tokens


def _collecting(stock: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.aux_output_connector = RoutingCollector()

    return __init__


def _noting(stock: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.aux_output_connector.note(model_runner_output.aux_output_connector_output or {})
        return stock(self, scheduler_output, model_runner_output)

    return update_from_output
