"""Clauses of KServe's V1 protocol."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from dragoman_check.conformance.clauses import ClauseList, NotOffered, NotTried, Protocol, expect, field_of
from dragoman_check.conformance.http import HttpTarget, RecordedResponse
from dragoman_check.conformance.target import Target, find_tensor_model, with_request

_UNKNOWN = "dragoman-check-unknown"
CLAUSES = ClauseList("v1")
_add = CLAUSES.add


@dataclass(slots=True)
class V1Context:
    """The server and a model; instances are None where the model has more than one input of numbers."""

    http: HttpTarget
    name: str
    instances: Any

    def predict(self, body: Any) -> RecordedResponse:
        return self.http.post(f"/v1/models/{quote(self.name, safe='')}:predict", body)


def _prepare(target: Target) -> V1Context:
    model = with_request(find_tensor_model(target))
    if len(model.samples) != 1 or not model.samples[0].shape:
        raise NotTried(f"'{model.name}' has no single input with a first axis")
    context = V1Context(target.http, model.name, model.samples[0].as_json(nested=True)["data"])
    if len(model.samples[0].shape) > 1 and not isinstance(context.instances[0], list):
        raise NotTried(f"'{model.name}' has no rows")
    response = context.predict({"instances": context.instances})
    if response.status in (404, 405, 501):
        raise NotOffered(f"POST v1/models/{model.name}:predict gets status {response.status}")
    return context


def _check_error(response: RecordedResponse, low: int = 400) -> None:
    response.expect_rejected(low, 499)
    expect(field_of(response.json(), "error", str).strip(), "a message in 'error'", response.body)


@_add("ready", "Model readiness")
def _ready(c: V1Context) -> None:
    """GET v1/models/{model} returns the name and ready of a model."""
    answer = c.http.get(f"/v1/models/{quote(c.name, safe='')}").ok().json()
    expect(field_of(answer, "name", str) == c.name, f"the name '{c.name}'", answer["name"])
    expect(str(field_of(answer, "ready", (bool, str))).lower() == "true", "ready true", answer["ready"])


@_add("predict", "Predict")
def _predict(c: V1Context) -> None:
    """POST v1/models/{model}:predict returns a prediction for each instance."""
    rows = [c.instances[0]] * 2
    response = c.predict({"instances": rows})
    if response.status != 200:
        rows = c.instances
        response = c.predict({"instances": rows})
    predictions = field_of(response.ok().json(), "predictions", (list, dict))
    lists = list(predictions.values()) if isinstance(predictions, dict) else [predictions]
    expect(all(len(each) == len(rows) for each in lists), f"{len(rows)} predictions", predictions)


@_add("unknown-model", "Predict")
def _unknown_model(c: V1Context) -> None:
    """Predict of an unknown model gets status 404 and an error."""
    response = c.http.post(f"/v1/models/{_UNKNOWN}:predict", {"instances": c.instances})
    expect(response.status == 404, "status 404", response.status)
    _check_error(response)


@_add("no-instances", "Predict")
def _no_instances(c: V1Context) -> None:
    """A request without 'instances' gets status 400 and an error."""
    _check_error(c.predict({}))


@_add("instances-type", "Predict")
def _instances_type(c: V1Context) -> None:
    """'instances' that is not a list gets status 400 and an error."""
    _check_error(c.predict({"instances": 7}))


@_add("malformed-json", "Predict")
def _malformed_json(c: V1Context) -> None:
    """A body that is not JSON gets status 400 and an error."""
    _check_error(c.predict(b'{"instances": ['))


PROTOCOL = Protocol("kserve-v1", "KServe V1", "KServe V1 inference protocol", _prepare, CLAUSES)
