"""Tasks in the format of Harbor: a folder with an instruction, an environment and tests.

| module | owns |
|---|---|
| `harbor_folder` | the files of a task, and whether it needs a container image |
| `harbor_task` | the built-in task `harbor`: the conversation with a shell, and the reward of the tests |
| `shell_session` | a shell in the sandbox, as this process uses it |
| `shell_guest` | the program in the sandbox that runs the commands |
"""
