"""The training loop of a run.

| module | owns |
|---|---|
| `train_loop` | the loop that RL and SFT share |
| `rl`, `sft` | the two algorithms of a run |
| `policy_update` | one RL step on a batch: advantages, mini-batches, optimizer steps |
| `group_batches` | batches of prepared groups from the stream |
| `step_metrics` | metrics of several optimizer steps as those of one step |
| `logprob_agreement` | whether the servers compute with the trainer's weights |
| `compile_warmup` | batches without meaning, so that layers compile while servers start |
| `run_recorder`, `checkpoint_export` | checkpoints of a run; a checkpoint as a model directory |
| `weight_publisher` | weights for the servers |
| `evaluations`, `eval_loss` | accuracy on the eval split, measured by the actor; SFT's loss on it |
| `grace_period` | whether a step and its checkpoint fit into the grace period |
"""
