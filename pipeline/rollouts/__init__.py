"""Rollouts: from a position to a group of samples.

Owns the client of the inference servers (`client`), one of them (`server`) and one address for all of them (`relay`),
one rollout of a prompt (`rollout`) and the time that its task takes (`own_time`), the group of all rollouts (`groups`),
the groups one after the other (`generation`), the order in which positions are issued (`positions`), evaluations
(`evaluation`), the samples that are kept to be read (`kept`) and the meters of the actor (`meters`). Promises that
nothing a task or a server does ends the actor: it becomes a reason in the group.
"""
