"""The server under test and the models that its clauses use."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from dragoman.core.documents import read_json
from dragoman.core.errors import InvalidInput
from dragoman_check.conformance.clauses import ClauseFailed, NotTried
from dragoman_check.conformance.http import HttpTarget, RecordedResponse, checked_url
from dragoman_check.conformance.samples import (
    DATATYPES,
    SampleTensor,
    TensorShape,
    json_request,
    sample_of,
    samples_of_request,
)

# Number of models that are tried until one accepts a derived request.
_MAX_MODELS = 30


@dataclass(slots=True)
class Target:
    """Server, credentials and options of one run."""

    http: HttpTarget
    grpc: str = ""
    models: Sequence[str] = ()
    request: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    point: Sequence[Sequence[float]] | None = None

    def listed_models(self) -> list[str]:
        """Return the models to consider: those of the command, or those that the server lists."""
        if self.models:
            return list(self.models)
        models: dict[str, None] = {}
        for names in (self._index(), self._names("/v2/models", "models"), self._names("/v1/models", "data")):
            models |= dict.fromkeys(names)
        return list(models)

    def _index(self) -> Iterator[str]:
        answer = _json(self.http.post("/v2/repository/index", {}))
        for entry in answer if isinstance(answer, list) else ():
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and entry.get("state") != "UNAVAILABLE":
                yield entry["name"]

    def _names(self, path: str, key: str) -> Iterator[str]:
        answer = _json(self.http.get(path))
        entries = answer.get(key) if isinstance(answer, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            name = entry.get("id", entry.get("name")) if isinstance(entry, dict) else entry
            if isinstance(name, str):
                yield name


def server_target(url: str, grpc: str, key: str, ca: str, timeout_s: float) -> Target:
    """Return the server at a URL; its gRPC address is that of the URL if `grpc` is empty. Raises InvalidInput."""
    url = checked_url(url)
    address = urlsplit(url)
    if grpc and not grpc.rpartition(":")[2].isdecimal():
        raise InvalidInput(f"--grpc: expected HOST:PORT, got '{grpc}'")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    port = address.port or (443 if address.scheme == "https" else 80)
    host = f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname
    http = HttpTarget("" if address.scheme == "grpc" else url, headers, ca, timeout_s)
    return Target(http, grpc or f"{host}:{port}")


def _json(response: RecordedResponse) -> Any:
    try:
        return response.json() if response.status == 200 else None
    except ClauseFailed:
        return None


@dataclass(frozen=True, slots=True)
class TensorModel:
    """A model of the Open Inference Protocol and inputs that it accepts, or `problem`: the reason why it does not."""

    name: str
    metadata: Mapping[str, Any]
    samples: Sequence[SampleTensor]
    problem: str = ""

    @property
    def path(self) -> str:
        return f"/v2/models/{quote(self.name, safe='')}"

    @property
    def version(self) -> str:
        """Return a version that may be requested. Raises NotTried if the metadata lists none."""
        versions = self.metadata.get("versions")
        if not isinstance(versions, list) or not versions:
            raise NotTried(f"the metadata of '{self.name}' lists no versions")
        return str(versions[0])

    def outputs(self) -> list[TensorShape]:
        """Return the declared outputs. Raises NotTried if there are none."""
        declared = declared_tensors(self.metadata, "outputs")
        if not declared:
            raise NotTried(f"the metadata of '{self.name}' declares no outputs")
        return declared

    def request(self, **changes: Any) -> dict[str, Any]:
        return json_request(self.samples) | changes

    def changed_input(self, **changes: Any) -> dict[str, Any]:
        """Return a request whose first input has other fields."""
        request = self.request()
        return request | {"inputs": [request["inputs"][0] | changes, *request["inputs"][1:]]}


def declared_tensors(metadata: Mapping[str, Any], key: str) -> list[TensorShape]:
    """Return the valid tensors of metadata."""
    entries = metadata.get(key)
    return [
        TensorShape(str(entry.get("name")), entry["datatype"], tuple(map(int, entry["shape"])))
        for entry in (entries if isinstance(entries, list) else ())
        if isinstance(entry, dict) and entry.get("datatype") in DATATYPES and isinstance(entry.get("shape"), list)
    ]


def find_tensor_model(target: Target) -> TensorModel | str:
    """Return a model that accepts a request derived from its metadata, else one with metadata, else a reason."""
    candidates, reasons = [], []
    for name in target.listed_models()[:_MAX_MODELS]:
        response = target.http.get(f"/v2/models/{quote(name, safe='')}")
        metadata = _json(response)
        if not isinstance(metadata, dict):
            reasons.append(f"GET v2/models/{name} gets status {response.status}")
        else:
            try:
                samples = _samples(target, metadata)
            except (ValueError, KeyError, TypeError) as error:
                raise InvalidInput(f"--request: expected a V2 inference request in JSON, got {error!r}") from error
            candidates.append(TensorModel(name, metadata, samples))
    if not candidates and not reasons:
        return "no model is listed; name one with --model NAME"
    for model in sorted(candidates, key=_difficulty):
        if not model.samples:
            reasons.append(f"the metadata of '{model.name}' declares no inputs; give a request with --request FILE")
            continue
        response = target.http.post(f"{model.path}/infer", model.request())
        if response.status == 200:
            return model
        reason = f"rejects the request derived from its metadata with status {response.status}"
        reasons.append(f"'{model.name}' {reason}; give one with --request FILE")
    return replace(candidates[0], problem=reasons[-1]) if candidates else reasons[0]


def with_metadata(found: TensorModel | str) -> TensorModel:
    """Return a found model. Raises NotTried if there is none."""
    if isinstance(found, str):
        raise NotTried(found)
    return found


def with_request(found: TensorModel | str) -> TensorModel:
    """Return a found model that accepts its request. Raises NotTried if there is none."""
    model = with_metadata(found)
    if model.problem:
        raise NotTried(model.problem)
    return model


def _samples(target: Target, metadata: Mapping[str, Any]) -> list[SampleTensor]:
    if target.request is not None:
        return samples_of_request(target.request)
    return [sample_of(spec) for spec in declared_tensors(metadata, "inputs")]


def _difficulty(model: TensorModel) -> int:
    """Return a sort key that puts models of plain numbers first."""
    datatypes = {sample.datatype for sample in model.samples}
    return 2 * bool(datatypes & {"FP16", "BF16"}) + ("BYTES" in datatypes) + (not model.samples)


def read_request(path: str) -> Mapping[str, Any]:
    """Return the V2 request in a file. Raises InvalidInput."""
    try:
        request = read_json(Path(path))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"--request: '{path}' cannot be read: {error}") from error
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise InvalidInput(f"--request: expected an object with 'inputs' in '{path}'")
    return request
