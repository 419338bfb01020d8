"""One rank: the agent, and the roles that it starts, monitors and stops.

| module | owns |
|---|---|
| `agent` | one rank, from its start to its end |
| `attached_agent` | one node of an attached job: servers that join the attempts of a run |
| `supervisor`, `role_process` | the roles of a rank: started, monitored, stopped; the state of one role |
| `recovery_policy` | which end of a role is followed by its restart in place, and how often |
| `server_losses` | the servers that are not restarted any more, and the end when too few are left |
| `node_takeover` | the replacement of a lost node by a spare one |
| `fault_injection` | the faults that a user planned, injected once each |
| `node_partition` | the connections of a node that an injected partition cuts |
| `role_failure` | the cause of a role's failure, and its record |
| `node_report` | the state of a failed attempt's node, for the post-mortem |
| `role_lifecycle` | the states of a role, and the shutdown order |
| `node_forks` | the fork server from which a node's roles start |
| `node_check`, `preflight` | the GPUs that a rank uses; its check of its node |
| `multi_process_service` | NVIDIA's Multi-Process Service for roles that share GPUs |
| `gpu_locks` | locks on the GPUs of a machine without a scheduler |
| `tmpdir` | directories for temporary files and caches of roles |
| `agent_heartbeat` | an agent's heartbeat file and the exit markers on disk |
| `neighbor_watch`, `loss_rule` | each agent monitors the next rank; when it is lost within seconds |
| `control_tree`, `control_link` | hints of new files, from agent to agent over TCP: who follows whom; the links |
| `oom` | detection of out-of-memory kills |
| `liveness` | health checks and the watchdog of a role |
| `os_processes` | the kernel's state of a process and its threads |
"""
