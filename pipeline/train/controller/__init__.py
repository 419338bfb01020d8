"""Between the algorithm and the ranks: one call of the controller is one operation on every rank.

| module | owns |
|---|---|
| `lead_or_serve` | which process leads, and which serve it |
| `rank_group` | the controller's handle, and models by name |
| `operation_runner` | how a call is ordered, and what is known between two of them |
| `device_placement` | what each operation needs on the device, and what has to move for it |
| `batch_staging` | how rows are cut, travel, and stay on the ranks |
| `rank_operations` | what each rank does when it is asked |
| `rank_process` | the processes' side: join the torchrun world, run operations, report failures |
| `model_saving` | models to and from checkpoints |
| `device_release` | giving everything back when a job is done |
"""
