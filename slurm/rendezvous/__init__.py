"""The rendezvous of an attempt's ranks: node records, one leader, one assignment ("world").

| module | owns |
|---|---|
| `rank_meeting` | the rendezvous, from node records to one world |
| `election` | the election of a leader, as a state machine |
| `membership` | the node records, and their verification by a leader |
| `probe_server` | the proof that an address reaches a rank, and questions of agents to each other |
"""
