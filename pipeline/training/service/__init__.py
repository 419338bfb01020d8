"""The trainer as a service: it does what clients of the API ask, in place of an algorithm.

| module | owns |
|---|---|
| `engine` | the loop: take work, do it, bring the result; when to commit |
| `models` | clients' models on the dispatch: adapters that share a base, and whole models |
| `room` | whether a model can be made |
| `commits` | all models in one commit, and back |
| `base` | the directory of the base model |
| `link` | the way to the front |

A request changes one model, and the requests of a model are done in the order of their numbers. So each model's state
is a pure function of its requests, and a trainer that lost its memory comes to the same bits by doing those again that
the last commit does not cover."""
