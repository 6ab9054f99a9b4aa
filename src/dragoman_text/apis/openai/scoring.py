"""Rerank and score: the shapes of Cohere, Jina, vLLM and Text Embeddings Inference (TEI); embeddings as in TEI."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from dragoman.core.calls import Describe, Embed, Embedded, ModelDescription, Request, Response
from dragoman.core.errors import DragomanError, InvalidInput, Overloaded, RateLimited
from dragoman.core.sampling import InvalidValueError, ValueKind, flag, format_value, integer, text, truncation_side
from dragoman.core.scoring import Score, Scored
from dragoman.formats import fast_json
from dragoman.protocols.parameters import (
    Parameter,
    ParsedParameters,
    anything,
    build_request,
    label,
    object_body,
    option,
    parse_parameters,
)
from dragoman.protocols.wire import (
    JSON_TYPE,
    EndpointResult,
    EngineCall,
    HttpError,
    HttpRequest,
    HttpResponse,
    Policy,
    PreliminaryCall,
    error_headers,
    json_response,
    replace_surrogates,
)
from dragoman_text.apis.common.embeddings import normalize_vectors, shorten_vectors
from dragoman_text.apis.common.openai_format import Envelope, error_body, resolve_model, status_of, truncation
from dragoman_text.limits import MAX_TEXTS

_Pair = tuple[str, str]
# Formats the scores of all pairs, with the number of tokens and the name of the model.
_Reply = Callable[[Sequence[float], int, str], HttpResponse]
_FormatError = Callable[[DragomanError | HttpError], HttpResponse]


def _texts(*, may_be_empty: bool = True) -> ValueKind:
    """A list of texts, or of objects with a `text`. An empty text beside a query is scored, as by vLLM and TEI."""

    def convert(value: Any) -> list[str]:
        if not isinstance(value, list) or not 0 < len(value) <= MAX_TEXTS:
            raise InvalidValueError
        texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in value]
        if not all(isinstance(each, str) and (each or may_be_empty) for each in texts):
            raise InvalidValueError
        return texts

    kind = "strings" if may_be_empty else "non-empty strings"
    return ValueKind(f"a list of 1 to {MAX_TEXTS} {kind}", convert, {"type": "array", "minItems": 1})


def _text_or_texts(*, may_be_empty: bool = True) -> ValueKind:
    several = _texts(may_be_empty=may_be_empty)

    def convert(value: Any) -> list[str]:
        texts: list[str] = several.convert([value] if isinstance(value, str) else value)
        return texts

    return ValueKind(f"a string, or {several.description}", convert)


def _direction() -> ValueKind:
    """TEI's names of the sides."""

    def convert(value: Any) -> str:
        if value not in ("Left", "Right"):
            raise InvalidValueError
        return str(value).lower()

    return ValueKind('"Left" or "Right"', convert, {"enum": ["Left", "Right"]})


_COMMON: Mapping[str, Parameter] = {
    "model": option("model", anything()),
    "user": label(),
    "truncate_prompt_tokens": option("truncate", truncation()),
    "truncation_side": option("truncation_side", truncation_side()),
    "use_activation": option("use_activation", flag()),
}
RERANK: Mapping[str, Parameter] = {
    **_COMMON,
    "query": option("query", text()),
    "documents": option("documents", _texts()),
    "top_n": option("top_n", integer(0)),
    "return_documents": option("return_documents", flag()),
}
TEI: Mapping[str, Parameter] = {
    "model": option("model", anything()),
    "query": option("query", text()),
    "texts": option("texts", _texts()),
    "truncate": option("truncate", flag()),
    "truncation_direction": option("truncation_side", _direction()),
    "raw_scores": option("raw_scores", flag()),
    "return_text": option("return_text", flag()),
}
TEI_EMBED: Mapping[str, Parameter] = {
    **{name: TEI[name] for name in ("model", "truncate", "truncation_direction")},
    "inputs": option("inputs", _text_or_texts(may_be_empty=False)),
    "normalize": option("normalize", flag()),
    "dimensions": option("dimensions", integer(1)),
    "prompt_name": option("prompt_name", text()),
}
# Names of the two sides of pairs.
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
SCORE: Mapping[str, Parameter] = {
    **_COMMON,
    **{name: option(name, _text_or_texts()) for name in dict.fromkeys(name for pair in _SIDES for name in pair)},
}


