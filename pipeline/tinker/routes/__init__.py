"""What clients ask, by subject.

| module | owns |
|---|---|
| `client_router` | what every route does: whose key it is, errors, how large a body may be |
| `body_fields` | numbers and texts in bodies |
| `session_routes` | sessions, heartbeats, and what the SDK asks about the server |
| `model_routes` | models: fresh ones and those from a checkpoint |
| `training_routes` | passes and steps |
| `weight_routes` | saving, loading and taking away |
| `sample_routes` | sampling |
| `openai` | OpenAI's API over the same models |
| `future_routes` | what became of a request |
| `usage_routes` | what keys used |
| `list_routes` | training runs and checkpoints |

Each subject is a class with `add(router)`. docs/tinker.md lists every route of the API with what is done here."""
