"""Shared by the text protocols: bodies, tables of parameters, and text split by tokens."""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import parse_qsl, quote

import msgspec
from msgspec.structs import replace

from dragoman.core.calls import Answer, Authorize, ModelCall, Request, Response
from dragoman.core.documents import parse_json
from dragoman.core.errors import DragomanError, InvalidInput
from dragoman.core.sampling import (
    KINDS,
    InvalidValueError,
    ValueKind,
    check_value,
    format_value,
    ineffective_fields,
    sampling,
)
from dragoman.core.text import Grammar, Sampling, Text, Token
from dragoman.formats.exact_json import dump_json, load_json
from dragoman.formats.json_document import explain_invalid
from dragoman.formats.json_scan import check_json
from dragoman.protocols.schema_keywords import remove_unenforced
from dragoman.protocols.wire import (
    Buffer,
    EngineCall,
    Headers,
    HttpRequest,
    HttpResponse,
    Policy,
    PreliminaryCall,
    bearer_token,
)
from dragoman.system.request_context import client_request_id


def reject_unused(names: Sequence[str], policy: Policy) -> None:
    """Raise InvalidInput in strict mode if there are such names."""
    if names and policy.strict_parameters:
        value = ", ".join(f"`{name}`" for name in names)
        raise InvalidInput(f"parameters that have no effect here: {value}; expected none of them")


IGNORED = "x-ignored-parameters"
_MAX_NAMED = 32


# --- bodies ----------------------------------------------------------------------------------------------


def _parse_json(text: Buffer, policy: Policy) -> Any:
    """Parse JSON within the limits of `check_json`, with integers of any size. Raises InvalidInput."""
    text = bytes(text)
    check_json(text, policy)
    try:
        return load_json(text)
    except ValueError as error:
        raise InvalidInput(f"the request body is not valid JSON: {explain_invalid(text, error)}") from error


def json_body(body: Buffer, policy: Policy, parse: Callable[[Buffer, Policy], Any] = _parse_json) -> Any:
    """Parse the JSON value of a body. Raises InvalidInput if it is empty, invalid or larger than allowed."""
    text = bytes(body)
    if not text or text.isspace():
        raise InvalidInput("the request body is empty; expected a JSON object")
    return parse(text, policy)


def object_body(body: Buffer, policy: Policy) -> dict[str, Any]:
    """Parse the JSON object of a body."""
    value = json_body(body, policy)
    if not isinstance(value, dict):
        raise InvalidInput(f"the request body must be a JSON object; got {_noun(value)}")
    return value


def get_object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object in a field of a body; empty if it is missing."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidInput(f"`{name}` must be an object of names and values; got {_noun(value)}")
    return value


def require_text(values: Mapping[str, Any], name: str) -> str:
    """Return the text in a field. Raises InvalidInput if it is missing or empty."""
    value = values.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"`{name}` must be a non-empty string; got {_noun(value)}")
    return value


def _noun(value: Any) -> str:
    nouns = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return nouns.get(type(value), "a number")


def build_request(call: ModelCall[Answer], http: HttpRequest, policy: Policy, model: str = "") -> Request[Answer]:
    """Return the request for a call to the model that the path names, else to `model`."""
    metadata = policy.forwarded_headers(http.headers) if policy.forward_headers else {}
    name, version = http.params.get("model", model), http.params.get("version", "")
    return Request(call, name, version, client_request_id(http.headers), None, metadata)


def after_authorization(http: HttpRequest, call: EngineCall[None, HttpResponse]) -> PreliminaryCall[None]:
    """Return a call that changes a model, if the request may do that."""

    def then(_: Response[None]) -> EngineCall[None, HttpResponse]:
        return call

    return PreliminaryCall(Request(Authorize(bearer_token(http.headers)), call.request.model), then)


def event(value: Any) -> bytes:
    """Format a value as a server-sent event."""
    return b"data: " + dump_json(value) + b"\n\n"


def is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


# --- parameters ------------------------------------------------------------------------------------------

ANYTHING = "anything"


class Parameter(msgspec.Struct, frozen=True):
    """One parameter of a protocol.

    `to`: the field of Sampling, or the option of the protocol (`own`), that it sets; "" for none. `fields`: those of an
    object. `effect`: whether it is applied, tunes something that this server does not have, which the response reports,
    or asks for something that this server cannot do, which is an error: `instead` says what else the client can do.
    `neutral` are values that ask for nothing.
    """

    to: str
    kind: ValueKind
    own: bool = False
    fields: "Mapping[str, Parameter]" = msgspec.field(default_factory=dict)
    effect: Literal["applied", "ignored", "unsupported"] = "applied"
    neutral: tuple[Any, ...] = ()
    instead: str = ""


