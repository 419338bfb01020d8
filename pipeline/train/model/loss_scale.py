"""Dynamic loss scaling, which keeps float16 gradients from underflow.

float16 rounds numbers below 3e-8 to 0, and gradients of a mean over a batch's tokens are that small. So the loss is
multiplied by a power of two before the backward pass, and its gradients are divided by it in float32
(Micikevicius et al. 2018, arXiv 1710.03740, section 3.2). The rule is that of `torch.amp.GradScaler`, with the 400
steps of growth of verl (`ShardedGradScaler(growth_interval=400)`) and the floor of 1 of Megatron-LM: a step whose
gradients overflowed is skipped and the scale is halved (the batch is then trained again:
`pipeline.train.loop.overflow_retries`); after `GROWTH_STEPS` steps in a row that were not skipped it
is doubled. `GradScaler` itself does not fit: it takes one more pass over the gradients and one more collective
operation, and `Optimizer` has the norm over all ranks anyway, which is finite on all of them or on none.

    scale = LossScale()
    (loss * scale.value).backward()
    overflowed = scale.update(finite)
"""

from pipeline.train.worker_spec import FIRST_SCALE

GROWTH_STEPS = 400
LARGEST = 1 << 24
"""Without a bound, gradients of 0 would double the scale forever."""


class LossScale:
    """The scale of one optimizer, the same on all ranks.

    Attributes:
        value: the factor of the next loss, a power of two from 1 to `LARGEST`.
        good_steps: steps in a row without overflow at this scale.
    """

    def __init__(self, value: int = FIRST_SCALE) -> None:
        self.value, self.good_steps = value, 0

    def update(self, finite: bool) -> bool:
        """Note an optimizer step; returns whether its gradient may have overflowed because of the scale.

        At scale 1 a gradient that is not finite has another reason, and the scale stays.
        """
        if not finite:
            overflowed, self.good_steps = self.value > 1, 0
            self.value = max(1, self.value // 2)
            return overflowed
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.value, self.good_steps = min(LARGEST, 2 * self.value), 0
        return False
