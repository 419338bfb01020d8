"""Offline training jobs: each job file specifies the training, its packed rows, and the output of the model.

A job file names everything that the job needs. A run that executes job files (`training.jobs`) only supplies the
machines.

| module | owns |
|---|---|
| `job_execution` | the execution of one job file, or of a folder of them |
| `offline_algorithms` | SFT and RL on packed rows |
| `packed_dataset` | the rows as memory-mapped files |
| `job_resume` | checkpoints of a job, and its state at the start |
| `job_queue`, `job_log` | the order of jobs; the log of one |
| `job_observer` | callbacks for the progress of jobs |
| `shared_visibility` | the wait until all nodes see the files that a job starts from |
"""
