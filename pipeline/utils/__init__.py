"""Machine-level services of every process: files, waiting, subprocesses, addresses, logs, heartbeats.

Imports nothing of a run: no configuration, no roles, no paths of a run directory.

| module | owns |
|---|---|
| `waiting` | deadlines, the polling loop, and the growth of its pauses |
| `shared_files`, `atomic_dirs`, `append_log` | atomic documents; atomic directories; append-only line files |
| `shared_dir` | the shared directory of an attempt |
| `private_files` | directories and files that only their owner may use |
| `disk_faults`, `late_names` | injected faults of a file system, in the file operations of a process; late names |
| `packet_loss` | loss of packets at the sockets of a process |
| `fs_retry` | retries while a filesystem fails |
| `subprocesses`, `exec_shielded` | children that are stopped by their id, held ports; the step from fork to exec |
| `fork_server`, `forked_process` | programs that are forked from a process with their imports; their requester |
| `forked_call` | a function call in such a program |
| `listeners` | listening on held ports, and the processes that listen on a port |
| `mutual_auth`, `socket_gate` | mutual proof of a shared secret; a proxy process that admits only authenticated peers |
| `authenticated_http`, `authenticated_connector` | HTTP servers that prove themselves; aiohttp's connections to them |
| `weights_route` | the request for other weights, and the weights that a request names |
| `connection_limits`, `limited_site` | limits on unauthenticated connections; the same for an aiohttp site |
| `heartbeat` | heartbeats of a role's processes |
| `node_facts`, `redaction` | the state of a node for a post-mortem; removal of secrets from text |
| `network_interfaces`, `http_errors` | interfaces and addresses; the error text of an HTTP response |
| `backoff`, `poison_request` | backoff for servers that fail; abandonment of requests that crash servers |
| `signed_store` | signed values in torch's stores and object collectives |
| `logs`, `terminal` | the roles' logging; untrusted text in a terminal |
| `remote_debugger` | pdb over a Unix socket, and debugpy, for a process without a terminal |
| `pinned_memory` | host memory that GPUs read and write directly |
| `value_bounds` | bounds of values in records; imports nothing, for the small processes of tasks |
| `common_prefix` | the common prefix of two token sequences |
| `source_digest` | a digest of a part of this project's code |
| `optional_extras`, `user_commands` | the install command of an optional extra; the form of a command in hints |
"""