def anything() -> ValueKind:
    return ValueKind(ANYTHING, lambda value: value)


def json_object() -> ValueKind:
    """A JSON object."""

    def convert(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidValueError
        return value

    return ValueKind("an object", convert, {"type": "object"})


def one_of(*names: str) -> ValueKind:
    """One of some words."""

    def convert(value: Any) -> str:
        if value not in names or not isinstance(value, str):
            raise InvalidValueError
        return value

    return ValueKind(" or ".join(f'"{name}"' for name in names), convert, {"enum": list(names)})


def sets(to: str, kind: ValueKind | None = None) -> Parameter:
    """Return a parameter that sets a field of Sampling, of that field's kind unless one is given."""
    return Parameter(to, kind or KINDS[to])


def option(name: str, kind: ValueKind) -> Parameter:
    return Parameter(name, kind, own=True)


def options(name: str, fields: Mapping[str, Parameter]) -> Parameter:
    """Return a parameter that is an object of further parameters, all of them options."""
    return Parameter(name, json_object(), own=True, fields=fields)


def label() -> Parameter:
    """Return a parameter that by its meaning does not change a response, such as the name of a user."""
    return Parameter("", anything())


def ignored(*neutral: Any) -> Parameter:
    """Return a parameter that tunes something that this server does not have; responses name it."""
    return Parameter("", anything(), effect="ignored", neutral=neutral)


def unsupported(instead: str, *neutral: Any) -> Parameter:
    """Return a parameter with which a request would mean something else than this server does: state of former
    requests, another kind of output. It is rejected, unless its value is neutral or empty."""
    return Parameter("", anything(), effect="unsupported", neutral=neutral, instead=instead)


def body_schema(table: Mapping[str, Parameter], **fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a body with the parameters of a table, any of which may be null, and with `fields`,
    which are required."""
    properties = {name: _schema(parameter) for name, parameter in table.items()}
    return {"type": "object", "properties": {**properties, **fields}, "required": sorted(fields)}


def _schema(parameter: Parameter) -> dict[str, Any]:
    """Return the JSON Schema of a parameter, which may be null."""
    match parameter.effect:
        case "ignored":
            return {"description": "has no effect"}
        case "unsupported":
            return {"description": f"not supported: {parameter.instead}"}
    kind = parameter.kind
    about = {"description": kind.description} if kind.description != ANYTHING else {}
    if parameter.fields:
        nested = {name: _schema(each) for name, each in parameter.fields.items()}
        return {"anyOf": [{"type": "object", "properties": nested}, {"type": "null"}], **about}
    return {**({"anyOf": [kind.schema, {"type": "null"}]} if kind.schema else {}), **about}


class ParsedParameters(msgspec.Struct, frozen=True):
    """The parsed parameters of a request: fields of Sampling, options of the protocol, the client's name of each, and
    unknown names."""

    fields: dict[str, Any] = msgspec.field(default_factory=dict)
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    names: dict[str, str] = msgspec.field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def headers(self) -> Headers:
        """Return the header that names ignored parameters, if there are any."""
        return ignored_header(self.ignored)

    def with_client_names(self, error: DragomanError) -> DragomanError:
        """Return the error with the client's name of the parameter."""
        name, colon, value = error.message.partition(": ")
        if not isinstance(error, InvalidInput) or not colon or name not in self.names:
            return error
        return type(error)(f"`{self.names[name]}`: {value}")

    def requests_no_tokens(self) -> bool:
        """Return whether no new token is requested: one is generated nevertheless and not sent."""
        nothing = self.fields.get("max_new_tokens") == 0
        if nothing:
            self.fields["max_new_tokens"] = 1
        return nothing

    def error_formatter(
        self, write: Callable[[DragomanError], HttpResponse]
    ) -> Callable[[DragomanError], HttpResponse]:
        """Return a function that formats errors with the client's names of parameters."""
        return lambda fault: write(self.with_client_names(fault))

    def sampling(self, policy: Policy, **defaults: Any) -> Sampling:
        """Return the Sampling of the fields.

        Raises InvalidInput if they contradict each other, and in strict mode for those that change nothing.
        """
        parameters = sampling({**defaults, **self.fields}, self.names, policy.max_sequences)
        fields = {name: value for name, value in self.fields.items() if name in self.names}
        reject_unused([self.names[name] for name in ineffective_fields(parameters, fields)], policy)
        return parameters


class _Ineffective(msgspec.Struct, frozen=True):
    """Names of parameters without effect: unknown, without an effect here, and parts that are not enforced."""

    unknown: list[str] = msgspec.field(default_factory=list)
    unused: list[str] = msgspec.field(default_factory=list)
    unenforced: list[str] = msgspec.field(default_factory=list)


def parse_parameters(values: Mapping[str, Any], table: Mapping[str, Parameter], policy: Policy) -> ParsedParameters:
    """Parse and check parameters; null is the same as absent.

    Two names of one list are joined. Raises InvalidInput naming the parameter, the expected and the actual value; also
    for two constraints on the output, and in strict mode for parameters without effect.
    """
    names = _Ineffective()
    parsed = _parse(values, table, policy, names)
    supported = {*table, *(f"{name}.{field}" for name, each in table.items() for field in each.fields)}
    reject_unknown(names.unknown, supported, policy)
    reject_unused(names.unused, policy)
    return replace(parsed, ignored=(*names.unknown, *names.unused, *names.unenforced))


def _parse(
    values: Mapping[str, Any], table: Mapping[str, Parameter], policy: Policy, names: _Ineffective
) -> ParsedParameters:
    """Parse parameters and add those without effect to `names`."""
    parsed = ParsedParameters()
    for name, value in values.items():
        parameter = table.get(name)
        if value is None:
            continue
        if parameter is None:
            names.unknown.append(name)
            continue
        converted = _convert(name, value, parameter, policy, names)
        target = parsed.options if parameter.own else parsed.fields
        if isinstance(converted, tuple):
            converted = (*target.get(parameter.to, ()), *converted)
        elif isinstance(converted, Grammar) and target.get(parameter.to, converted) != converted:
            raise InvalidInput(
                f"`{name}` must not be given with `{parsed.names[parameter.to]}`: the text can be one of them alone"
            )
        if converted is None:  # as of a label, or a format that is any text
            continue
        if isinstance(converted, Grammar):
            converted, unenforced = enforceable(name, converted, policy, strict=_is_strict(value))
            names.unenforced.extend(unenforced)
        target[parameter.to] = converted
        parsed.names[parameter.to] = name
    return parsed


def _convert(name: str, value: Any, parameter: Parameter, policy: Policy, names: _Ineffective) -> Any:
    """Return the value of a parameter, None if it has no effect. Raises InvalidInput if it is wrong or unsupported."""
    if parameter.effect != "applied":
        if value in (False, "", [], *parameter.neutral):
            return None
        if parameter.effect == "unsupported":
            raise InvalidInput(f"`{name}` is not supported: {parameter.instead}; got {format_value(value)}")
        names.unused.append(name)
        return None
    converted = check_value(name, value, parameter.kind)
    if not parameter.to:
        return None
    if isinstance(converted, Grammar):
        names.unknown.extend(_unknown_format_fields(name, value))
    if not parameter.fields:
        return converted
    fields = {f"{name}.{field}": each for field, each in parameter.fields.items()}
    return _parse({f"{name}.{field}": each for field, each in converted.items()}, fields, policy, names).options


def enforceable(name: str, grammar: Grammar, policy: Policy, *, strict: bool = False) -> tuple[Grammar, list[str]]:
    """Return the grammar in the parameter `name` without keywords of JSON Schema that cannot be enforced, and these as
    ignored parameters, such as `response_format.uniqueItems`.

    Raises InvalidInput naming them instead with `strict`, or if the server rejects parameters without effect.
    """
    if grammar.kind != "json_schema":
        return grammar, []
    text, keywords = remove_unenforced(grammar.text)
    if keywords and (strict or policy.strict_parameters):
        names = ", ".join(f'"{keyword}"' for keyword in keywords)
        raise InvalidInput(
            f"`{name}` must not contain keywords that cannot be enforced, with strict validation; got {names}"
        )
    reduced = grammar if text is grammar.text else Grammar("json_schema", text)
    return reduced, [f"{name}.{keyword}" for keyword in keywords]


# The fields of a format of the output, by its type, and of `json_schema` inside it.
_SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})
_FORMAT_FIELDS: Mapping[str, frozenset[str]] = {
    "json_object": frozenset({"type", "value", *_SCHEMA_FIELDS}),
    "json_schema": frozenset({"type", "value", "json_schema", *_SCHEMA_FIELDS}),
    "json": frozenset({"type", "value"}),
    "regex": frozenset({"type", "value"}),
}


