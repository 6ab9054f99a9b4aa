"""Options of requests, and the error for invalid ones."""

import enum


class RequestOutputKind(enum.Enum):
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams:
    pass


class VLLMValidationError(ValueError):
    pass
