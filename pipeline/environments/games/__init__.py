"""Multi-turn games of published libraries: Gymnasium, TextArena and OpenEnv.

| module | owns |
|---|---|
| `game_protocol` | the interface of one open game in text, and one step of it |
| `game_task` | prompts, episodes and demonstrations of games |
| `gymnasium_task`, `textarena_task`, `openenv_task` | the built-in tasks of these names |
| `gymnasium_game`, `textarena_game`, `openenv_game` | a game of each library in text |
| `openenv_server` | a server of OpenEnv, and the sessions with it |
| `open_games` | the games that a process has open between two turns |
| `game_process` | the process that opens games for the actor, the trainer and the launcher |

Games are opened and stepped in the task's worker processes. The actor, the trainer and the launcher never import a
library of games.
"""