def _unknown_format_fields(name: str, value: Any) -> list[str]:
    """Return the fields without effect in a format of the output, an object with a `type` or vLLM's parameters."""
    if not isinstance(value, dict):
        return []
    if name == "structured_outputs":
        return [f"{name}.{field}" for field, each in value.items() if each and field not in _STRUCTURED]
    known = _FORMAT_FIELDS.get(str(value.get("type")))
    if known is None:
        return []
    nested = value.get("json_schema")
    inner = nested if isinstance(nested, dict) and "json_schema" in known else {}
    return [
        *(f"{name}.{field}" for field, each in value.items() if each is not None and field not in known),
        *(f"{name}.json_schema.{field}" for field in inner if field not in _SCHEMA_FIELDS),
    ]


def _is_strict(value: Any) -> bool:
    """Return whether a response format asks that all of its schema is enforced."""
    match value:
        case {"json_schema": {"strict": True}} | {"type": "json_schema" | "json_object", "strict": True}:
            return True
    return False


def add_flat_format(parameters: ParsedParameters, name: str, value: Any, policy: Policy) -> ParsedParameters:
    """Return the parameters with the grammar of a response format whose JSON schema is not nested; None for none.

    Raises InvalidInput naming the field.
    """
    grammar = None if value is None else check_value(name, value, _FLAT_FORMAT)
    if grammar is None:
        return parameters
    unknown = _unknown_format_fields(name, value)
    reject_unknown(unknown, (f"{name}.{field}" for field in ("type", *_SCHEMA_FIELDS)), policy)
    if "grammar" in parameters.fields:
        other = parameters.names["grammar"]
        raise InvalidInput(f"`{name}` must not be given with `{other}`: the text can be one of them alone")
    grammar, unenforced = enforceable(name, grammar, policy, strict=_is_strict(value))
    fields, names = {**parameters.fields, "grammar": grammar}, {**parameters.names, "grammar": name}
    return ParsedParameters(fields, parameters.options, names, (*parameters.ignored, *unknown, *unenforced))


