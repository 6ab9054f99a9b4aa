"""Error texts that clients and tests of other servers compare, mostly by how they begin."""

from collections.abc import Sequence


def unknown_model(model: str) -> str:
    return f"Request for unknown model: '{model}' is not found"


def unknown_version(model: str, version: str) -> str:
    return f"Request for unknown model: '{model}' version {version} is not found"


def not_ready(model: str, state: str) -> str:
    """Return the text of NotReady for a model in this state.

    Any client gets it, so it never has the reason of a failed load: exception texts, paths and addresses are in the log
    and the repository index only.
    """
    hint = "; the reason is in the log and in the repository index" if state == "UNAVAILABLE" else ""
    return f"model '{model}' is not ready: {state}{hint}"


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


def missing_start(id_: int | str, model: str) -> str:
    return (
        f"inference request for sequence {id_} to model '{model}' must specify the START flag on the first request of "
        "the sequence"
    )


def missing_sequence_id(model: str) -> str:
    return f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"


def too_many_rows_of_sequence(model: str) -> str:
    return f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence batcher"


SEQUENCE_TIMEOUT = "timeout of the corresponding sequence has been expired"

LONG_SEQUENCE_ID = "string correlation ID cannot be longer than 128 characters"

TOO_MANY_CLASSES = "classification output tensor too large"


def unsupported_classes(datatype: str) -> str:
    return f"class result not available for output due to unsupported type '{datatype}'"


def wrong_input_count(model: str, least: int, most: int, got: int) -> str:
    """Return the text for a request with `got` inputs, where `least` are required and `most` allowed."""
    expected = f"{least} inputs" if least == most else f"number of inputs between {least} and {most}"
    return f"expected {expected} but got {got} inputs for model '{model}'"


def missing_inputs(model: str, counts: tuple[int, int], got: Sequence[str], missing: Sequence[str]) -> str:
    """Return the text for a request without some inputs; `counts`: how many are required and allowed."""
    names, absent = (",".join(f"'{name}'" for name in each) for each in (got, missing))
    return (
        f"{wrong_input_count(model, *counts, len(got))}. Got input(s) [{names}], but missing required input(s) "
        f"[{absent}]. Please provide all required input(s)."
    )


def reserved_header(name: str) -> str:
    return f"Header '{name}' is reserved for Triton usage and cannot be forwarded."


EMPTY_NAME = "Model name cannot be empty. Please enter a valid name to deploy."


def raw_bytes_shape(name: str, shape: Sequence[int]) -> str:
    return f"For BYTE datatype raw input '{name}', the model must have input shape [1], got {list(shape)}"


def raw_free_axes(name: str, shape: Sequence[int]) -> str:
    return (
        f"The shape of the raw input '{name}' can not be deduced because there are more than one variable-sized "
        f"dimension, got {list(shape)}"
    )


def raw_input_count(model: str, count: int) -> str:
    return f"Raw request must only have 1 input (found 1) to be deduced but got {count} inputs in '{model}' model"
