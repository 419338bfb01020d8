"""Training: the algorithm here, and below it what knows ranks.

| module | owns |
|---|---|
| `rl`, `sft` | the two algorithms of a run |
| `policy_update` | what a step of RL does with a batch: advantages, mini-batches, optimizer steps |
| `token_advantages`, `step_metrics` | advantages of tokens; metrics of several optimizer steps as those of one step |
| `logprob_agreement` | whether the servers compute with the trainer's weights |
| `group_batches`, `conversation_rows`, `demonstrations` | where their rows come from |
| `train_loop`, `throughput` | the loop that every job runs in, and how fast it goes |
| `grace_period` | whether a step and its checkpoint fit into the time that an attempt gets to end |
| `train_jobs` | what a trainer can be asked to do |
| `compile_warmup` | rows that mean nothing, so that layers are compiled while servers start |
| `run_recorder`, `weight_publisher`, `evaluations` | checkpoints of a run, weights for the servers, held-out accuracy |
| `checkpoint_export` | a commit as a model directory |
| `eval_loss` | the loss of rows that are never trained |
| `sequences`, `worker_spec` | what is trained, with every denominator; what a model is made from |
| `packing`, `logprob_queries` | how rows are cut into micro-batches; rows that ask for log-probabilities |
| `controller/` | the controller's handle: one call is one operation on every rank |
| `model/` | one sharded model with its optimizer on one rank |
| `offline/` | the jobs of files, on packed rows |
| `service/` | what clients of the API ask, in place of an algorithm |
"""
