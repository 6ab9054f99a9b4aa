"""Chat templates of requests: sandbox and limits."""

import time
from typing import Any

import pytest

from dragoman import errors
from dragoman.core.calls import Generate, Tokenize
from dragoman.core.text import Chat, Sampling
from dragoman.runtimes.llm.model import LanguageModel

MESSAGES = ({"role": "user", "content": "hi"},)


async def render(model: LanguageModel, template: str = "", **options: Any) -> str:
    return (await model.tokenize(Tokenize(Chat(MESSAGES, options=options, template=template)))).text


async def test_a_template_replaces_the_models_own(llama: LanguageModel) -> None:
    assert await render(llama, "{{ messages[0].content }}, {{ mood }}!", mood="well") == "hi, well!"
    assert "<|user|>" in await render(llama)
    call = Generate(prompts=(Chat(MESSAGES, template="A class"),), sampling=Sampling(max_new_tokens=1))
    (chunk,) = [chunk async for chunk in llama.generate(call)]
    assert chunk.prompts[0].text == "A class"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{% for x in range(10 ** 9) %}{{ x }}{% endfor %}",
        "{% for",
        "{{ nothing.at_all }}",
        "{% include '/etc/passwd' %}",
    ],
)
async def test_forbidden_operations_of_a_template_are_invalid_input(llama: LanguageModel, template: str) -> None:
    with pytest.raises(errors.InvalidInput, match=r"^chat_template: it rejects these messages: "):
        await render(llama, template)


async def test_a_text_that_cannot_fit_is_not_tokenized(llama: LanguageModel) -> None:
    template = "{{ 'abc ' * 10_000_000 }}"
    start_s = time.monotonic()
    with pytest.raises(errors.TooLong):
        await render(llama, template)
    prompt = Chat(MESSAGES, template=template)
    with pytest.raises(errors.TooLong):
        await anext(llama.generate(Generate(prompts=(prompt,), sampling=Sampling(truncate=3))))
    assert time.monotonic() - start_s < 5  # tokenization takes far longer


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "add_generation_prompt"])
async def test_arguments_other_than_template_variables_are_rejected(llama: LanguageModel, name: str) -> None:
    with pytest.raises(errors.InvalidInput, match=f"chat_template_kwargs: expected variables of .*, got {name}$"):
        await llama.tokenize(Tokenize(Chat(MESSAGES, options={name: True})))
