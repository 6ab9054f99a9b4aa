"""CloudEvents 1.0 in V1 requests, and the events that answer them.

In binary mode the attributes of an event are headers `ce-*`, in structured mode members of a JSON object.
"""

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from dragoman.core.calls import Handled
from dragoman.core.errors import InvalidInput
from dragoman.formats import fast_json
from dragoman.formats.json_document import parse_json
from dragoman.formats.policy import Policy

_POLICY = Policy()
_PREFIX = "ce-"
_REQUIRED = ("specversion", "id", "source", "type")
_STRUCTURED = (*_REQUIRED, "time", "data")
JSON_TYPE = "application/json"
STRUCTURED_TYPE = "application/cloudevents+json"


@dataclass(frozen=True)
class CloudEvent:
    """The attributes of an event, in binary or in structured mode."""

    attributes: Mapping[str, str]
    is_binary: bool


def binary_event(headers: Mapping[str, str]) -> CloudEvent | None:
    """Return the event whose attributes are headers; None unless all that are required are there."""
    attributes = {name.removeprefix(_PREFIX): value for name, value in headers.items() if name.startswith(_PREFIX)}
    return CloudEvent(attributes, True) if all(name in attributes for name in _REQUIRED) else None


def binary_payload(event: CloudEvent, body: bytes) -> Any:
    """Return the JSON value of an event; its bytes if it is not JSON. Raises InvalidInput if it should be JSON."""
    try:
        return parse_json(body.decode().encode(), _POLICY)
    except (InvalidInput, UnicodeDecodeError) as error:
        if event.attributes.get("content-type") not in (JSON_TYPE, STRUCTURED_TYPE):
            return body
        raise InvalidInput(f"Failed to decode or parse binary json cloudevent: {error}") from error


def structured_event(value: Any) -> CloudEvent | None:
    """Return the event in a JSON object; None for any other value."""
    if not isinstance(value, dict) or not all(name in value for name in _STRUCTURED):
        return None
    return CloudEvent({name: each for name, each in value.items() if name != "data"}, False)


def event_response(event: CloudEvent, model: str, response: Handled) -> Handled:
    """Return a JSON response as an event.

    CE_TYPE and CE_SOURCE set its type and source; with CE_MERGE=true it keeps the other attributes of the request.
    """
    merges = os.environ.get("CE_MERGE", "").lower() == "true"
    attributes = {
        **({k: v for k, v in event.attributes.items() if k != "datacontenttype"} if merges else {}),
        "specversion": "1.0",
        "id": str(uuid.uuid4()),
        "source": os.environ.get("CE_SOURCE") or f"io.kserve.inference.{model}",
        "type": os.environ.get("CE_TYPE") or "io.kserve.inference.response",
        "time": datetime.now(UTC).isoformat(),
    }
    if event.is_binary:
        headers = {f"{_PREFIX}{name}": str(value) for name, value in attributes.items()}
        return Handled(response.content, JSON_TYPE, metadata={**response.metadata, **headers})
    content = fast_json.dumps({**attributes, "data": fast_json.Fragment(response.content)})
    return Handled(content, STRUCTURED_TYPE, metadata=response.metadata)
