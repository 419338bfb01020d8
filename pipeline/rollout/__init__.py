"""Rollouts: from a position to a group of samples.

| module | owns |
|---|---|
| `issue_loop` | groups without end, as fast as servers and trainer allow |
| `issue_queue` | the order in which positions are issued |
| `group_rollout` | all rollouts of a position's prompt, as one group |
| `sample_rollout`, `pausable_timeout` | one rollout; the time that its task takes for itself |
| `gateway/` | the endpoint that an agent of its own calls |
| `eval_rollouts` | held-out accuracy, and that of further sets |
| `server_pool`, `server_client` | the client of all inference servers; one of them |
| `load_balancing_proxy` | one address for all of them, for other programs |
| `teacher_client` | a served model that says how likely it finds what was sampled |
| `sample_store` | samples that are kept to be read |
| `time_fractions` | fractions of time |

Promises that nothing a task or a server does ends the actor: it becomes a reason in the group.
"""
