"""The placement of roles: the plan that a config requires, and the assignment of its roles to ranks. Pure.

| module | owns |
|---|---|
| `plan` | the node bundles that a config requires, and the records of the rendezvous |
| `assignment` | the assignment of bundles to ranks |
| `takeover` | the assignment of a lost node's roles to a spare node |
| `gpu_split` | a faster split of GPUs between trainer and servers, from measured idle fractions |
| `gpu_memory`, `server_memory` | the GPU memory of a trainer process, and of a server |
| `memory_budget`, `sizes` | the parts of a role's memory; the sizes of a model that determine it |
| `memory_fit` | the refusal of roles that do not fit into a GPU, with a change that makes them fit |
| `memory_choice` | the keys that `training.memory=auto` chooses so that the trainer fits |
"""
