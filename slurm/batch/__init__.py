"""One job: what is asked of the scheduler, what starts its agents, and what becomes of it after an attempt."""
