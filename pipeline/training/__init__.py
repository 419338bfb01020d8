"""Training: the algorithm here, and below it what knows ranks.

| module | owns |
|---|---|
| `rl`, `sft` | the two algorithms of a run |
| `update` | what a step of RL does with a batch: advantages, mini-batches, optimizer steps |
| `credit`, `tally` | advantages of tokens; metrics of several optimizer steps as those of one step |
| `agreement` | whether the servers compute with the trainer's weights |
| `batches`, `conversations`, `demonstrations` | where their rows come from |
| `runner`, `speed` | the loop that every job runs in, and how fast it goes |
| `grace` | whether a step and its checkpoint fit into the time that an attempt gets to end |
| `jobs` | what a trainer can be asked to do |
| `warm_up` | rows that mean nothing, so that layers are compiled while servers start |
| `commits`, `publisher`, `evaluation` | checkpoints of a run, weights for the servers, held-out accuracy |
| `exported` | a commit as a model directory |
| `held_out` | the loss of rows that are never trained |
| `rows`, `spec` | what is trained, with every denominator; what a model is made from |
| `packing`, `queries` | how rows are cut into micro-batches; rows that ask for log-probabilities |
| `dispatch/` | the controller's handle: one call is one operation on every rank |
| `workers/` | one sharded model with its optimizer on one rank |
| `standalone/` | the jobs of files, on packed rows |
| `service/` | what clients of the API ask, in place of an algorithm |
"""
