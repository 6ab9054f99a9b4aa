"""Parts of the Open Inference Protocol that REST and gRPC share: extensions and their parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from dragoman.core.audit import audited
from dragoman.core.calls import (
    Authorize,
    ClassLabels,
    ConcurrentCalls,
    Infer,
    ModelDescription,
    Ready,
    Request,
    Response,
)
from dragoman.core.errors import InvalidInput
from dragoman.core.options import suggestion
from dragoman.core.signature import Shape, TensorSpec
from dragoman.core.spec import COMPLETED_CONFIG, STATED_METADATA
from dragoman.core.tensor import Parameters, Scalar
from dragoman.core.text import TEMPLATE_TEXT
from dragoman.formats import fast_json
from dragoman.formats.shared_regions import RegionSlice, pop_slice, require_regions
from dragoman.protocols.wire import EngineCall, GrpcRequest, HttpRequest, Policy, bearer_token

Out = TypeVar("Out")
RESERVED = "triton_"
# Triton: the request parameter that asks a stream to mark its last response.
WANTS_FINAL = "triton_enable_empty_final_response"


def extensions(*, has_control: bool, has_shared_memory: bool) -> tuple[str, ...]:
    """Return the extensions that are on, in Triton's order."""
    return (
        "classification",
        "sequence",
        *(("model_repository", "model_repository(unload_dependents)") if has_control else ()),
        "schedule_policy",
        "model_configuration",
        *(("system_shared_memory", "cuda_shared_memory") if has_shared_memory else ()),
        "binary_tensor_data",
        "parameters",
        "statistics",
        *(("trace", "logging") if has_control else ()),
    )


def authorized_call(
    source: HttpRequest | GrpcRequest,
    run: Callable[[], Out],
    model: str = "",
    change: tuple[str, Mapping[str, object]] | None = None,
) -> EngineCall[Any, Out]:
    """Return a call that checks the control token of a request, and that the model is ready if one is named; then
    `run()` responds.

    A model that is not ready is InvalidInput, with the text of Triton's trace settings. `change`: what the call
    changes, and fields of it for the audit log.
    """
    headers = source.headers if isinstance(source, HttpRequest) else source.metadata
    deadline_s = None if isinstance(source, HttpRequest) else source.deadline_s
    authorize = Request(Authorize(bearer_token(headers)), deadline_s=deadline_s)

    def respond() -> Out:
        if change is None:
            return run()
        with audited(change[0], source.caller, {"model": model or None, **change[1]}):
            return run()

    if not model:
        return EngineCall(authorize, lambda _: respond())

    def check(response: Response[tuple[Response[Any], ...]]) -> Out:
        if not response.answer[1].answer:
            raise InvalidInput(f"Request for unknown model : {model}")
        return respond()

    ready = Request(Ready(may_be_unknown=True), model, deadline_s=deadline_s)
    return EngineCall(Request(ConcurrentCalls((authorize, ready)), deadline_s=deadline_s), check)


def configuration(model: ModelDescription) -> Mapping[str, Any] | None:
    """Return the `config.pbtxt` of a model in its JSON form, as the model has completed it; None if it has none."""
    if (completed := model.details.get(COMPLETED_CONFIG)) is not None:
        return completed  # type: ignore[no-any-return]
    settings = model.protocols.get("triton")
    return None if settings is None else settings["config"]


def public_details(model: ModelDescription) -> Mapping[str, Any]:
    """Return the details of a model that its metadata has, with the names of tensors of unknown datatype."""
    hidden = (COMPLETED_CONFIG, STATED_METADATA, TEMPLATE_TEXT)
    details = {name: value for name, value in model.details.items() if name not in hidden}
    for side, specs in (("inputs", model.signature.inputs), ("outputs", model.signature.outputs)):
        if untyped := [spec.name for spec in specs if spec.datatype is None]:
            details[f"untyped_{side}"] = untyped
    return details


def platform_and_versions(model: ModelDescription) -> dict[str, Any]:
    """Return two fields of the metadata: as the settings of a model of MLServer state them, or as it is served."""
    stated: Mapping[str, Any] | None = model.details.get(STATED_METADATA)
    return {"platform": model.platform, "versions": model.versions} if stated is None else dict(stated)


# OIP cannot describe a tensor of any rank. Its shape in the metadata is (-1,); over REST this parameter marks it.
ANY_RANK = "any_rank"
_ONE_AXIS = (-1,)
# The names of a matrix's columns, and of the classes of an output, as JSON. Clients order data frames by the first.
COLUMNS = "columns"
LABELS = "labels"
_MOST_LABELS, _MOST_LABEL_CHARACTERS = 1000, 100_000


