"""One rank: the agent, and the roles that it starts, watches and ends."""
