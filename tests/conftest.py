"""Property tests try the same cases in every run, so that a red run blames its own change; `make fuzz` tries new ones."""

from hypothesis import settings

settings.register_profile("same", derandomize=True)
settings.register_profile("new", derandomize=False)
settings.load_profile("same")
