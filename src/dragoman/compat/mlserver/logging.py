"""The logger of custom models."""

import logging

LoggerName = "mlserver"


def get_logger() -> logging.Logger:
    """The logger called `mlserver`, which goes where all of the server's log goes."""
    return logging.getLogger(LoggerName)


logger = get_logger()
