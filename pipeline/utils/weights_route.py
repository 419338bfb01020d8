"""The HTTP route that loads a whole model's weights, and the header that names the weights of a request.

Shared by the servers' middleware and their clients. A restarted server has its initial weights and refuses requests for
other weights, so a request never gets the answer of a model that it does not name.
"""

LOAD = "/load_weights"
"""POST {"folder": path}: replace the server's weights by those of a folder."""
HEADER = "X-Rollcall-Weights"
"""The folder of the weights that must answer the request. A server with other weights responds with status 404."""
