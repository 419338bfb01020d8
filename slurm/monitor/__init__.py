"""What a user looks at while runs live: what is the case, and how it looks in a terminal.

| module | owns |
|---|---|
| `run_watcher` | looking: from files, and from the scheduler where files cannot tell |
| `run_snapshot` | what is the case in a run |
| `status_panel`, `log_lines` | a snapshot as a panel; as lines, for a log |
| `live_view`, `refresh_loop` | a run followed live; look, show, pause |
| `runs_overview`, `runs_table` | all runs, a line each; how the lines are shown |
"""
