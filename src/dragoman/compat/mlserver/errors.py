"""The errors that custom models raise; `status_code` says whose fault each is."""


class MLServerError(Exception):
    """The root of the others."""

    def __init__(self, msg: str, status_code: int = 400) -> None:
        super().__init__(msg)
        self.status_code = status_code


class InvalidModelURI(MLServerError):
    """There is no such model file."""

    def __init__(self, name: str, model_uri: str | None = None) -> None:
        super().__init__(f"Invalid URI specified for model {name}" + (f" ({model_uri})" if model_uri else ""))


class ModelNotFound(MLServerError):
    """There is no such model."""

    def __init__(self, name: str, version: str | None = None) -> None:
        super().__init__(f"Model {name}" + (f" with version {version}" if version else "") + " not found", 404)


class ModelNotReady(MLServerError):
    """The model cannot answer yet."""

    def __init__(self, name: str, version: str | None = None) -> None:
        super().__init__(f"Model {name}" + (f" with version {version}" if version else "") + " is not ready yet.")


class InferenceError(MLServerError):
    """The model could not answer."""


class ModelParametersMissing(MLServerError):
    """The settings lack `parameters`."""

    def __init__(self, model_name: str) -> None:
        super().__init__(f"Parameters missing for model {model_name}")
