"""Whether two mathematical expressions are equal.

Owns the reward function `pipeline.environments.math_verifier:correct`, for `reward.functions`: math-verify compares
what an answer ends with to the truth. Promises that what takes too long is no wrong answer: the library's own
time-outs, which would say so, are off, and the deadline of the call (`task.seconds`) ends it and fails the sample. Runs
in a worker process only.
"""

import logging
from typing import Any

from pipeline.errors import ConfigError
from pipeline.utils.optional_extras import pip_install

try:
    from math_verify import parse, verify
except ImportError as error:
    expected = f"math-verify installed ({error})"
    raise ConfigError("reward.functions", f"{__name__}:correct", expected, pip_install("math")) from None

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its own time-outs are off
GSM8K = "####"
"""Stands before the answer in the truths of GSM8K."""


def correct(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1 if an answer ends with an expression that equals the truth, else 0.

    Both are LaTeX or plain; what stands in `\\boxed{}` counts first. A truth with `####` is what follows it.
    `ValueError` when the truth has nothing to compare with.
    """
    truth = parse(f"${str(ground_truth).rpartition(GSM8K)[2].strip()}$", parsing_timeout=None, raise_on_error=True)
    if not truth:
        raise ValueError(f"the truth is no expression: {str(ground_truth)[:80]!r}")
    found = parse(solution_str, parsing_timeout=None, raise_on_error=False)
    return float(verify(truth, found, timeout_seconds=None, raise_on_error=False))
