"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("rollcall", deadline=None)
settings.load_profile("rollcall")
