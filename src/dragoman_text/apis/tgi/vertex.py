"""TGI's endpoint for Vertex AI: instances, each a prompt or a chat, become predictions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dragoman.core.calls import ConcurrentCalls, Generate, Request, Response
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.sampling import format_value
from dragoman.core.text import Generation, Prompt, Sampling, Text
from dragoman.core.text_limits import TGI_INSTANCES
from dragoman.protocols.parameters import (
    ParsedParameters,
    build_request,
    get_object,
    ignored_header,
    most_likely_first,
    reject_unknown,
    reject_unused,
)
from dragoman.protocols.wire import EngineCall, HttpRequest, HttpResponse, Policy, json_response
from dragoman_text.apis.common.chat import parse_chat
from dragoman_text.apis.common.openai_format import PLACEHOLDERS
from dragoman_text.apis.tgi.request import parse_request

_FIELDS = ("instances", "parameters", "model")
# Parameters without effect: a prediction is only text.
_UNUSED = ("stream", "details", "decoder_input_details", "top_n_tokens")
_UNUSED_IN_CHATS = ("stream", "stream_options", "n", "logprobs", "top_logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class _Instance:
    """One instance: its prompt, its sampling, and `before`, the text before its completion."""

    prompt: Prompt
    sampling: Sampling
    parameters: ParsedParameters
    before: str = ""


@dataclass(frozen=True, slots=True)
class _Group:
    """Instances with equal sampling, by their positions; they are one call."""

    sampling: Sampling
    places: list[int] = field(default_factory=list)


def get_model_field(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field `model` of a body or of its instances."""
    instances = body.get("instances")
    names_given = [body.get("model"), *(each.get("model") for each in _objects(instances))]
    names = {name.partition(":")[0] for name in names_given if isinstance(name, str)} - PLACEHOLDERS
    if len(names) > 1:
        raise InvalidInput(f"`instances` must all be for one model; got {', '.join(sorted(names))}")
    return {"model": names.pop()} if names else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def parse_predictions_request(
    body: Mapping[str, Any],
    http: HttpRequest,
    policy: Policy,
    format_error: Callable[[DragomanError], HttpResponse],
    model: str,
    ignored_fields: Sequence[str],
) -> EngineCall[Any, HttpResponse]:
    """Parse a predictions request for a model. Raises InvalidInput naming the instance."""
    unknown = [name for name in body if name not in _FIELDS]
    reject_unknown(unknown, _FIELDS, policy)
    reject_unused(ignored_fields, policy)
    instances = _instances(body, policy)
    groups = _group(instances)
    calls = [Generate(prompts=tuple(instances[at].prompt for at in g.places), sampling=g.sampling) for g in groups]
    ignored = dict.fromkeys(
        (*unknown, *ignored_fields, *(name for each in instances for name in each.parameters.ignored))
    )
    names = {name: client_name for each in instances for name, client_name in each.parameters.names.items()}
    words = ParsedParameters(names={**names, "prompt": "instances"})

    def reply(response: Response[tuple[Response[Generation], ...]]) -> HttpResponse:
        texts: dict[int, str] = {}
        for group, value in zip(groups, response.answer, strict=True):
            for prompt, at in enumerate(group.places):
                texts[at] = instances[at].before + _best(value.answer, prompt, group.sampling).whole
        predictions = [texts[at] for at in range(len(instances))]
        return json_response({"predictions": predictions}, 200, ignored_header(list(ignored)))

    concurrent = ConcurrentCalls(tuple(build_request(call, http, policy, model) for call in calls))
    return EngineCall(Request(concurrent), reply, words.error_formatter(format_error))


def _best(generation: Generation, prompt: int, sampling: Sampling) -> Text:
    return most_likely_first([text for text in generation.texts if text.prompt == prompt], sampling)[0]


def _group(instances: Sequence[_Instance]) -> list[_Group]:
    groups: list[_Group] = []
    for at, instance in enumerate(instances):
        group = next((group for group in groups if group.sampling == instance.sampling), None)
        if group is None:
            groups.append(group := _Group(instance.sampling))
        group.places.append(at)
    return groups


# --- instances ---------------------------------------------------------------------------------------------


def _instances(body: Mapping[str, Any], policy: Policy) -> list[_Instance]:
    values = body.get("instances")
    if not isinstance(values, list) or not 0 < len(values) <= TGI_INSTANCES:
        raise InvalidInput(f"`instances` must be a list of 1 to {TGI_INSTANCES} instances; got {format_value(values)}")
    common = _without_nulls(get_object(body, "parameters"))
    instances = []
    for at, instance in enumerate(values):
        try:
            instances.append(_instance(instance, common, policy))
        except InvalidInput as error:
            raise type(error)(f"`instances[{at}]`: {error.message}") from error
    return instances


def _instance(instance: Any, common: Mapping[str, Any], policy: Policy) -> _Instance:
    match instance:
        case {"inputs": str(_)}:
            return _prompt(instance, common, policy)
        case {"messages": _}:
            return _chat({**common, **_without_nulls(instance)}, policy)
    raise InvalidInput(f"expected an object with `inputs`, a string, or with `messages`; got {format_value(instance)}")


def _prompt(instance: dict[str, Any], common: Mapping[str, Any], policy: Policy) -> _Instance:
    # TGI: sampling is the default at this path.
    parameters = {"do_sample": True, **common, **_without_nulls(get_object(instance, "parameters"))}
    unused = _remove_fields([parameters, instance], _UNUSED, policy)
    request = parse_request({**instance, "parameters": parameters}, policy, stream=False)
    parsed = replace(request.parameters, ignored=(*request.parameters.ignored, *unused))
    (prompt,) = request.inputs
    return _Instance(prompt, request.sampling, parsed, prompt if request.full else "")


def _chat(instance: dict[str, Any], policy: Policy) -> _Instance:
    unused = _remove_fields([instance], _UNUSED_IN_CHATS, policy)
    request = parse_chat(instance, policy)
    return _Instance(
        request.chat, request.sampling, replace(request.parameters, ignored=(*request.parameters.ignored, *unused))
    )


def _remove_fields(objects: Sequence[dict[str, Any]], names: Sequence[str], policy: Policy) -> list[str]:
    """Remove fields without effect from these objects and return their names."""
    values = [(name, each.pop(name)) for each in objects for name in names if name in each]
    unused = [name for name, value in values if value and not (name == "n" and value == 1)]
    reject_unused(unused, policy)
    return unused


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null."""
    return {name: value for name, value in values.items() if value is not None}
