"""Between the algorithm and the ranks: one call of the controller is one operation on every rank.

| module | owns |
|---|---|
| `lead` | which process leads, and which serve it |
| `dispatch` | the controller's handle, and models by name |
| `control` | how a call is ordered, and what is known between two of them |
| `residency` | what each operation needs on the device, and what has to move for it |
| `staging` | how rows are cut, travel, and stay on the ranks |
| `operations` | what each rank does when it is asked |
| `ranks` | the processes' side: join the torchrun world, run operations, report failures |
| `saving` | models to and from checkpoints |
| `release` | giving everything back when a job is done |
"""
