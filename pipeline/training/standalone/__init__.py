"""Jobs that stand alone: a file says what to train on which packed rows, without a run around it.

| module | owns |
|---|---|
| `execute` | one job, or a folder of them, from the file to the announcement |
| `algorithms` | SFT and RL on packed rows |
| `packed` | the rows as memory-mapped files |
| `state` | commits of a job, and what it goes on from |
| `queue`, `log` | which job is next; what is told of it |
| `stop` | how an execution is told to end early |
"""