class _Scoring(msgspec.Struct, frozen=True):
    """A parsed request: the pairs to score, and the function that formats the response."""

    pairs: Sequence[_Pair]
    reply: _Reply
    format_error: Callable[[DragomanError], HttpResponse]
    raw: bool = False
    truncate: int | None = None
    side: str = ""


class Scoring:
    """Endpoints of rerank and score. `write_error` formats errors, except those of TEI's requests."""

    def __init__(self, policy: Policy, write_error: _FormatError) -> None:
        self._policy, self._write_error = policy, write_error

    def rerank(self, http: HttpRequest) -> EndpointResult:
        body = object_body(http.body, self._policy)
        if "texts" not in body:
            return self._score(body, http, self._parse_rerank(body))
        try:
            return self._score(body, http, self._parse_tei(body))
        except InvalidInput as error:
            return write_tei_error(error)

    def score(self, http: HttpRequest) -> EndpointResult:
        body = object_body(http.body, self._policy)
        return self._score(body, http, self._parse_score(body))

    def embed(self, http: HttpRequest) -> EndpointResult:
        """Return embeddings as in TEI: a list of vectors, of length 1 unless `normalize` is false."""
        try:
            return self._embed(http)
        except InvalidInput as error:
            return write_tei_error(error)

    def _embed(self, http: HttpRequest) -> EndpointResult:
        body = object_body(http.body, self._policy)
        parameters = parse_parameters(body, TEI_EMBED, self._policy)
        options = parameters.options
        texts = tuple(_require_texts(options, "inputs"))
        truncate, side = 0 if options.get("truncate") else None, options.get("truncation_side", "")
        call = Embed(texts, truncate, side, options.get("prompt_name"))
        size, normalizes = options.get("dimensions"), options.get("normalize", True)

        def reply(response: Response[Embedded]) -> HttpResponse:
            vectors = np.asarray(response.answer.vectors.data, np.float32)
            vectors = vectors if size is None else shorten_vectors(vectors, size, normalizes=normalizes)
            vectors = normalize_vectors(vectors) if normalizes else vectors
            value = fast_json.dumps(vectors)
            return HttpResponse(200, (value,), (JSON_TYPE, *parameters.headers))

        def then(model: str) -> EndpointResult:
            return EngineCall(build_request(call, http, self._policy, model), reply, write_tei_error)

        return resolve_model(body, http, then)

    # --- requests --------------------------------------------------------------------------------------------

    def _parse_rerank(self, body: Mapping[str, Any]) -> _Scoring:
        parameters = parse_parameters(body, RERANK, self._policy)
        options = parameters.options
        query, documents = _query(options), _require_texts(options, "documents")
        shows = options.get("return_documents", True)

        def reply(scores: Sequence[float], tokens: int, model: str) -> HttpResponse:
            results = [
                {"index": i, "relevance_score": scores[i], **({"document": {"text": documents[i]}} if shows else {})}
                for i in _best_first(scores)[: options.get("top_n") or None]
            ]
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            id_ = f"rerank-{uuid.uuid4().hex}"
            return json_response(
                {"id": id_, "model": model, "usage": usage, "results": results}, 200, parameters.headers
            )

        return self._scoring(parameters, [(query, each) for each in documents], reply)

    def _parse_tei(self, body: Mapping[str, Any]) -> _Scoring:
        parameters = parse_parameters(body, TEI, self._policy)
        options = parameters.options
        query, texts = _query(options), _require_texts(options, "texts")
        shows = options.get("return_text", False)

        def reply(scores: Sequence[float], tokens: int, model: str) -> HttpResponse:
            ranked = [
                {"index": i, "score": scores[i], **({"text": texts[i]} if shows else {})} for i in _best_first(scores)
            ]
            return json_response(ranked, 200, parameters.headers)

        pairs = [(query, each) for each in texts]
        truncate = 0 if options.get("truncate") else None
        side = options.get("truncation_side", "")
        return _Scoring(pairs, reply, write_tei_error, options.get("raw_scores", False), truncate, side)

    def _parse_score(self, body: Mapping[str, Any]) -> _Scoring:
        parameters = parse_parameters(body, SCORE, self._policy)
        options = parameters.options
        names = next((pair for pair in _SIDES if all(name in options for name in pair)), None)
        if names is None:
            raise InvalidInput("`text_1` and `text_2` must be given, or `queries` and `documents`; got neither")
        left, right = (options[name] for name in names)
        if len(left) not in (1, len(right)):
            raise InvalidInput(
                f"`{names[0]}` must have one string, or as many as `{names[1]}`, {len(right)}; got {len(left)}"
            )
        envelope = Envelope.new("score", "list")

        def reply(scores: Sequence[float], tokens: int, model: str) -> HttpResponse:
            data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
            value = {"id": envelope.id, "object": "list", "created": envelope.created, "model": model, "data": data}
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            return json_response({**value, "usage": usage}, 200, parameters.headers)

        return self._scoring(parameters, [*zip(left * (len(right) // len(left)), right, strict=True)], reply)

    def _scoring(self, parameters: ParsedParameters, pairs: Sequence[_Pair], reply: _Reply) -> _Scoring:
        options = parameters.options
        raw, side = options.get("use_activation") is False, options.get("truncation_side", "")
        format_error = parameters.error_formatter(self._write_error)
        return _Scoring(pairs, reply, format_error, raw, options.get("truncate"), side)

    # --- calls -----------------------------------------------------------------------------------------------

    def _score(self, body: Mapping[str, Any], http: HttpRequest, scoring: _Scoring) -> EndpointResult:
        """Score pairs by a cross-encoder, or by the cosine of the embeddings of another encoder."""

        def call(described: Response[ModelDescription]) -> EndpointResult:
            model = described.answer
            if Score in model.calls or Embed not in model.calls:
                score = Score(tuple(scoring.pairs), scoring.raw, scoring.truncate, scoring.side)

                def reply_scores(response: Response[Scored]) -> HttpResponse:
                    return scoring.reply(response.answer.scores, response.answer.tokens, response.model)

                return EngineCall(
                    build_request(score, http, self._policy, model.name), reply_scores, scoring.format_error
                )
            texts = tuple(dict.fromkeys(text for pair in scoring.pairs for text in pair))
            embed = Embed(texts, scoring.truncate, scoring.side)

            def reply_cosines(response: Response[Embedded]) -> HttpResponse:
                vectors = normalize_vectors(np.asarray(response.answer.vectors.data, np.float32))
                by_text = dict(zip(embed.inputs, vectors, strict=True))
                cosines = [float(by_text[a] @ by_text[b]) for a, b in scoring.pairs]
                return scoring.reply(cosines, response.answer.tokens, response.model)

            return EngineCall(build_request(embed, http, self._policy, model.name), reply_cosines, scoring.format_error)

        def then(name: str) -> EndpointResult:
            return PreliminaryCall(Request(Describe(Score, Embed), name), call, scoring.format_error)

        return resolve_model(body, http, then)


def _query(options: Mapping[str, Any]) -> str:
    query = options.get("query")
    if not query:
        raise InvalidInput(f"`query` must be a non-empty string; got {format_value(query)}")
    return str(query)


def _require_texts(options: Mapping[str, Any], name: str) -> list[str]:
    if name not in options:
        raise InvalidInput(f"`{name}` must be a list of strings; got none")
    texts: list[str] = options[name]
    return texts


def _best_first(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: -scores[i])


def write_tei_error(error: DragomanError | HttpError) -> HttpResponse:
    """Format an error as TEI does: `{"error": message, "error_type": ...}`."""
    if isinstance(error, HttpError):
        return json_response({"error": error.message, "error_type": "Backend"}, error.status, error.headers)
    status, kind = 424, "Backend"
    if isinstance(error, InvalidInput):
        status, kind = 422, "Validation"
    elif isinstance(error, Overloaded | RateLimited):
        status, kind = 429, "Overloaded"
    elif status_of(error) != 500:
        status = status_of(error)
    value = {"error": replace_surrogates(error_body(error)["error"]["message"]), "error_type": kind}
    return json_response(value, status, error_headers(error))
