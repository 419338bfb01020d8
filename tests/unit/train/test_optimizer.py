"""The optimizer's step beside torch's AdamW and its clipping."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.config import OptimConfig
from pipeline.train.model.moment_storage import (
    block_size,
    read_moments,
    stored_tensors,
    write_moments,
    zero_moments,
)
from pipeline.train.model.optimizer import Optimizer

CONFIG = OptimConfig(lr=1e-2, weight_decay=0.1, clip_norm=0.5, warmup_steps=2)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_parameters() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in ((5, 7), (3,), (0, 4), (16, 16))]


def fill_gradients(parameters: list[Tensor], step: int, size: float = 1.0) -> None:
    draw = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = size * torch.randn(parameter.shape, generator=draw)


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_steps_are_those_of_torch_with_and_without_clipping(size: float) -> None:
    own, others = make_parameters(), make_parameters()
    optimizer = Optimizer(own, CONFIG, steps=10)
    matrices, vectors = ([p for p in others if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(CONFIG.beta1, CONFIG.beta2), eps=CONFIG.eps)
    for step in range(4):
        fill_gradients(own, step, size)
        fill_gradients(others, step, size)
        for group in adamw.param_groups:
            group["lr"] = CONFIG.lr * min(1.0, (step + 1) / 3)
        norm = torch.nn.utils.clip_grad_norm_(others, CONFIG.clip_norm)
        adamw.step()
        taken = optimizer.step()
        assert taken.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert (taken.grad_norm > CONFIG.clip_norm) == (size == 1.0)
        for mine, theirs in zip(own, others, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    assert all(p.grad is None for p in own)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    parameters = make_parameters()
    optimizer = Optimizer(parameters, CONFIG, steps=10)
    fill_gradients(parameters, 0)
    optimizer.step()
    before = [tensor.clone() for tensor in (*parameters, *optimizer.moments())]
    for wrong in (math.inf, math.nan):
        fill_gradients(parameters, 1)
        assert parameters[0].grad is not None
        parameters[0].grad[0, 0] = wrong
        assert optimizer.step().skipped
        assert all(map(torch.equal, before, (*parameters, *optimizer.moments())))
    assert optimizer.progress() == {"taken": 1, "skipped": 2}


def test_bfloat16_moments_are_rounded_after_a_step_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG.model_copy(update={"state_dtype": "bfloat16", "clip_norm": 1e9, "warmup_steps": 0})
    own, others = make_parameters(), make_parameters()
    optimizer = Optimizer(own, config, steps=10)
    monkeypatch.setattr("pipeline.train.model.optimizer.PIECE", 30)  # less than the largest matrix has
    first, second = ([torch.zeros_like(p) for p in others] for _ in range(2))
    for step in range(4):
        fill_gradients(own, step)
        fill_gradients(others, step)
        optimizer.step()
        for p, m, v in zip(others, first, second, strict=True):
            assert p.grad is not None
            m.copy_(config.beta1 * m + (1 - config.beta1) * p.grad)
            v.copy_(config.beta2 * v + (1 - config.beta2) * p.grad**2)
            unbiased = m / (1 - config.beta1 ** (step + 1)), v / (1 - config.beta2 ** (step + 1))
            decay = config.weight_decay if p.ndim > 1 else 0.0
            with torch.no_grad():
                p.copy_(p * (1 - config.lr * decay) - config.lr * unbiased[0] / (unbiased[1].sqrt() + config.eps))
            m.copy_(m.bfloat16())
            v.copy_(v.bfloat16())
    for mine, theirs in zip(own, others, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    moments = [t for t in optimizer.moments() if t.ndim]
    assert {t.dtype for t in moments} == {torch.bfloat16}
    assert sum(t.nbytes for t in moments) == 2 * sum(p.nbytes for p in own) // 2


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG.model_copy(update={"state_dtype": "bfloat16"})
    runs = []
    for piece in (1, 40, 1 << 26):
        monkeypatch.setattr("pipeline.train.model.optimizer.PIECE", piece)
        parameters = make_parameters()
        optimizer = Optimizer(parameters, config, steps=10)
        for step in range(3):
            fill_gradients(parameters, step)
            optimizer.step()
        runs.append([*parameters, *optimizer.moments()])
    assert all(map(torch.equal, runs[0], runs[2]))
    assert all(map(torch.equal, runs[1], runs[2]))


def float8(**changes: Any) -> OptimConfig:
    return CONFIG.model_copy(update={"state_dtype": "float8", **changes})


def neighbors(value: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The next numbers below and above with codes, and the nearer one. Each block of a row is divided by the power of
    two after which its largest entry is from 128 to 256. Codes have three bits after the first one, and are multiples
    of 2⁻⁹ below 2⁻⁶."""
    results = [value.clone().double() for _ in range(3)]
    for below, above, nearest in zip(*(result.reshape(-1, block) for result in results), strict=True):
        if not (largest := nearest.abs().max().item()):
            continue
        scale = 2.0 ** (math.floor(math.log2(largest)) - 7)
        for column, entry in enumerate((nearest / scale).tolist()):
            step = 2.0 ** (max(math.floor(math.log2(abs(entry))), -6) - 3) if entry else 1.0
            below[column] = math.floor(entry / step) * step * scale
            above[column] = math.ceil(entry / step) * step * scale
            nearest[column] = round(entry / step) * step * scale
    return results[0], results[1], results[2]


