"""The single controller of the trainer's ranks: one call on rank 0 is one operation on every rank.

| module | owns |
|---|---|
| `lead_or_serve` | the start of a process as controller or worker |
| `rank_group` | the controller's handle, and models by name |
| `operation_runner` | the execution of one operation, and the state between two |
| `device_placement` | the parts of models that each operation needs on the device, and the moves for it |
| `batch_staging` | the sharding of rows, their transfer, and their storage on the ranks |
| `rank_operations` | the operations on a rank |
| `rank_process` | a rank's process: join the torchrun world, run operations, report failures |
| `rank_publication` | the versions of a model that each rank holds and sends to the servers |
| `step_traces`, `rank_traces` | profiles and memory snapshots of some steps, and those of one rank |
| `model_saving` | models to and from checkpoints |
| `device_release` | the release of device memory when a job is done |
"""
