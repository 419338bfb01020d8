"""One rank: the agent, and the roles that it starts, watches and ends.

| module | owns |
|---|---|
| `agent` | one rank, from its start to its end |
| `supervisor`, `role_process` | the roles of a rank: started, watched, ended; what is known of one |
| `role_lifecycle` | the order in which roles come up and down |
| `preflight` | what a rank finds on its node |
| `gpu_locks` | which GPUs of a node are whose |
| `tmpdir` | what libraries leave in a node's folder for temporary files |
| `agent_heartbeat` | what an agent leaves on disk: that it lives, that it is down |
| `oom` | whether the kernel ended a role's process for lack of memory |
| `liveness` | whether a role is there, and whether it still lives |
| `os_processes` | what the kernel tells of a process: stopped or not, where its threads wait |
"""
