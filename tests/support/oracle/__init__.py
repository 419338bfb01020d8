"""The trainer's arithmetic once more, and how the ranks' results are compared with it."""
