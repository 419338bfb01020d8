"""What every process needs of its machine: files, waiting, children, addresses, logs, heartbeats. Knows no run.

| module | owns |
|---|---|
| `waiting` | the one loop that asks again, and how pauses grow |
| `shared_files`, `atomic_dirs`, `append_log` | atomic documents; atomic directories; files of lines |
| `shared_dir` | the shared directory of an attempt |
| `private_files` | directories and files that only their owner may use |
| `fs_retry` | a disk that fails for a while |
| `subprocesses`, `exec_shielded` | children that are stopped by their id, held ports; from fork to exec |
| `listeners` | listening on held ports, and the processes that listen on a port |
| `mutual_auth`, `socket_gate` | peers that prove to know a secret; a process that lets only those through |
| `authenticated_http`, `authenticated_connector` | HTTP servers that prove themselves; aiohttp's connections to those |
| `weights_route` | how a server is asked for other weights, and which weights a request is for |
| `connection_limits`, `limited_site` | limits on connections that have proved nothing; aiohttp's |
| `heartbeat` | signs of life of a role's processes |
| `network_interfaces`, `http_errors` | interfaces and addresses; what an HTTP server says of an error |
| `backoff`, `poison_request` | servers that fail are left alone for a while; requests that they die of are given up |
| `signed_store` | messages that only the world can have written |
| `logs`, `terminal` | the roles' logging; text from outside in a terminal |
| `pinned_memory` | host memory that GPUs read and write directly |
| `value_bounds` | bounds of values in records; imports nothing, for the small processes of tasks |
| `optional_extras` | how to install an optional part of the project |
"""
