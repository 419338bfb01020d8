"""Imported last by the process that forks ranks: what was imported before is never garbage.

A rank collects garbage whenever it gives up a model. Without this, that takes half a second each time.
"""

import gc

gc.freeze()
