"""The report of an agent about its own episode: a reward, and metrics.

Owns the syntax: a number, or an object with `reward` and optionally an object `metrics` of numbers. Anything else gives
one line with the reason. Pure.

    0.5
    {"reward": 1.0, "metrics": {"steps": 7}}
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.environments.guarded_call import encodable
from pipeline.environments.reward_functions import is_finite, number

REPORT_SYNTAX = 'a number, or {"reward": number, "metrics": {name: number}}'


@dataclass(frozen=True)
class AgentReport:
    """A reward, None if the agent reports none, and metrics by name."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


def parse_report(text: str | bytes) -> AgentReport | str:
    """Parse a report from JSON text. Returns one line with the reason if the text is no report."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return f"the agent's report is no JSON: expected {REPORT_SYNTAX}"
    return report_from(value)


def report_from(value: Any) -> AgentReport | str:
    """Validate a report that is already decoded. Returns one line with the reason if the value is no report."""
    if not isinstance(value, Mapping):
        value = {"reward": value}
    if not {"reward"} <= value.keys() <= {"reward", "metrics"}:
        keys = encodable(", ".join(map(str, value))) or "none"
        return f"the agent's report has the keys {keys}: expected {REPORT_SYNTAX}"
    metrics = value.get("metrics") or {}
    if not isinstance(metrics, Mapping) or not all(map(is_finite, metrics.values())):
        return f"the metrics in the agent's report are no numbers: expected {REPORT_SYNTAX}"
    reward = None if value["reward"] is None else number("the reward in the agent's report", value["reward"])
    return (
        reward
        if isinstance(reward, str)
        else AgentReport(reward, {encodable(str(name)): float(metrics[name]) for name in metrics})
    )
