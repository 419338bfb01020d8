"""Weights from the trainer to the servers.

| module | owns |
|---|---|
| `weight_sender`, `server_sync` | every server kept at the newest policy version; the state machine of one server |
| `server_admin_client` | the HTTP routes that pause a server and change its weights |
| `weight_snapshot`, `server_shards` | a version that waits for its servers; the shard of one process, in chunks |
| `transports/` | gloo, nccl and ipc |
"""
