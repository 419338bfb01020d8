"""What flows from the actor to the trainer, and the pure rules of it: records, ledger, staleness, advantages.

| module | owns |
|---|---|
| `records` | what travels between roles: samples, groups, evaluations |
| `ledger` | which prompt is whose turn, and what became of it |
| `staleness` | how far generation may run ahead of training |
| `advantages` | how much better a sample is than its group |
| `bounds` | bounds of values in records, for processes that read none |
"""
