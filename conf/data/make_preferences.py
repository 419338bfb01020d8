"""Writes `sums.jsonl`: preference pairs made by a rule.

    python conf/data/make_preferences.py

The chosen answer to a sum is right, the rejected one is wrong in one digit. So a model needs no knowledge of style to
learn the preference, and its accuracy on held-out sums is measured against the truth.
"""

import json
import random
from pathlib import Path

PAIRS = 640
SEED = 1


def make_pair(rng: random.Random) -> dict[str, str]:
    """A sum of two numbers with a right and a wrong answer."""
    one, other = rng.randrange(10), rng.randrange(10)
    right = one + other
    wrong = rng.choice([number for number in range(19) if number != right])
    return {"prompt": f"{one}+{other}=", "chosen": str(right), "rejected": str(wrong)}


if __name__ == "__main__":
    rng = random.Random(SEED)
    lines = (json.dumps(make_pair(rng)) + "\n" for _ in range(PAIRS))
    Path(__file__).with_name("sums.jsonl").write_text("".join(lines))
