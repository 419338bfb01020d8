"""The training loop of a run, and the asynchronous flow of an RL run with all of its gates.

The roles run concurrently. v is the trainer's version (RL steps done), w the version of the slowest server that may be
asked, P = `training.prompts_per_step`, L = `training.max_lag`. A `▷` is a gate: a place where the flow can wait.

      ISSUE QUEUE      positions in ascending order; refused and lost ones again     rollout.issue_queue
        │ ▷ concurrency   `rollout.concurrency` groups in flight, each until it is published
        │ ▷ staleness     groups issued and not yet done < P · (L + 1 − (v − w))      transport.staleness
        ▼
      ACTOR            the samples of one position, with their rewards               rollout.issue_loop
        │ ▷ servers       a request needs a server at most L versions behind the newest (rollout.server_pool)
        │ ▷ budget        `publish` waits while unacknowledged entries fill `streams.budget_bytes`
        ▼ topic `groups`
      PREPROCESSOR     advantages within the group, a teacher's log-probabilities    roles.preprocessor
        │ ▷ budget        of the next topic; one atomic operation publishes there and acknowledges here
        ▼ topic `prepared`
      STALENESS GATE   of the trainer: each group goes one of three ways             group_batches
        │   done or in the batch already, filtered, failed ──► dropped, the ledger has the reason
        │   older than L, or malformed (third time: failed) ─► topic `reissue` ──► ISSUE QUEUE
        ▼   otherwise
      BATCH            ▷ waits for P groups while episodes advance (actor_watch)     group_batches
        ▼
      UPDATE           mini-batches, optimizer steps; v becomes v + 1                policy_update
        │   the ledger marks the P positions as done, the board shows v + 1: both move the staleness gate of the actor
        ▼
      WEIGHT SYNC      ▷ previous     version v is on every server that is not evicted           weight_publisher
        │   each rank of the first replica copies its own rows of v + 1, all ranks in one operation (a snapshot);
        │   then the trainer continues with the next BATCH, unless an evaluation of v + 1 is due:
        │              ▷ evaluation   v + 1 is on the servers, then the evaluation is requested
        ▼   in the background
      TRANSFER         every rank sends its rows to every process of every server    inference.weight_sync
        │              ▷ turns        a rank sends to one process at a time, a process receives from one rank at a time
        │              ▷ deadline     `inference.update_seconds` for each server; one that fails or is late is evicted
        ▼
      SERVERS          each receives into a staging buffer while it samples, swaps the weights between two steps of its
                       engine (or pauses, for full weights over TCP), and is posted on the board as current: this moves
                       w, and so the actor's two gates. An evicted server gets no requests, and the newest version in
                       the background

`prepared` entries are acknowledged only after a checkpoint that covers them is durable, so an unsaved step can be
repeated after a crash. At half of the budget the checkpoint comes early (`GroupBatches.is_near_budget`); otherwise the
preprocessor, and then the trainer, would wait for each other. Evaluations have two more topics, `eval_requests` and
`eval_results`; the actor runs them among the rollouts.

With L = 1 the trainer updates to v + 1 while servers sample with v:

    trainer   │ update v → v + 1 │ snapshot │ update v + 1 → v + 2        │ snapshot │ …
    ranks     │                             │ send v + 1 │                           │ send v + 2 │ …
    servers   │ sample with v                       swap │ sample with v + 1                 swap │ …

With L = 0 the actor issues the groups of step v + 1 only when the servers are at v + 1: no overlap, on-policy.

| module | owns |
|---|---|
| `train_loop` | the loop that RL and SFT share |
| `rl`, `sft`, `preference` | the three algorithms of a run |
| `labeled_terms` | the loss of a batch of labeled completions (KTO), with its KL |
| `policy_update` | one RL step on a batch: advantages, mini-batches, optimizer steps |
| `group_batches` | batches of prepared groups from the stream |
| `actor_watch` | whether the actor's episodes advance while the trainer waits for them |
| `recorded_batches` | the batches of another run, for a replay |
| `batch_metrics` | metrics of a batch of groups |
| `overflow_retries` | an optimizer step, repeated where float16 gradients overflow |
| `step_metrics` | metrics of several optimizer steps as those of one step |
| `logprob_agreement` | the check that the servers compute with the trainer's weights |
| `compile_warmup` | placeholder batches, so that layers compile while servers start |
| `run_recorder`, `checkpoint_export` | checkpoints of a run; a checkpoint as a model directory |
| `weight_publisher` | weights for the servers |
| `evaluations`, `eval_loss` | accuracy on the eval split, measured by the actor; SFT's loss on it |
| `grace_period` | the warning that a step and its checkpoint exceed the grace period |
"""
