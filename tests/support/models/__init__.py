"""Tiny models, and jobs and workers that train them."""
