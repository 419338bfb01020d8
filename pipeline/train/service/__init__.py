"""The trainer as a service: it executes the requests of the API's clients instead of an algorithm.

| module | owns |
|---|---|
| `service_loop` | the loop: take a request, execute it, return the result; the schedule of checkpoints |
| `client_models` | clients' models on the dispatch: adapters that share a base, and whole models |
| `memory_check` | the memory estimate before a model is created |
| `service_checkpoints` | all models in one checkpoint, and back |
| `random_base` | a base model with random weights |
| `gateway_client` | the connection to the gateway |

A request changes one model, and the requests of a model are executed in the order of their numbers. So each model's
state is a pure function of its requests. A restarted trainer reaches the same bits by repeating the requests that its
last checkpoint does not cover."""
