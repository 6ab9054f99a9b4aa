"""The error of calls whose engine has died."""


class EngineDeadError(Exception):
    pass
