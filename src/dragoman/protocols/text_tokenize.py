"""vLLM's `/tokenize`, at the path that TGI has too, and `/detokenize`: a prompt as token ids, and token ids as text."""

from collections.abc import Mapping
from typing import Any

from dragoman.core.calls import Describe, ModelDescription, Request, Response, Tokenize
from dragoman.core.errors import InvalidInput
from dragoman.core.sampling import shown
from dragoman.core.text import Bare, Chat, Tokenized
from dragoman.protocols.text import Given, inquiry, is_token_id
from dragoman.protocols.text_chat import conversation, flag_in
from dragoman.protocols.text_openai import Faults, addressed
from dragoman.protocols.wire import Asked, Exchange, HttpRequest, HttpResponse, Inquiry, Policy, json_response


def is_vllms(body: Mapping[str, Any]) -> bool:
    """Whether a body is one of vLLM's: TGI's has `inputs`."""
    return "inputs" not in body and ("prompt" in body or "messages" in body)


def tokens_asked(body: Mapping[str, Any], http: HttpRequest, policy: Policy) -> Asked:
    """What such a body asks. Raises InvalidInput naming what does not fit."""
    return addressed(body, http, lambda name: _tokens(body, http, policy, name))


def _tokens(body: Mapping[str, Any], http: HttpRequest, policy: Policy, model: str) -> Asked:
    call = Tokenize(_prompt(body))
    texts = flag_in(body, "return_token_strs", otherwise=False)

    def then(described: Response[ModelDescription]) -> Asked:
        context = described.answer.details.get("max_context")

        def reply(response: Response[Tokenized]) -> HttpResponse:
            tokens = response.answer.tokens
            told = {"count": len(tokens), "max_model_len": context, "tokens": [token.id for token in tokens]}
            strings = [token.text for token in tokens] if texts else None
            return json_response({**told, "token_strs": strings})

        return Exchange(inquiry(call, http, policy, described.answer.name), reply)

    asked = inquiry(call, http, policy, model)
    return Inquiry(Request(Describe(Tokenize), asked.model, asked.version), then)


def _prompt(body: Mapping[str, Any]) -> str | Chat:
    if "messages" in body:
        return conversation(body)[0]
    prompt = body.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise InvalidInput(f"`prompt` must be a text that is not empty; got {shown(prompt)}")
    return prompt if flag_in(body, "add_special_tokens", otherwise=True) else Bare(prompt)


def text_asked(body: Mapping[str, Any], http: HttpRequest, policy: Policy, faults: Faults) -> Asked:
    """What a body of `/detokenize` asks. Raises InvalidInput naming what does not fit."""
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(map(is_token_id, tokens)):
        raise InvalidInput(f"`tokens` must be a list of token ids; got {shown(tokens)}")
    fault = Given(names={"prompt": "tokens"}).telling(faults)

    def reply(response: Response[Tokenized]) -> HttpResponse:
        return json_response({"prompt": response.answer.text})

    def then(name: str) -> Asked:
        return Exchange(inquiry(Tokenize(tuple(tokens)), http, policy, name), reply, fault)

    return addressed(body, http, then)
