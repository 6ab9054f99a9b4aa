"""The logger of custom models."""

import logging

LoggerName = "mlserver"


def get_logger() -> logging.Logger:
    """Return the logger `mlserver`, whose records go to the log of the server."""
    return logging.getLogger(LoggerName)


logger = get_logger()