def metadata_tensors(
    specs: Iterable[TensorSpec], labels: Mapping[str, ClassLabels]
) -> Iterator[tuple[str, str, Shape, dict[str, bool | str]]]:
    """Yield name, datatype, shape and parameters of each tensor of known datatype: the mark of any rank, the default
    content type, and the names of columns and classes.

    OIP cannot describe a tensor of unknown datatype.
    """
    for spec in specs:
        if spec.datatype is not None:
            parameters: dict[str, bool | str] = {"content_type": spec.content_type} if spec.content_type else {}
            if spec.shape is None:
                parameters[ANY_RANK] = True
            if spec.columns:
                parameters[COLUMNS] = fast_json.dumps(spec.columns).decode()
            names = labels[spec.name].names if spec.name in labels else ()
            if 0 < len(names) <= _MOST_LABELS and sum(map(len, names)) <= _MOST_LABEL_CHARACTERS:
                parameters[LABELS] = fast_json.dumps(names).decode()
            yield spec.name, spec.datatype.name, _ONE_AXIS if spec.shape is None else spec.shape, parameters


# Unsigned numbers of 64 bits, which clients send as the int64 of the same bits: the parameters of the protocol had no
# other field at first.
_UNSIGNED = ("sequence_id", "timeout")


def restore_unsigned(parameters: dict[str, Scalar]) -> None:
    """Replace negative parameters of a gRPC request that are unsigned by the numbers of the same bits."""
    for name in _UNSIGNED:
        value = parameters.get(name)
        if type(value) is int and value < 0:
            parameters[name] = value + (1 << 64)


def check_call(call: Infer, policy: Policy) -> None:
    """Raise InvalidInput for a reserved parameter of a request, or more inputs or outputs than `max_tensors`."""
    if call.parameters:
        _check_names(call.parameters)
    most = policy.max_tensors
    if len(call.inputs) > most:
        raise InvalidInput(f"'inputs': expected at most {most}, got {len(call.inputs)}")
    if len(call.outputs) > most:
        raise InvalidInput(f"'outputs': expected at most {most}, got {len(call.outputs)}")


def _check_names(parameters: Parameters) -> None:
    for name in parameters:
        if name.startswith(RESERVED):
            raise InvalidInput(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified. "
                f"Only the following keys starting with 'triton_' are allowed: {WANTS_FINAL}; got {name!r:.64}"
            )
    if "headers" in parameters:  # of the model's view of a request, as in Triton and MLServer
        raise InvalidInput("parameter 'headers' is reserved for the headers of the request, and cannot be sent")


# Parameters of a load request beside those that override the configuration or files of the model.
LOAD_PARAMETERS = ("version", "version_weights")
_UNLOAD_PARAMETERS = ("version", "unload_dependents")


def check_unload_parameters(parameters: Mapping[str, object]) -> None:
    """Raise InvalidInput for an unknown parameter, and unless `unload_dependents` is a bool.

    Triton: it unloads the models that were loaded only because an ensemble needs them. No model is loaded so here. An
    unknown parameter may be a misspelt `version`, without which all versions are unloaded.
    """
    for name, value in parameters.items():
        if value is not None and name not in _UNLOAD_PARAMETERS:
            expected = " or ".join(map(repr, _UNLOAD_PARAMETERS))
            near = suggestion(name, _UNLOAD_PARAMETERS)
            raise InvalidInput(f"unrecognized parameter '{name[:64]}': expected {expected}{near}")
    dependents = parameters.get("unload_dependents", False)
    if not isinstance(dependents, bool):
        raise InvalidInput(f"parameter 'unload_dependents': expected true or false, got {dependents!r}")


def parse_version_weights(parameters: Mapping[str, object]) -> str | None:
    """Return the parameter of a load request that divides requests between versions. Raises InvalidInput."""
    weights = parameters.get("version_weights")
    if weights is not None and not isinstance(weights, str):
        raise InvalidInput(f"parameter 'version_weights': expected text such as '1=90,2=10', got {weights!r}")
    return weights


def parse_content_type(parameters: Parameters, name: str) -> str:
    """Return the content type of a requested output, "" without one. Raises InvalidInput unless it is a string."""
    content_type = parameters.get("content_type", "")
    if not isinstance(content_type, str):
        raise InvalidInput(f"output '{name}': parameter 'content_type' expects a name, got {content_type!r}")
    return content_type


def parse_output_region(parameters: Parameters, name: str, policy: Policy, cannot_set_both: str) -> RegionSlice | None:
    """Return the shared memory for a requested output, None without a region. Raises InvalidInput, NotSupported."""
    region_slice = pop_slice(dict(parameters), f"output '{name}'")
    if region_slice is not None:
        require_regions(policy.regions, f"output '{name}'")
        if parameters.get("classification"):
            raise InvalidInput(f"{cannot_set_both} 'shared_memory_region' and 'classification'")
    return region_slice
