"""The loggers of KServe."""

import logging

KSERVE_LOGGER_NAME = "kserve"
KSERVE_TRACE_LOGGER_NAME = "kserve.trace"
logger = logging.getLogger(KSERVE_LOGGER_NAME)
trace_logger = logging.getLogger(KSERVE_TRACE_LOGGER_NAME)


def configure_logging(log_config: object = None) -> None:
    """Do nothing but log a warning for `log_config`: the server's settings configure the log."""
    if log_config is not None:
        logger.warning("log configuration ignored: file=%s; use --log-level and --log-format", log_config)
