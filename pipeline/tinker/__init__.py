"""The Tinker API: what clients of the public SDK see, apart from the trainer that does the work.

| module | owns |
|---|---|
| `gateway_process` | the gateway as a process |
| `gateway`, `routes` | the clients' requests, and the answers |
| `trainer_routes` | the routes of the trainer |
| `service_state`, `model_requests` | sessions, models and their requests, and how they change |
| `restore` | the same from the store, at the gateway's start |
| `checkpoint_catalog` | checkpoints and sampling clients |
| `retention`, `garbage` | how long unused state is kept; its deletion |
| `sampling_limits` | what a client may ask of a sample |
| `sample_queue`, `fair_queue` | requests to sample; which of them is sent to the servers next |
| `sampler`, `generate_requests` | requests to the servers; their form, and that of the answers |
| `server_pools` | which servers sample from what |
| `server_weights` | which weights each server has, and how it gets others |
| `target_logprobs` | log-probabilities of tokens that a client names at positions of a prompt |
| `completions`, `forwarding` | OpenAI's requests and answers; how they are passed on to the servers |
| `work_schedule` | what the trainer works on next |
| `request_queue`, `turns` | the order of a model's requests; whose turn it is |
| `heartbeats` | which sessions are silent |
| `tinker_wire`, `json_limits` | protobuf to records, and back; how many values a body may have |
| `durable_store`, `byte_lru` | what is on disk, and what of it is in memory too |
| `tinker_paths` | ids, `tinker://` paths and the folders behind them |
| `usage_meter` | the usage of each key |
| `api_keys` | API keys and limits |
| `tinker_records`, `entities`, `gateway_settings` | messages, stored records, settings of the process |
| `api_errors` | errors that a client receives |

The gateway is a separate process, which continues without a trainer: it accepts requests, and clients wait.
See docs/tinker.md and decision 0021."""
