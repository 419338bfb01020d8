"""Rollouts: from a position to a group of samples.

| module | owns |
|---|---|
| `issue_loop` | an endless loop that issues groups, bounded by servers and trainer |
| `concurrency_control`, `cache_load` | how many groups are in flight; the load of the servers' KV caches |
| `draft_acceptance` | how many drafted tokens the servers accepted |
| `issue_queue` | the order in which positions are issued |
| `prompt_order` | the prompt of each position, for a task and for a mix of tasks |
| `curriculum` | the choice of prompts by what their earlier groups solved |
| `group_rollout` | all rollouts of a position's prompt, as one group |
| `sample_rollout`, `rollout_policy` | one rollout; the policy that its task samples from |
| `pausable_timeout` | the timeout of a rollout's task, paused while the policy samples |
| `turn_timer` | the times of an episode's turns and tools |
| `episode_record`, `episode_journal` | what is recorded of episodes in flight, and its replay; the files with it |
| `agent_endpoint/` | the endpoint that an external agent calls |
| `eval_rollouts` | evaluations of the held-out prompts and of further sets |
| `server_pool`, `server_client`, `generate_wire` | the client of all servers; of one; the format of a request |
| `routed_experts` | the experts of each token in a response |
| `load_balancing_proxy` | one address for all servers, for other programs |
| `teacher_client` | log-probabilities of sampled tokens from a served teacher model |
| `sample_store` | samples that are saved for inspection and for replays |
| `recorded_groups` | the trained groups of a run, read back from its ledger and its stored samples |
| `training_rewards` | the advantages of a group's samples |
| `time_fractions` | fractions of time |

Promises that no failure of a task or a server ends the actor: the failure becomes a reason in the group.
"""
