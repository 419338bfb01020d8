"""Whether the last number of a text is the right one.

Imports only the standard library: the benchmarks run this file in the Python of another framework.
"""

import re

_NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")
"""A minus sign after a digit is an operator, so the last number of `9-4` is 4."""


def is_last_number(text: str, answer: str) -> bool:
    """Whether the last number of a text is `answer`.

    >>> is_last_number("4 + 31 is 35, and 35-7 = 28.", "28"), is_last_number("28 or 29", "28")
    (True, False)
    """
    numbers = _NUMBER.findall(text)
    return bool(numbers) and float(numbers[-1]) == float(answer)
