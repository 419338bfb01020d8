"""Weights from the trainer to the servers.

| module | owns |
|---|---|
| `weight_sender`, `server_sync` | every server kept at the newest policy version; the state machine of one server |
| `sync_round` | the servers that a version waits for |
| `server_admin_client` | the HTTP routes that pause a server and change its weights |
| `publication`, `weight_snapshot` | what takes versions of the weights; a rank's rows of one that waits for servers |
| `rank_rows`, `server_shards` | the rows that each rank sends; what a server's process needs, in chunks |
| `transfer_route` | the exchange of one rank and one process of a server |
| `rank_orders` | what rank 0 has the trainer's other ranks do |
| `relay_plan`, `relay_link` | which server forwards the weights to which; the trainer's calls for it |
| `weight_relay` | the forwarding in a server's process |
| `byte_runs` | copies of slices between two buffers, merged |
| `transports/` | gloo, nccl and ipc |
"""
