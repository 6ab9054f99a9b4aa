"""vLLM's `/tokenize`, a path that TGI has as well, and `/detokenize`."""

from collections.abc import Mapping
from typing import Any

from dragoman.core.calls import Describe, ModelDescription, Request, Response, Tokenize
from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import format_value
from dragoman.core.text import Chat, RawPrompt, Tokenized
from dragoman.protocols.parameters import ParsedParameters, build_request, ignored_header, is_token_id, reject_unknown
from dragoman.protocols.wire import (
    EndpointResult,
    EngineCall,
    HttpRequest,
    HttpResponse,
    Policy,
    PreliminaryCall,
    json_response,
)
from dragoman_text.apis.common.chat import CONVERSATION, get_flag, parse_conversation
from dragoman_text.apis.common.openai_format import FormatError, resolve_model

_TOKENS = frozenset({"model", "tokens"})
_TEXT = frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"})
_CHAT = frozenset({"model", "add_special_tokens", "return_token_strs", *CONVERSATION})


def is_vllm_request(body: Mapping[str, Any]) -> bool:
    """Return whether a body is vLLM's: TGI's has `inputs`."""
    return "inputs" not in body and ("prompt" in body or "messages" in body)


def parse_tokenize_request(body: Mapping[str, Any], http: HttpRequest, policy: Policy) -> EndpointResult:
    """Parse a tokenize request. Raises InvalidInput naming the field."""
    return resolve_model(body, http, lambda name: _tokens(body, http, policy, name))


def _tokens(body: Mapping[str, Any], http: HttpRequest, policy: Policy, model: str) -> EndpointResult:
    call, ignored = Tokenize(_prompt(body, policy)), _unknown(body, _CHAT if "messages" in body else _TEXT, policy)
    texts = get_flag(body, "return_token_strs", otherwise=False)

    def then(described: Response[ModelDescription]) -> EndpointResult:
        context = described.answer.details.get("max_context")

        def reply(response: Response[Tokenized]) -> HttpResponse:
            tokens = response.answer.tokens
            value = {"count": len(tokens), "max_model_len": context, "tokens": [token.id for token in tokens]}
            strings = [token.text for token in tokens] if texts else None
            return json_response({**value, "token_strs": strings}, 200, ignored_header(ignored))

        return EngineCall(build_request(call, http, policy, described.answer.name), reply)

    request = build_request(call, http, policy, model)
    return PreliminaryCall(Request(Describe(Tokenize), request.model, request.version), then)


def _prompt(body: Mapping[str, Any], policy: Policy) -> str | Chat:
    if "messages" in body:
        return parse_conversation(body, policy)[0]
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise InvalidInput(f"`prompt` must be a string; got {format_value(prompt)}")
    return prompt if get_flag(body, "add_special_tokens", otherwise=True) else RawPrompt(prompt)


def _unknown(body: Mapping[str, Any], supported: frozenset[str], policy: Policy) -> list[str]:
    """Return the unknown fields. Raises InvalidInput for them in strict mode."""
    names = [name for name, value in body.items() if name not in supported and value is not None]
    reject_unknown(names, supported, policy)
    return names


def parse_detokenize_request(
    body: Mapping[str, Any], http: HttpRequest, policy: Policy, format_error: FormatError
) -> EndpointResult:
    """Parse a detokenize request. Raises InvalidInput naming the field."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(map(is_token_id, tokens)):
        raise InvalidInput(f"`tokens` must be a list of token ids; got {format_value(tokens)}")
    ignored = _unknown(body, _TOKENS, policy)
    fault = ParsedParameters(names={"prompt": "tokens"}).error_formatter(format_error)

    def reply(response: Response[Tokenized]) -> HttpResponse:
        return json_response({"prompt": response.answer.text}, 200, ignored_header(ignored))

    def then(name: str) -> EndpointResult:
        return EngineCall(build_request(Tokenize(tuple(tokens)), http, policy, name), reply, fault)

    return resolve_model(body, http, then)