def reject_unknown(names: Iterable[str], supported: Iterable[str], policy: Policy) -> None:
    """Raise InvalidInput in strict mode if there are unknown names."""
    unknown = list(names)
    if unknown and policy.strict_parameters:
        value = ", ".join(f"`{name[:64]}`" for name in unknown[:_MAX_NAMED])
        raise InvalidInput(f"unknown parameters: {value}; there are {', '.join(sorted(supported))}")


def parse_query(text: str, known: Iterable[str]) -> dict[str, str]:
    """Return the parameters of a query; of several with one name the last. Raises InvalidInput for unknown ones."""
    query: dict[str, str] = {}
    for name, value in parse_qsl(text, keep_blank_values=True):
        if name not in known:
            raise InvalidInput(f"query parameter '{name[:64]}': expected one of {', '.join(known)}")
        query[name] = value
    return query


def ignored_header(names: Sequence[str]) -> Headers:
    """Return the header that names parameters without effect, in characters that a header may contain."""
    if not names:
        return ()
    return ((IGNORED, ", ".join(quote(name[:64], safe=".-_") for name in names[:_MAX_NAMED])),)


def finite(logprob: float | None) -> float | None:
    """Return a log-probability for JSON: None for -inf, as of a token that a grammar excludes."""
    return logprob if logprob is None or math.isfinite(logprob) else None


# --- answers ---------------------------------------------------------------------------------------------


def split_by_token(text: str, tokens: Sequence[Token]) -> list[str]:
    """Split the text into one part per token; the parts add up to it.

    A character of several tokens belongs to the last of them. What a token decodes to beyond the text, such as a
    removed stop string, belongs to none.
    """
    parts = [""] * len(tokens)
    at = 0
    for i, token in enumerate(tokens):
        start = text.find(token.text, at) if token.text else -1
        if start < 0:
            continue
        between, at = text[at:start], start + len(token.text)
        continued = i > 0 and not parts[i - 1] and not tokens[i - 1].special
        parts[i] = token.text if continued else between + token.text
        if continued:
            parts[i - 1] = between
    if tokens:
        parts[-1] += text[at:]
    return parts


