"""What holds for every test: a machine that is busy makes no property false."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
