"""Token sequences of a batch, and their division into micro-batches.

| module | owns |
|---|---|
| `sequences` | token sequences and batches, with every denominator of the loss |
| `token_advantages` | the advantage of each token of a batch |
| `packing` | the split of a batch into micro-batches, and their layout |
| `conversation_rows`, `demonstrations` | sequences from a dataset's conversations, and from a task's demonstrations |
| `preference_rows`, `labeled_rows` | sequences from a dataset's preference pairs; from labeled completions |
| `padding_token` | the token that a sequence classifier takes for padding |
| `logprob_queries` | sequences with queries for log-probabilities of given tokens |
"""
