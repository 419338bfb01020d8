"""Jobs of files: each says what to train on which packed rows, and where the model goes.

They stand alone: they name all that they need, and a run that does them (`training.jobs`) is only their place.

| module | owns |
|---|---|
| `execute` | one job, or a folder of them, from the file to the announcement |
| `algorithms` | SFT and RL on packed rows |
| `packed` | the rows as memory-mapped files |
| `state` | commits of a job, and what it goes on from |
| `queue`, `log` | which job is next; what is told of it |
| `observer` | who is told how it goes on |
| `visible` | that all nodes see what a job starts from |
"""
