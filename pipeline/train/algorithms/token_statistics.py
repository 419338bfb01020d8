"""From what a loss watched of each token to sums.

Owns which quantities are summed, squared, maximised and minimised, on the device and in one go. Promises float64 sums,
so that it does not matter how a batch was cut; and that of no tokens nothing is measured but the loss, which is 0.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

SQUARED = ("ratio", "advantage", "return", "error")
MAXIMISED = ("ratio", "log_ratio", "mismatch")
MINIMISED = ("ratio",)


def statistic_sums(loss: Tensor, watched: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`loss` and, for every quantity `[N]`, `NAME` (its sum) and `NAME_squared`, `NAME_max`, `NAME_min` where the
    tables above ask for them: detached scalars."""
    sums = {"loss": loss.detach().double()}
    live = {name: values_N for name, values_N in watched.items() if values_N.numel()}
    if not live:
        return sums
    with torch.no_grad():
        table_MN = torch.stack([values_N.double() for values_N in live.values()])
        rows = dict(zip(live, table_MN, strict=True))
        sums |= dict(zip(live, table_MN.sum(1), strict=True))
        sums |= {f"{name}_squared": rows[name].square().sum() for name in SQUARED if name in rows}
        sums |= {f"{name}_max": rows[name].max() for name in MAXIMISED if name in rows}
        sums |= {f"{name}_min": rows[name].min() for name in MINIMISED if name in rows}
    return sums
