"""From samples and conversations to micro-batches of token sequences.

| module | owns |
|---|---|
| `sequences` | token sequences and batches, with every denominator of the loss |
| `packing` | the cut of a batch into micro-batches, and their layout |
| `conversation_rows`, `demonstrations` | sequences from a dataset's conversations, and from a task's demonstrations |
| `logprob_queries` | sequences that ask for log-probabilities of given tokens |
"""
