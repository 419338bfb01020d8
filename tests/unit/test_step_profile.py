"""The summary of a trace, by hand: times in microseconds, three steps."""

from typing import Any

import pytest

from tests.gpu.step_profile import STEPS, summarize


def event(cat: str, name: str, start: float, length: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "args": args}


def step(begin: float) -> list[dict[str, Any]]:
    """100 µs: a forward phase with the head in it; one kernel of each, a copy that overlaps the second, and a wait."""
    number = int(begin)
    return [
        event("user_annotation", "phase: other", begin, 100),
        event("user_annotation", "phase: forward", begin + 10, 40),
        event("user_annotation", "phase: LM head", begin + 30, 10),
        event("cuda_runtime", "cudaLaunchKernel", begin + 15, 2, correlation=number + 1),
        event("cuda_runtime", "cudaLaunchKernelExC", begin + 35, 2, correlation=number + 2),
        event("cuda_runtime", "cudaMemcpyAsync", begin + 60, 2, correlation=number + 3),
        event("cuda_runtime", "cudaStreamSynchronize", begin + 62, 30, correlation=number + 4),
        event("kernel", "gemm<float>", begin + 20, 20, correlation=number + 1),
        event("kernel", "softmax<float>", begin + 50, 20, correlation=number + 2),
        event("gpu_memcpy", "Memcpy DtoH", begin + 65, 10, correlation=number + 3),
    ]


def test_each_kernel_is_of_the_innermost_phase_that_launched_it() -> None:
    found = summarize([each for number in range(STEPS) for each in step(1000.0 * number)])
    assert found["wall_ms"] == pytest.approx(0.1)
    assert found["gpu_busy"] == pytest.approx(0.45)
    assert (found["launches"], found["waits"], found["copy_ms"]) == pytest.approx((2, 1, 0.01))
    gpu = {name: phase["gpu_ms"] for name, phase in found["phases"].items()}
    assert gpu == pytest.approx({"forward": 0.02, "LM head": 0.02, "other": 0.01})
    host = {name: phase["host_ms"] for name, phase in found["phases"].items()}
    assert host == pytest.approx({"forward": 0.03, "LM head": 0.01, "other": 0.06})
    assert found["kernels_ms"] == pytest.approx({"gemm": 0.02, "softmax": 0.02, "Memcpy DtoH": 0.01})
