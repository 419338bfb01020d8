"""How the ranks of an attempt find each other: cards, one leader, one world.

| module | owns |
|---|---|
| `meeting` | all ranks of an attempt, from their cards to one world |
| `election` | who leads, as a state machine |
| `roster` | the cards, and how ranks are numbered |
| `beacon` | by which address the others reach a rank |
"""