def test_float8_moments_are_rounded_by_block_after_a_step_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    config = float8(clip_norm=1e9, warmup_steps=0)
    shapes, blocks = ((5, 7), (2, 3, 96), (4, 514), (3, 520)), (7, 96, 514, 130)
    draw = torch.Generator().manual_seed(0)
    own = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
    optimizer = Optimizer(own, config, steps=10)
    monkeypatch.setattr("pipeline.train.model.optimizer.PIECE", 300)
    for step in range(4):
        fill_gradients(own, step)
        before = [(p.detach().clone(), p.grad, *read_moments(stored_of(optimizer, p), torch.float32)) for p in own]
        optimizer.step()
        for p, (was, gradient, m, v), block in zip(own, before, blocks, strict=True):
            assert gradient is not None
            m = config.beta1 * m + (1 - config.beta1) * gradient
            v = config.beta2 * v + (1 - config.beta2) * gradient**2
            unbiased = m / (1 - config.beta1 ** (step + 1)), v / (1 - config.beta2 ** (step + 1))
            expected = was * (1 - config.lr * config.weight_decay)
            expected -= config.lr * unbiased[0] / (unbiased[1].sqrt() + config.eps)
            torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=1e-6)
            first, second = read_moments(stored_of(optimizer, p), torch.float32)
            nearest, (below, above, _) = neighbors(m, block)[2], neighbors(v.sqrt(), block)
            assert (first - nearest).abs().max() <= 1e-6 * m.abs().max() or (
                (first - nearest) != 0
            ).float().mean() < 0.01
            root = second.sqrt().double()
            assert (((root - below).abs() < 1e-6 * root) | ((root - above).abs() < 1e-6 * root)).all()


