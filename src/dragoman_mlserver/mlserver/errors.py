"""Errors that custom models raise; `status_code` is the HTTP status."""


class MLServerError(Exception):
    """Base class of the errors."""

    def __init__(self, msg: str, status_code: int = 400) -> None:
        super().__init__(msg)
        self.status_code = status_code


class InvalidModelURI(MLServerError):
    """The file of the model was not found."""

    def __init__(self, name: str, model_uri: str | None = None) -> None:
        super().__init__(f"Invalid URI specified for model {name}" + (f" ({model_uri})" if model_uri else ""))


class ModelNotFound(MLServerError):
    """The model was not found."""

    def __init__(self, name: str, version: str | None = None) -> None:
        super().__init__(f"Model {name}" + (f" with version {version}" if version else "") + " not found", 404)


class ModelNotReady(MLServerError):
    """The model is not ready."""

    def __init__(self, name: str, version: str | None = None) -> None:
        super().__init__(f"Model {name}" + (f" with version {version}" if version else "") + " is not ready yet.")


class InferenceError(MLServerError):
    """Inference failed."""


class ModelParametersMissing(MLServerError):
    """The settings lack `parameters`."""

    def __init__(self, model_name: str) -> None:
        super().__init__(f"Parameters missing for model {model_name}")
