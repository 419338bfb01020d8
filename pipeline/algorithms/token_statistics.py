"""Sums of a loss's per-token metrics, computed on the device.

Owns the list of quantities that are also squared, maximized and minimized. Sums are float64, so that they do not depend
on how the batch was split. A micro-batch without counted tokens has only `loss`, which is 0.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

SQUARED = ("ratio", "tis_weight", "advantage", "return", "error")
MAXIMISED = ("ratio", "log_ratio", "mismatch")
MINIMISED = ("ratio",)


def statistic_sums(loss: Tensor, watched: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached scalars: `loss`, and for every quantity `[N]` its sum `NAME`; `NAME_squared`, `NAME_max` and `NAME_min`
    for the names in the tables above."""
    sums = {"loss": loss.detach().double()}
    live = {name: values_N for name, values_N in watched.items() if values_N.numel()}
    if not live:
        return sums
    with torch.no_grad():
        # M quantities [N] → [M, N], so that one kernel sums all of them
        table_MN = torch.stack([values_N.double() for values_N in live.values()])
        rows = dict(zip(live, table_MN, strict=True))
        sums |= dict(zip(live, table_MN.sum(1), strict=True))
        sums |= {f"{name}_squared": rows[name].square().sum() for name in SQUARED if name in rows}
        sums |= {f"{name}_max": rows[name].max() for name in MAXIMISED if name in rows}
        sums |= {f"{name}_min": rows[name].min() for name in MINIMISED if name in rows}
    return sums
