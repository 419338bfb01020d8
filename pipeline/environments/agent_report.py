"""What an agent says of its own episode: a reward, and numbers about it.

Owns the form: a number, or an object with `reward` and, if wanted, an object `metrics` of numbers. Promises one line
with the reason for anything else. Pure.

    0.5
    {"reward": 1.0, "metrics": {"steps": 7}}
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from pipeline.environments.reward_functions import number

REPORT_SYNTAX = 'a number, or {"reward": number, "metrics": {name: number}}'


@dataclass(frozen=True)
class AgentReport:
    """A reward, None where nothing is said of it, and metrics by name."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def parse_report(text: str | bytes) -> AgentReport | str:
    """What a JSON text says, or why it says nothing."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return f"what the agent told is no JSON: expected {REPORT_SYNTAX}"
    return report_from(value)


def report_from(value: Any) -> AgentReport | str:
    """The same of a value."""
    if not isinstance(value, Mapping):
        value = {"reward": value}
    if not {"reward"} <= value.keys() <= {"reward", "metrics"}:
        return f"what the agent told has the keys {', '.join(map(str, value)) or 'none'}: expected {REPORT_SYNTAX}"
    metrics = value.get("metrics") or {}
    if not isinstance(metrics, Mapping) or not all(_is_number(each) for each in metrics.values()):
        return f"the metrics that the agent told are no numbers: expected {REPORT_SYNTAX}"
    reward = None if value["reward"] is None else number("the reward that the agent told", value["reward"])
    return (
        reward
        if isinstance(reward, str)
        else AgentReport(reward, {str(name): float(metrics[name]) for name in metrics})
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
