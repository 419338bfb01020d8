"""Jobs of files: each says what to train on which packed rows, and where the model goes.

They stand alone: they name all that they need, and a run that does them (`training.jobs`) is only their place.

| module | owns |
|---|---|
| `job_execution` | one job, or a folder of them, from the file to the announcement |
| `offline_algorithms` | SFT and RL on packed rows |
| `packed_dataset` | the rows as memory-mapped files |
| `job_resume` | commits of a job, and what it goes on from |
| `job_queue`, `job_log` | which job is next; what is told of it |
| `job_observer` | who is told how it goes on |
| `shared_visibility` | that all nodes see what a job starts from |
"""
