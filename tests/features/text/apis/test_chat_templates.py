"""Chat templates and template variables in requests."""

from typing import Any

import pytest

from text_server import TextServer, serve

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
TEMPLATE = "{{ messages[0].content }}"
PATHS = ("/v1/chat/completions", "/invocations", "/tokenize", "/chat_tokenize")


async def post_chat(server: TextServer, **more: Any) -> Any:
    """Post a chat and return the prompt that the model received."""
    response = await server.post("/v1/chat/completions", {**HELLO, **more})
    assert response.status == 200, response.json
    return server.model().calls[-1].prompts[0]


async def test_templates_are_rejected_unless_trusted() -> None:
    async with serve() as server:
        for path in PATHS:
            for more in ({"chat_template": TEMPLATE}, {"chat_template_kwargs": {"chat_template": TEMPLATE}}):
                response = await server.post(path, {**HELLO, **more})
                assert response.status in (400, 422, 424)
                assert b"`chat_template` is not accepted" in response.body
                assert b"--trust-request-chat-template" in response.body
        assert not server.model().calls
        assert (await post_chat(server, chat_template=None)).template == ""


async def test_trusted_templates_reach_the_model() -> None:
    async with serve(trust_request_chat_template=True) as server:
        assert (await post_chat(server, chat_template=TEMPLATE)).template == TEMPLATE
        prompt = await post_chat(server, chat_template_kwargs={"chat_template": TEMPLATE, "mood": "good"})
        assert (prompt.template, prompt.options) == (TEMPLATE, {"mood": "good"})
        for path in PATHS:
            assert (await server.post(path, {**HELLO, "chat_template": TEMPLATE})).status == 200
        for wrong in ("", 3, ["a"], "a" * 65_537):
            response = await server.post("/v1/chat/completions", {**HELLO, "chat_template": wrong})
            assert (response.status, response.json["error"]["param"]) == (400, "chat_template")
            assert "must be a string of 1 to 65536 characters" in response.json["error"]["message"]


@pytest.mark.parametrize("in_variables", [True, False])
async def test_continue_final_message_as_field_or_template_variable(in_variables: bool) -> None:
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    async with serve() as server:
        prompt = await post_chat(server, **({"chat_template_kwargs": fields} if in_variables else fields))
    assert not prompt.add_generation_prompt
    assert prompt.options == {"continue_final_message": True}
