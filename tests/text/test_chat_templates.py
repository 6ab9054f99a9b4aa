"""Templates that a chat brings, and what it says to the model's own."""

from typing import Any

import pytest

from .text_house import House, speaking

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
TEMPLATE = "{{ messages[0].content }}"
PATHS = ("/v1/chat/completions", "/invocations", "/tokenize", "/chat_tokenize")


async def asked(house: House, **more: Any) -> Any:
    answer = await house.post("/v1/chat/completions", {**HELLO, **more})
    assert answer.status == 200, answer.json
    return house.model().calls[-1].prompts[0]


async def test_a_template_is_refused_unless_the_operator_allows_it() -> None:
    async with speaking() as house:
        for path in PATHS:
            for more in ({"chat_template": TEMPLATE}, {"chat_template_kwargs": {"chat_template": TEMPLATE}}):
                answer = await house.post(path, {**HELLO, **more})
                assert answer.status in (400, 422, 424)
                assert b"`chat_template` is refused" in answer.body
                assert b"--trust-request-chat-template" in answer.body
        answer = await house.post("/vertex", {"instances": [{**HELLO, "chat_template": TEMPLATE}]})
        assert answer.json["error"].startswith("Input validation error: `instances[0]`: `chat_template` is refused")
        assert not house.model().calls
        assert (await asked(house, chat_template=None)).template == ""


async def test_a_template_goes_to_the_model_where_it_is_allowed() -> None:
    async with speaking(trust_request_chat_template=True) as house:
        assert (await asked(house, chat_template=TEMPLATE)).template == TEMPLATE
        found = await asked(house, chat_template_kwargs={"chat_template": TEMPLATE, "mood": "good"})
        assert (found.template, found.options) == (TEMPLATE, {"mood": "good"})
        for path in PATHS:
            assert (await house.post(path, {**HELLO, "chat_template": TEMPLATE})).status == 200
        for wrong in ("", 3, ["a"], "a" * 65_537):
            answer = await house.post("/v1/chat/completions", {**HELLO, "chat_template": wrong})
            assert (answer.status, answer.json["error"]["param"]) == (400, "chat_template")
            assert "must be a text of 1 to 65536 characters" in answer.json["error"]["message"]


@pytest.mark.parametrize("inside", [True, False])
async def test_how_a_chat_ends_may_stand_among_the_variables(inside: bool) -> None:
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    async with speaking() as house:
        found = await asked(house, **({"chat_template_kwargs": ends} if inside else ends))
    assert not found.add_generation_prompt
    assert found.options == {"continue_final_message": True}
