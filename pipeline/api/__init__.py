"""The Tinker API: what clients of the public SDK see, apart from the trainer that does the work.

| module | owns |
|---|---|
| `process` | the front as a process |
| `front`, `routes` | what clients ask, and what they are answered |
| `door` | the routes of the trainer |
| `registry`, `requests` | sessions, models and their requests, and how they change |
| `remembered` | the same from the store, when the front starts |
| `shelf` | checkpoints and sampling clients |
| `expiry` | how long what nobody asked for again is kept |
| `asked` | what a client may ask of a sample |
| `sampling`, `generation` | requests to the servers; their form, and that of the answers |
| `order` | the order of a model's requests |
| `wire`, `structure` | protobuf to records, and back; how many values a body may have |
| `store`, `recent` | what is on disk, and what of it is in memory too |
| `names` | ids, `tinker://` paths and the folders behind them |
| `keys` | API keys and limits |
| `records`, `facts`, `settings` | what travels, what is kept, what the process is told |
| `errors` | what a client is told |

The front is a process of its own, which goes on while the trainer is away: it takes requests, and tells clients to
wait. See docs/tinker.md and decision 0021."""
