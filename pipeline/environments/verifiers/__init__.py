"""Environments of the library verifiers, in a process of their own.

Owns the built-in task `verifiers` (`task`), the process that its environments run in, with whatever interpreter they
are installed for (`process`), and what runs in that process (`bridge`, `rollcall_chat`), where neither Rollcall nor any
package of this environment can be imported.
"""
