"""Rollouts: from a position to a group of samples.

Owns the client of the inference servers (`client`), one rollout of a prompt (`rollout`), the group of all rollouts
(`groups`), the order in which positions are issued (`positions`), evaluations (`evaluation`) and the meters of the
actor (`meters`). Promises that nothing a task or a server does ends the actor: it becomes a reason in the group.
"""
