"""How a server is asked to load a whole model's weights, and which weights a request is for.

Shared by the servers' middleware and those who ask. A server that was started again has the weights of its start, and
so refuses what is for others: a request never gets the answer of a model that it does not name. Pure.
"""

LOAD = "/load_weights"
"""POST {"folder": path}: load the weights of a folder, in place of those that the server has."""
HEADER = "X-Rollcall-Weights"
"""Of a request that only the weights of this folder may answer; a server with other weights answers 404."""