def likelihood(text: Text) -> float:
    """Return the mean log-probability of a completion, by which completions are ranked."""
    logprobs = [token.logprob for token in text.tokens if token.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


def most_likely_first(texts: Sequence[Text], sampling: Sampling) -> list[Text]:
    """Return the completions of one prompt, the best first; beams are ranked by their own score."""
    if sampling.num_beams > 1:
        return list(texts)
    return sorted(texts, key=likelihood, reverse=True)


_POLICY = Policy()  # its limits hold for JSON in a text as well


def _parse_schema(value: Any) -> Grammar:
    """Parse a JSON schema, an object or its JSON string."""
    if isinstance(value, str):
        try:
            text = value.encode()
            check_json(text, _POLICY)
            value = parse_json(text)
        except (ValueError, InvalidInput):
            raise InvalidValueError from None
    if not isinstance(value, dict):
        raise InvalidValueError
    return Grammar("json_schema", json.dumps(value))


def _parse_regex(value: Any) -> Grammar:
    if not isinstance(value, str) or not value:
        raise InvalidValueError
    return Grammar("regex", value)


# The first rule of a grammar in GBNF or EBNF.
_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)


def _parse_grammar(value: Any) -> Grammar:
    """Parse a grammar in the format of Lark, or in GBNF (llama.cpp) or EBNF (xgrammar), whose rules contain `::=`."""
    if not isinstance(value, str) or not value:
        raise InvalidValueError
    return Grammar("gbnf" if _GBNF_RULE.search(value) else "lark", value)


def _parse_structural_tag(value: Any) -> Grammar:
    """Parse structural tags, an object or its JSON string."""
    return Grammar("structural_tag", _parse_schema(value).text)


def _parse_choice(value: Any) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise InvalidValueError
    return Grammar("choice", json.dumps(value, ensure_ascii=False))


def _parse_object(value: Any) -> Grammar | None:
    if not isinstance(value, bool):
        raise InvalidValueError
    return Grammar("json_object") if value else None


_STRUCTURED: Mapping[str, Callable[[Any], Grammar | None]] = {
    "json": _parse_schema,
    "json_object": _parse_object,
    "regex": _parse_regex,
    "choice": _parse_choice,
    "grammar": _parse_grammar,
    "structural_tag": _parse_structural_tag,
}


def _parse_structured(value: Any) -> Grammar | None:
    """Parse vLLM's `structured_outputs`, an object with one of these fields."""
    if not isinstance(value, dict):
        raise InvalidValueError
    formats = {name: each for name, each in value.items() if each is not None and name in _STRUCTURED}
    if len(formats) != 1:
        raise InvalidValueError
    ((name, each),) = formats.items()
    return _STRUCTURED[name](each)


def _parse_typed(value: Any) -> Grammar | None:
    """Parse an object with a `type`: OpenAI's `response_format`, TGI's `grammar`."""
    if not isinstance(value, dict):
        raise InvalidValueError
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return _parse_schema(schema)
        case {"type": "json_schema", "schema": schema}:  # as in OpenAI's Responses
            return _parse_schema(schema)
        case {"type": "json_object", "schema": schema} if schema is not None:  # as in llama.cpp
            return _parse_schema(schema)
        case {"type": "json" | "json_object" | "json_schema", "value": {"schema": schema, "name": _}}:
            return _parse_schema(schema)
        case {"type": "json" | "json_object" | "json_schema", "value": schema} if schema is not None:
            return _parse_schema(schema)
        case {"type": "json_object"}:
            return Grammar("json_object")
        case {"type": "structural_tag"}:
            return _parse_structural_tag(value)
        case {"type": "regex", "value": regex}:
            return _parse_regex(regex)
    raise InvalidValueError


_FLAT_FORMAT = ValueKind(
    'an object: {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "schema": {...}}', _parse_typed
)
RESPONSE_FORMAT = ValueKind(
    'an object: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {...}}} '
    'or {"type": "structural_tag", "format": {...}}',
    _parse_typed,
)
GRAMMAR = ValueKind(
    'an object: {"type": "json", "value": {a JSON schema}} or {"type": "regex", "value": "..."}', _parse_typed
)
_STRUCTURED_OUTPUTS = ValueKind(f"an object with one of {', '.join(_STRUCTURED)}", _parse_structured)

JSON_SCHEMA = ValueKind("a JSON schema", _parse_schema)
# vLLM's parameters, which its users also send to LMI.
GUIDED: Mapping[str, Parameter] = {
    "guided_json": sets("grammar", JSON_SCHEMA),
    "guided_regex": sets("grammar", ValueKind("a regular expression", _parse_regex)),
    "guided_choice": sets("grammar", ValueKind("a list of strings", _parse_choice)),
    "guided_grammar": sets("grammar", ValueKind("a grammar in the format of Lark or GBNF", _parse_grammar)),
    "structured_outputs": sets("grammar", _STRUCTURED_OUTPUTS),
}
