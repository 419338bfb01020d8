"""What flows from the actor to the trainer, and the pure rules of it: records, ledger, staleness, advantages."""
