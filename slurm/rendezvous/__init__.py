"""How the ranks of an attempt find each other: cards, one leader, one world.

| module | owns |
|---|---|
| `rank_meeting` | all ranks of an attempt, from their cards to one world |
| `election` | who leads, as a state machine |
| `membership` | the cards, and how ranks are numbered |
| `probe_server` | by which address the others reach a rank |
"""
