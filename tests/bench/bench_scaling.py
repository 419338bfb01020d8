"""Where to divide: each micro-batch's loss before its backward pass, or the accumulated gradients at the end.

    python -m tests.bench.bench_scaling [--rows 32] [--micro-batches 8] [--seeds 3]

The global loss is the mean over all counted tokens of a batch. Three ways to its gradient, micro-batch by micro-batch:

- *loss × weight*: each loss is the sum over its tokens, times the weight 1/N that a token has in the global batch;
- *mean, then ÷ M*: each loss is the mean over its own tokens, and the gradients are divided by the M micro-batches;
- *sum, then ÷ N*: each loss is the sum over its tokens, and the gradients are divided by the N tokens.

Prints, for micro-batches of ragged and of equal size and for fp32 and bf16, how far each is from the float64 gradient
of the whole batch (relative L2 distance), and how large the accumulators grow before they are divided: their norm over
the gradient's, and their largest entry. Medians over the seeds; one process, some seconds.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from pipeline.algorithms.loss_tokens import LossTokens
from pipeline.config import LossConfig
from pipeline.train.total_loss import total
from tests.bench.tables import markdown
from tests.support.models.tiny import tiny_config
from tests.support.oracle.arithmetic import Shape, predictions

SHAPE = Shape(layers=2, heads=2, groups=1, size=32)
VOCABULARY, SHORTEST, LONGEST = 256, 4, 256
LOSS = LossConfig(name="reinforce")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Sample:
    """A row: int64[T] tokens, all but the first counted, and its advantage."""

    tokens_T: Tensor
    advantage: float

    @property
    def counted(self) -> int:
        return len(self.tokens_T) - 1


MicroBatch = list[Sample]


@dataclass(frozen=True)
class Way:
    """The weight of a token in the loss of a micro-batch of n tokens, out of N in M micro-batches; and the divisor of
    the gradients at the end."""

    name: str
    weight: Callable[[int, int], float]
    divisor: Callable[[int, int], int]


@dataclass(frozen=True)
class Setting:
    """What the ways are compared in: the types of parameters and activations, and of the accumulated gradients."""

    ragged: bool
    compute: torch.dtype
    accumulators: torch.dtype

    @property
    def words(self) -> tuple[str, str, str]:
        return "ragged" if self.ragged else "equal", NAMES[self.compute], NAMES[self.accumulators]


TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
SETTINGS = [Setting(ragged, *types) for ragged in (True, False) for types in TYPES]
WAYS = [
    Way("loss × weight", lambda n, whole: 1 / whole, lambda whole, count: 1),
    Way("mean, then ÷ M", lambda n, whole: 1 / n, lambda whole, count: count),
    Way("sum, then ÷ N", lambda n, whole: 1.0, lambda whole, count: whole),
]


def make_model(seed: int) -> Qwen3ForCausalLM:
    config = tiny_config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.groups,
        head_dim=SHAPE.size,
        max_position_embeddings=LONGEST,
        rope_theta=SHAPE.theta,
        initializer_range=0.1,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def make_batch(rows: int, micro_batches: int, ragged: bool) -> list[MicroBatch]:
    """Rows in the order in which they came, as many in each micro-batch; ragged lengths are log-uniform."""
    low, high = torch.tensor([float(SHORTEST), float(LONGEST)]).log().tolist()
    lengths = (torch.rand(rows) * (high - low) + low).exp().long() if ragged else torch.full((rows,), LONGEST // 4)
    made = [Sample(torch.randint(VOCABULARY, (int(length),)), torch.randn(()).item()) for length in lengths]
    each = rows // micro_batches
    return [made[start : start + each] for start in range(0, each * micro_batches, each)]


def loss_of(samples: MicroBatch, logprobs_N: Tensor, weight: float) -> Tensor:
    """The pipeline's loss of a micro-batch whose tokens all weigh `weight`."""
    advantages = [torch.full((sample.counted,), sample.advantage) for sample in samples]
    rows_N = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor([s.counted for s in samples]))
    tokens = LossTokens(
        logprobs_N=logprobs_N,
        weights_N=torch.full_like(logprobs_N, weight, requires_grad=False),
        advantages_N=torch.cat(advantages).to(logprobs_N),
        sampler_logprobs_N=logprobs_N.detach(),
        rows_N=rows_N,
        rows=len(samples),
    )
    return total(tokens, LOSS, "none")[0]


def picked(logprobs_TV: Tensor, sample: Sample) -> Tensor:
    return logprobs_TV[:-1].gather(1, sample.tokens_T[1:, None])[:, 0]


def exact_gradient(model: Qwen3ForCausalLM, batch: list[MicroBatch]) -> Tensor:
    """The gradient of the mean over all tokens, in float64 throughout, at the weights as `model` holds them."""
    parameters = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    samples = [sample for micro in batch for sample in micro]
    tables = [predictions(parameters, sample.tokens_T.tolist(), SHAPE, 1.0) for sample in samples]
    logprobs_N = torch.cat([picked(table, sample) for table, sample in zip(tables, samples, strict=True)])
    loss = loss_of(samples, logprobs_N, 1 / len(logprobs_N))
    return torch.cat([slope.flatten() for slope in torch.autograd.grad(loss, list(parameters.values()))])


def accumulated(model: Qwen3ForCausalLM, batch: list[MicroBatch], way: Way, dtype: torch.dtype) -> Tensor:
    """The accumulators after all micro-batches, not divided yet."""
    whole = sum(sample.counted for micro in batch for sample in micro)
    sums = [torch.zeros_like(p, dtype=dtype) for p in model.parameters()]
    for micro in batch:
        logits = [model(sample.tokens_T[None]).logits[0].float() for sample in micro]
        logprobs_N = torch.cat([picked(x.log_softmax(-1), sample) for x, sample in zip(logits, micro, strict=True)])
        loss = loss_of(micro, logprobs_N, way.weight(len(logprobs_N), whole))
        for summed, slope in zip(sums, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            summed += slope.to(dtype)
    return torch.cat([summed.flatten() for summed in sums])


def measure(seed: int, setting: Setting, rows: int, micro_batches: int) -> list[tuple[float, float, float]]:
    """For each way: error, norm of the accumulators over the gradient's, largest entry of the accumulators."""
    model = make_model(seed).to(setting.compute)
    batch = make_batch(rows, micro_batches, setting.ragged)
    exact = exact_gradient(model, batch)
    counted = sum(sample.counted for micro in batch for sample in micro)
    found = []
    for way in WAYS:
        sums = accumulated(model, batch, way, setting.accumulators)
        gradient = (sums / way.divisor(counted, micro_batches)).double()
        error = (gradient - exact).norm() / exact.norm()
        found.append((error.item(), (sums.double().norm() / exact.norm()).item(), sums.abs().max().item()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[tuple[object, ...]] = []
    for setting in SETTINGS:
        runs = [measure(seed, setting, chosen.rows, chosen.micro_batches) for seed in range(chosen.seeds)]
        for way, of_way in zip(WAYS, zip(*runs, strict=True), strict=True):
            error, size, largest = (statistics.median(values) for values in zip(*of_way, strict=True))
            lines.append((*setting.words, way.name, f"{error:.1e}", size, largest))
    columns = ("micro-batches", "compute", "accumulators", "way", "error", "accumulators ÷ gradient", "largest entry")
    print(markdown(columns, lines))


if __name__ == "__main__":
    main()
