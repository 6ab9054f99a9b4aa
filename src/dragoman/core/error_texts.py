"""Error texts that clients and tests of Triton compare, mostly by how they begin."""


def unknown_model(model: str) -> str:
    return f"Request for unknown model: '{model}' is not found"


def unknown_version(model: str, version: str) -> str:
    return f"Request for unknown model: '{model}' version {version} is not found"


def no_statistics(model: str) -> str:
    return f"requested model '{model}' is not available"


def no_version_statistics(model: str) -> str:
    return f"requested model version is not available for model '{model}'"


def not_in_repository(model: str) -> str:
    return f"failed to load '{model}', failed to poll from model repository"


def path_in_name(model: str) -> str:
    return f"invalid model name '{model}', model name must not contain path traversal characters"


def too_many_rows(model: str, max_rows: int) -> str:
    return f"inference request batch-size must be <= {max_rows} for '{model}'"


TOO_MANY_CLASSES = "classification output tensor too large"


def unsupported_classes(datatype: str) -> str:
    return f"class result not available for output due to unsupported type '{datatype}'"


def wrong_input_count(model: str, least: int, most: int, got: int) -> str:
    """Return the text for a request with `got` inputs, where `least` are required and `most` allowed."""
    expected = f"{least} inputs" if least == most else f"number of inputs between {least} and {most}"
    return f"expected {expected} but got {got} inputs for model '{model}'"
