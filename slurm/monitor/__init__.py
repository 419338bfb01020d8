"""The state of runs for a user, and its display in a terminal.

| module | owns |
|---|---|
| `run_watcher` | reading a run's files, and the scheduler if files are inconclusive |
| `run_snapshot` | the state of a run |
| `attached_lines` | the servers of attached jobs, as lines of a snapshot |
| `status_panel`, `log_lines` | a snapshot as a panel; a snapshot as log lines |
| `live_view`, `refresh_loop` | a run's live display; its loop |
| `web_dashboard` | Trackio's dashboard of a run or of all runs, in a browser |
| `runs_overview`, `runs_table` | all runs, with a line each; the table of these lines |
"""
