"""The trainer as a service: it does what clients of the API ask, in place of an algorithm.

| module | owns |
|---|---|
| `service_loop` | the loop: take work, do it, bring the result; when to commit |
| `client_models` | clients' models on the dispatch: adapters that share a base, and whole models |
| `memory_check` | whether a model can be made |
| `service_checkpoints` | all models in one commit, and back |
| `random_base` | the directory of the base model |
| `gateway_client` | the way to the front |

A request changes one model, and the requests of a model are done in the order of their numbers. So each model's state
is a pure function of its requests, and a trainer that lost its memory comes to the same bits by doing those again that
the last commit does not cover."""
