"""Tracking: the processes that log a run's metrics to tracking services.

| module | owns |
|---|---|
| `metric_sinks` | the trainer's side: the start and end of each tracker's process |
| `offline_folders` | the folders of a service that logs offline, and their replacement by a new one |
| `tracker_process` | a tracker's process, which follows `metrics.jsonl` |
| `tracker_protocol` | the interface of a tracker, and the list of trackers |
| `trackers/` | one module for each tracker; its name is a value of `tracking.trackers` |

A missing, failing or hanging tracker never stops or delays training. A new tracker is a module in `trackers/` and a
file in `conf/tracking/` (docs/contributing.md).
"""