def stored_of(optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
    return stored_tensors(optimizer.adamw.state[parameter])


def test_roots_are_rounded_up_and_down_with_the_right_mean() -> None:
    small = torch.tensor([1.4, 2.4, 5.3, 7.7, 12.6]) * 2.0**-9  # codes have fewer bits below 2⁻⁶
    root = torch.cat([torch.linspace(1.0, 255.0, 4091), small]).repeat(4096, 1).view(4096, 16, 256)
    root[..., 0] = 255.0
    state = zero_moments(root, "float8")
    draw = torch.Generator().manual_seed(0)
    write_moments([stored_tensors(state)], [root], [root.square()], torch.zeros(()), draw)
    _, second = read_moments(stored_tensors(state), torch.float32)
    rounded = second.sqrt()
    assert (rounded / root - 1)[root >= 2.0**-6].abs().max() < 0.125
    mean, expected = rounded.mean(0).flatten(), root[0].flatten()
    step = torch.exp2((expected.log2().floor() - 3).clamp(min=-9))
    # The standard deviation of one rounding is half a step at most.
    assert ((mean - expected).abs() < 5 * 0.5 * step / math.sqrt(4096)).all()
    assert (rounded.mean() / root.mean() - 1).abs() < 1e-4


def test_float8_moments_take_a_quarter_and_a_step_differs_by_some_percent() -> None:
    def trained(config: OptimConfig) -> tuple[list[Tensor], Tensor]:
        draw = torch.Generator().manual_seed(0)
        parameter = torch.randn((64, 512), generator=draw).requires_grad_()
        before, optimizer = parameter.detach().clone(), Optimizer([parameter], config, steps=10)
        for step in range(8):
            fill_gradients([parameter], step, 10.0 ** -(step % 3))
            optimizer.step()
        return optimizer.moments(), parameter.detach() - before

    (full, exact), (small, rounded) = trained(CONFIG), trained(float8())
    assert sum(t.nbytes for t in full if t.ndim) == 8 * 64 * 512
    assert sum(t.nbytes for t in small if t.ndim) == 2 * (1 + 4 / 256) * 64 * 512
    assert 0 < (rounded - exact).norm() < 0.05 * exact.norm()


def test_a_root_is_never_rounded_to_zero_so_that_no_step_explodes() -> None:
    parameter = torch.zeros(2, 64, requires_grad=True)
    optimizer = Optimizer([parameter], float8(clip_norm=1e9, warmup_steps=0, lr=1.0, weight_decay=0.0), steps=10)
    gradient = torch.full((2, 64), 1e-7)
    gradient[0, 0], gradient[1] = 1.0, 0.0
    for number in range(3):
        before = parameter.detach().clone()
        parameter.grad = gradient.clone() if number != 2 else torch.zeros_like(gradient)
        optimizer.step()
        assert (parameter - before).abs().max() <= 2.0, "an exact step is at most 1 here"
    assert not parameter[1].any(), "entries without a gradient stay as they are"


def test_a_skipped_step_keeps_float8_moments_bit_for_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    parameter = torch.randn((8, 256), generator=draw).requires_grad_()
    optimizer = Optimizer([parameter], float8(), steps=10)
    for _ in range(3):
        parameter.grad = torch.randn(parameter.shape, generator=draw) ** 5
        optimizer.step()
        before = [tensor.clone() for tensor in (parameter, *optimizer.moments())]
        parameter.grad = torch.full_like(parameter, math.inf)
        assert optimizer.step().skipped
        for old, new in zip(before, (parameter, *optimizer.moments()), strict=True):
            assert torch.equal(old.view(torch.uint8), new.detach().view(torch.uint8)) if old.ndim else old == new


@pytest.mark.parametrize(
    ("columns", "size"), [(7, 7), (96, 96), (576, 192), (4096, 256), (520, 130), (514, 514), (521, 521)]
)
def test_blocks_divide_a_row(columns: int, size: int) -> None:
    assert block_size(columns) == size


class Waits(TorchDispatchMode):
    """Counts the values that the host reads from the device, and the operations before the first of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_host_reads_one_number_after_everything_has_been_launched() -> None:
    parameters = make_parameters()
    optimizer = Optimizer(parameters, CONFIG, steps=10)
    fill_gradients(parameters, 0)
    with Waits() as waits:
        optimizer.step()
    assert waits.calls.count("_local_scalar_dense") == 1
    assert waits.calls[-1] == "_local_scalar_dense"
    assert waits.calls.count("_fused_adamw_") == 2, "one for matrices, one for vectors"
