"""What a user looks at while runs live: what is the case, and how it looks in a terminal.

| module | owns |
|---|---|
| `watcher` | looking: from files, and from the scheduler where files cannot tell |
| `snapshot` | what is the case in a run |
| `display`, `ticker` | a snapshot as a panel; as lines, for a log |
| `view`, `loop` | a run followed live; look, show, pause |
| `overview`, `table` | all runs, a line each; how the lines are shown |
"""
