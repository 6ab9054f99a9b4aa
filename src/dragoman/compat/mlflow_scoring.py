"""MLflow's scoring protocol, the body and the response of `/invocations`, by the functions of MLflow itself."""

import importlib
import json
import logging
from typing import Any

from dragoman.core.calls import Handled
from dragoman.core.errors import InvalidInput
from dragoman.formats.json_document import cut_number_arrays
from dragoman.formats.json_scan import check_json
from dragoman.formats.policy import Policy

log = logging.getLogger("dragoman.mlflow")
INVOCATIONS = "POST /invocations"
_POLICY = Policy()
_CSV = "text/csv"
_JSON = "application/json"
_PARQUET = "application/vnd.apache.parquet"


def score(model: Any, body: bytes, content_type: str) -> Handled:
    """Return the predictions of an mlflow.pyfunc model for the body of a request, or an error as MLflow formats it.

    A body is JSON unless it is CSV. Parquet is rejected: the length of a request does not bound the table in it.
    """
    server = importlib.import_module("mlflow.pyfunc.scoring_server")
    error_class: Any = importlib.import_module("mlflow.exceptions").MlflowException
    kind, _, options = content_type.partition(";")
    kind = kind.strip().lower()
    if kind == _PARQUET:
        return Handled(f"content type '{kind}' is not supported: send {_JSON} or {_CSV}".encode(), "text/plain", 415)
    try:
        if kind != _CSV:
            kind = _JSON
            check_json(cut_number_arrays(body, _POLICY)[0], _POLICY)
        given = f"{kind};{options}" if options else kind
        result = server.invocations(body, given, model, model.metadata.get_input_schema())
        content = _with_null(result.response)
    except InvalidInput as error:
        return _error("BAD_REQUEST", error.message, 400)
    except error_class as error:  # with a traceback if the model or pandas failed, which MLflow sends to the client
        if "stack_trace" in error.json_kwargs:
            log.warning("%s\n%s", error.message, error.json_kwargs["stack_trace"])
        return _error(error.error_code, error.message, error.get_http_status_code())
    except (ValueError, RecursionError) as error:
        return _error("BAD_REQUEST", f"the request cannot be parsed: {error}", 400)
    except OverflowError as error:
        return _error("INTERNAL_ERROR", str(error), 500)
    return Handled(content.encode(), result.mimetype, result.status)


def _error(code: str, message: str, status: int) -> Handled:
    return Handled(json.dumps({"error_code": code, "message": message}).encode(), _JSON, status)


def _with_null(text: str) -> str:
    """Return JSON with null for NaN, which JSON does not have. Raises OverflowError for an infinite number."""
    if "NaN" not in text and "Infinity" not in text:
        return text
    return json.dumps(json.loads(text, parse_constant=_constant))


def _constant(name: str) -> None:
    if name != "NaN":
        raise OverflowError("a prediction is infinite, which JSON does not support: send accept: tensor/npz")
