"""Whether two mathematical expressions are equal.

Owns the reward function `pipeline.environments.math_verifier:correct`, for `reward.functions`: math-verify compares
the expression at the end of an answer with the truth. Promises that a comparison which takes too long is not counted as
a wrong answer: the library's own timeouts, which would count it so, are disabled, and the deadline of the call
(`task.seconds`) ends it and fails the sample. Runs in a worker process only.
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

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its timeouts are disabled
GSM8K = "####"
"""Separates the derivation from the answer in the truths of GSM8K."""


def correct(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1 if an answer ends with an expression that equals the truth, else 0.

    Both are LaTeX or plain text; the content of `\\boxed{}` has precedence. Of a truth with `####` only the part after
    it counts. `ValueError` when the truth contains no expression.
    """
    truth = parse(f"${str(ground_truth).rpartition(GSM8K)[2].strip()}$", parsing_timeout=None, raise_on_error=True)
    if not truth:
        raise ValueError(f"the truth is no expression: {str(ground_truth)[:80]!r}")
    answer = parse(solution_str, parsing_timeout=None, raise_on_error=False)
    return float(verify(truth, answer, timeout_seconds=None, raise_on_error=False))
