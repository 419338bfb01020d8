"""Post-training of language models: what a run is, and what each of its processes does.

| room | what is in it |
|---|---|
| `observability` | the report of a run: its history as charts; its samples, there and in the terminal |
| `roles` | one module for each kind of process: redis, trainer, inference, actor, preprocessor |
| `train` | the training loop, the controller below it, the models below that; job files |
| `tinker` | the Tinker API: the gateway that its clients talk to, a process apart from the trainer |
| `rollout` | requests to the servers, episodes, groups, evaluation; stored samples |
| `environments` | prompts and rewards, and the processes that run them |
| `data` | datasets: conversations and prompts by index |
| `tracking` | metrics at tracking services such as wandb, each through a separate process |
| `transport` | topics between actor, preprocessor and trainer; sample records, ledger, staleness |
| `inference` | the engines of the servers, one folder each, and weight sync to them |
| `checkpoints` | checkpoints: written, verified, fenced, pruned |
| `topology` | the plan that a config asks for, and which rank gets which part of it |
| `config` | the keys, the checks across keys, the copy that a run keeps |
| `algorithms` | the formulas of losses and advantages, and their lists |
| `run` | the run directory: where its files lie, and what they contain |
| `utils` | files, waiting, processes, addresses, logs, heartbeats, pinned memory |
| `errors` | every error that a user sees |

A room imports those below it only; `.importlinter` checks it. How the data goes through them: `docs/concepts.md`.
"""
