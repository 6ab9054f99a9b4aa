"""The exceptions of KServe's models and clients."""


class InferenceError(RuntimeError):
    """An inference failed. `status_code` is the HTTP status of the predictor's response, None without one."""

    def __init__(self, reason: str, status: str | None = None, debug_details: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.status, self.debug_details = reason, status, debug_details
        self.status_code: int | None = None

    def __str__(self) -> str:
        return self.reason if self.status is None else f"[{self.status}] {self.reason}"


class InvalidInput(ValueError):
    """The request is invalid: HTTP status 400."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ModelMissingError(Exception):
    """The file or folder of a model was not found."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class ModelNotFound(Exception):
    """The model is unknown: HTTP status 404."""

    def __init__(self, model_name: str | None = None) -> None:
        self.reason = f"Model with name {model_name} does not exist."
        super().__init__(self.reason)


class ModelNotReady(RuntimeError):
    """The model cannot answer yet: HTTP status 503."""

    def __init__(self, model_name: str, detail: str | None = None) -> None:
        self.model_name = model_name
        self.error_msg = " ".join(filter(None, (f"Model with name {model_name} is not ready.", detail)))
        super().__init__(self.error_msg)


class NoModelReady(RuntimeError):
    """None of the models of a server is ready."""


class ServerNotReady(RuntimeError):
    """The server cannot answer yet: HTTP status 503."""

    def __init__(self, detail: str | None = None) -> None:
        self.error_msg = " ".join(filter(None, ("Server is not ready.", detail)))
        super().__init__(self.error_msg)


class ServerNotLive(RuntimeError):
    """The server does not respond: HTTP status 503."""

    def __init__(self, detail: str | None = None) -> None:
        self.error_msg = " ".join(filter(None, ("Server is not live.", detail)))
        super().__init__(self.error_msg)


class UnsupportedProtocol(Exception):
    """The protocol is unknown: HTTP status 501."""

    def __init__(self, protocol_version: str | None = None) -> None:
        self.reason = f"Unsupported protocol {protocol_version}."
        super().__init__(self.reason)
