"""vLLM's `/tokenize`, at the path that TGI has too: a prompt or a conversation as token ids."""

from collections.abc import Mapping
from typing import Any

from dragoman.core.calls import Describe, ModelDescription, Request, Response, Tokenize
from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import checked, flag, shown
from dragoman.core.text import Chat, Tokenized
from dragoman.protocols.text import ignored_header, inquiry
from dragoman.protocols.text_chat import conversation
from dragoman.protocols.text_openai import addressed
from dragoman.protocols.wire import Asked, Exchange, HttpRequest, HttpResponse, Inquiry, Policy, json_response


def is_vllms(body: Mapping[str, Any]) -> bool:
    """Whether a body is one of vLLM's: TGI's has `inputs`."""
    return "inputs" not in body and ("prompt" in body or "messages" in body)


def tokens_asked(body: Mapping[str, Any], http: HttpRequest, policy: Policy) -> Asked:
    """What such a body asks. Raises InvalidInput naming what does not fit."""
    return addressed(body, http, lambda name: _tokens(body, http, policy, name))


def _tokens(body: Mapping[str, Any], http: HttpRequest, policy: Policy, model: str) -> Asked:
    call = Tokenize(_prompt(body))
    texts = checked("return_token_strs", body.get("return_token_strs") or False, flag())
    unused = ["add_special_tokens"] if body.get("add_special_tokens") is False else []

    def then(described: Response[ModelDescription]) -> Asked:
        context = described.answer.details.get("max_context")

        def reply(response: Response[Tokenized]) -> HttpResponse:
            tokens = response.answer.tokens
            told = {"count": len(tokens), "max_model_len": context, "tokens": [token.id for token in tokens]}
            strings = [token.text for token in tokens] if texts else None
            return json_response({**told, "token_strs": strings}, 200, ignored_header(unused))

        return Exchange(inquiry(call, http, policy, described.answer.name), reply)

    asked = inquiry(call, http, policy, model)
    return Inquiry(Request(Describe(Tokenize), asked.model, asked.version), then)


def _prompt(body: Mapping[str, Any]) -> str | Chat:
    if "messages" in body:
        return conversation(body)[0]
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise InvalidInput(f"`prompt` must be a text that is not empty; got {shown(prompt)}")
    return prompt
