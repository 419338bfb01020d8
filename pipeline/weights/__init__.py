"""Weights from the trainer to the vLLM servers [E1–E4].

`sender` keeps every server at the trainer's newest weights, through one `link` each; `control` speaks to a server's
HTTP routes, and `wire` is how the bytes travel. `plugin`, `engine`, `adapters` and `guard` run inside vLLM, and only
they know it.
"""
