"""Post-training of language models: what a run is, and what each of its processes does.

| room | what is in it |
|---|---|
| `observability` | the page of a run: its history, drawn; its samples, there and in the terminal |
| `roles` | one module for each kind of process: redis, trainer, inference, actor, preprocessor |
| `train` | the algorithm, the dispatch below it, the workers below that; the jobs of files |
| `tinker` | the Tinker API: the front that its clients talk to, a process apart from the trainer |
| `rollout` | requests to the servers, episodes, groups, evaluation; samples that are kept |
| `environments` | prompts and rewards, and the processes that run them |
| `algorithms` | losses as functions of tensors |
| `data` | datasets: conversations and prompts by index |
| `tracking` | wandb, in a process of its own |
| `transport` | the topics between actor, preprocessor and trainer, and the board beside them |
| `weight_sync` | the way of weights to the servers, on both sides |
| `checkpoints` | commits: written, verified, fenced, pruned |
| `pinned_memory` | host memory that GPUs read and write by themselves |
| `topology` | the plan that a config asks for, and who gets which part of it |
| `config` | the keys, their rules, the copy that a run keeps |
| `run` | where the files of a run lie, and what they say |
| `transport` | what flows from actor to trainer, and its rules: ledger, staleness, advantages |
| `utils` | files, waiting, processes, addresses, logs, heartbeats |
| `errors` | every error that a user sees |

A room imports those below it only; `.importlinter` holds it. How the data goes through them: `docs/concepts.md`.
"""
