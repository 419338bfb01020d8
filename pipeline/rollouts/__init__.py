"""Rollouts: from a position to a group of samples.

| module | owns |
|---|---|
| `generation` | groups without end, as fast as servers and trainer allow |
| `positions` | the order in which positions are issued |
| `groups` | all rollouts of a position's prompt, as one group |
| `rollout`, `own_time` | one rollout; the time that its task takes for itself |
| `gateway/` | the endpoint that an agent of its own calls |
| `evaluation` | held-out accuracy, and that of further sets |
| `client`, `server` | the client of all inference servers; one of them |
| `relay` | one address for all of them, for other programs |
| `teacher` | a served model that says how likely it finds what was sampled |
| `kept` | samples that are kept to be read |
| `meters` | fractions of time |

Promises that nothing a task or a server does ends the actor: it becomes a reason in the group.
"""
