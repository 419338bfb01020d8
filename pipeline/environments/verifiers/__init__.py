"""Environments of the library verifiers, in a separate process.

Owns the built-in task `verifiers` (`verifiers_task`), the process that runs its environments with the interpreter for
which they are installed (`verifiers_process`), and the code of that process (`verifiers_bridge`, `rollcall_chat`),
which can import neither Rollcall nor any package of Rollcall's environment.
"""
