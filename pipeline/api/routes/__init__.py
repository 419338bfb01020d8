"""What clients ask, by subject.

| module | owns |
|---|---|
| `router` | what every route does: whose key it is, errors, how large a body may be |
| `fields` | numbers and texts in bodies |
| `sessions` | sessions, heartbeats, and what the SDK asks about the server |
| `models` | models: fresh ones and those from a checkpoint |
| `training` | passes and steps |
| `weights` | saving, loading and taking away |
| `samples` | sampling |
| `futures` | what became of a request |
| `lists` | training runs and checkpoints |

Each subject is a class with `add(router)`. docs/tinker.md lists every route of the API with what is done here."""
