"""What every process needs of its machine: files, waiting, children, addresses, logs, heartbeats. Knows no run.

| module | owns |
|---|---|
| `waiting` | the one loop that asks again, and how pauses grow |
| `files`, `folders`, `journal` | documents, replaced as a whole; directories; files of lines that grow and go back |
| `directory` | the shared directory of an attempt |
| `private` | directories and files that only their owner may use |
| `outages` | a disk that fails for a while |
| `process`, `spawn` | children that are stopped by their id, held ports; from fork to exec |
| `listeners` | listening on held ports, and the processes that listen on a port |
| `proof`, `gate` | peers that prove to know a secret; a process that lets only those through |
| `proven_http`, `connector` | HTTP servers that prove themselves; aiohttp's connections to those |
| `admission`, `limited_site` | limits on connections that have proved nothing; aiohttp's |
| `heartbeat` | signs of life of a role's processes |
| `network`, `answers` | interfaces and addresses; what an HTTP server says of an error |
| `rest`, `deaths` | servers that fail are left alone for a while; requests that they die of are given up |
| `signed` | messages that only the world can have written |
| `logs`, `terminal` | the roles' logging; text from outside in a terminal |
| `extras` | how to install an optional part of the project |
"""
