"""Environments of the library verifiers, in a process of their own.

Owns the built-in task `verifiers` (`verifiers_task`), the process that its environments run in, with the interpreter
that they are installed for (`verifiers_process`), and the code of that process (`verifiers_bridge`, `rollcall_chat`),
which can import neither Rollcall nor any package of this environment.
"""
