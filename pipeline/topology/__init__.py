"""Who does what where: the plan that a config asks for, and the assignment of its roles to ranks. Pure.

| module | owns |
|---|---|
| `plan` | the seats that a config asks for, and the words of the rendezvous |
| `assignment` | which rank gets which seat |
| `gpu_split` | how many GPUs should train and serve, from measured idle fractions |
| `gpu_memory` | what the roles need of a GPU's memory |
| `memory_fit` | the refusal of roles that a GPU cannot hold, with what would make them fit |
"""
