"""The chat of the console in a real browser."""

import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from console.browser import Browser, needs_chromium, png, serve_page
from console.chat_models import Talker, Writer
from dragoman.core.text import Chat

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="package")]
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def opened(chromium: Any) -> AsyncIterator[Browser]:
    async with serve_page(chromium, Talker, Writer, trial_s=0) as page:
        yield page


@pytest_asyncio.fixture(loop_scope="package")
async def browser(opened: Browser) -> AsyncIterator[Browser]:
    """A page with a new chat with Talker."""
    opened.problems.clear()
    Talker.requests.clear()
    Writer.requests.clear()
    Talker.gate.clear()
    await opened.page.set_viewport_size(WIDE)
    await opened.page.goto(f"{opened.url}/docs")  # a page without chats
    await opened.page.evaluate("() => sessionStorage.clear()")
    await opened.page.goto(f"{opened.url}/#/models/Talker")
    await opened.page.wait_for_selector("#draft")
    yield opened
    assert opened.problems == []


async def ask(browser: Browser, text: str, answer: str | None = None) -> None:
    """Send a question and wait for its answer, by default the same text."""
    before = await browser.page.locator(".message.assistant").count()
    await browser.page.fill("#draft", text)
    await browser.page.keyboard.press("Enter")
    last = browser.page.locator(".message.assistant").nth(before)
    await last.get_by_text(text if answer is None else answer).first.wait_for()
    await last.get_by_text("seed").wait_for()


def contents(call: Any) -> list[tuple[str, Any]]:
    """Return roles and contents of the messages that a model got."""
    return [(message["role"], message["content"]) for message in call.prompts[0].messages]


def options(call: Any) -> Any:
    """Return the variables of the chat template that a model got."""
    return call.prompts[0].options


# --- the conversation ------------------------------------------------------------------------------------------


async def test_a_text_models_page_opens_with_its_chat(browser: Browser) -> None:
    tabs = await browser.page.get_by_role("tab").all_inner_texts()
    assert tabs[0] == "Chat"
    assert await browser.page.get_by_role("tab", name="Chat").get_attribute("aria-selected") == "true"
    await browser.keep("chat-empty")


async def test_a_suggestion_is_sent(browser: Browser) -> None:
    await browser.page.locator(".chat-suggestions button").first.click()
    await browser.page.locator(".message.assistant").get_by_text("seed").wait_for()
    (call,) = Talker.requests
    assert contents(call) == [("user", "What is photosynthesis? Answer in one sentence.")]


async def test_markup_in_an_answer_stays_text(browser: Browser) -> None:
    await ask(browser, "say <b>hello</b> <img src=x onerror=alert(1)>")
    shown = browser.page.locator(".message.assistant .markdown")
    assert await shown.inner_text() == "say <b>hello</b> <img src=x onerror=alert(1)>"
    assert await browser.page.locator(".messages img").count() == 0
    await browser.press("Raw text")
    assert await browser.page.locator(".message.assistant .chat-raw").inner_text() == (
        "say <b>hello</b> <img src=x onerror=alert(1)>"
    )


async def test_the_history_is_sent_and_a_failed_question_is_not(browser: Browser) -> None:
    page = browser.page
    await ask(browser, "one two")
    await page.fill("#draft", "!fail")
    await page.keyboard.press("Enter")
    error = page.locator(".message.assistant [role=alert]")
    await error.get_by_text("it was told to fail").wait_for()
    assert await page.get_by_role("button", name="Try again").count() == 1
    await ask(browser, "three")
    expected = [("user", "one two"), ("assistant", "one two"), ("user", "three")]
    assert contents(Talker.requests[-1]) == expected


async def test_an_answer_that_was_cut_off_is_continued(browser: Browser) -> None:
    """In the same message; the model gets its own text as the last message, without the end of a turn."""
    page = browser.page
    await ask(browser, "one !cut two", "one !cut")
    assert "cut off at max tokens" in await page.locator(".message .facts").inner_text()
    await browser.press("Continue")
    answer = page.locator(".message.assistant")
    await answer.get_by_text("one !cutone !cut").wait_for()  # the model repeats its last message
    await page.locator(".message .facts", has_text="4 tokens").wait_for()
    assert "continued with seed" in await page.locator(".message .facts").inner_text()
    call = Talker.requests[-1]
    assert contents(call) == [("user", "one !cut two"), ("assistant", "one !cut")]
    assert options(call)["continue_final_message"] is True
    await page.reload()
    await browser.press("Continue")
    await page.locator(".message .facts", has_text="6 tokens").wait_for()
    assert await page.locator(".message").count() == 2
    await ask(browser, "three", "three")
    assert "continue_final_message" not in options(Talker.requests[-1])
    assert await page.get_by_role("button", name="Continue").count() == 0, "the answer is whole"


async def test_an_answer_that_was_stopped_is_continued_and_a_failure_keeps_it(browser: Browser) -> None:
    page = browser.page
    await page.fill("#draft", "one two !wait !fail")
    await page.keyboard.press("Enter")
    await page.locator(".message.assistant").get_by_text("one two").wait_for()
    await browser.press("Stop")
    await page.locator(".message .facts", has_text="stopped").wait_for()
    await page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json={"error": "busy"}), times=1)
    await browser.press("Continue")
    await page.locator(".message [role=alert]", has_text="busy").wait_for()
    assert (await page.locator(".message.assistant .markdown").inner_text()).strip() == "one two"
    await browser.press("Continue")
    await page.locator(".message .facts", has_text="finished by stop").wait_for()
    assert (await page.locator(".message.assistant .markdown").inner_text()).strip() == "one twoone two"


async def test_a_text_that_was_cut_off_is_continued(browser: Browser) -> None:
    page = browser.page
    await page.goto(f"{browser.url}/#/models/Writer")
    await page.fill("#draft", "begin !cut")
    await page.keyboard.press("Enter")
    await page.locator(".message .facts", has_text="cut off at max tokens").wait_for()
    await browser.press("Continue")
    await page.locator(".message .facts", has_text="4 tokens").wait_for()
    assert Writer.requests[-1].prompts == ("begin !cutbegin !cut",)


async def test_try_again_replaces_the_last_answer(browser: Browser) -> None:
    await ask(browser, "call !calls", "call 1")
    await browser.press("Try again")
    await browser.page.locator(".message.assistant").get_by_text("call 2").wait_for()
    assert await browser.focused() == "textarea Message"
    assert await browser.page.locator(".message").count() == 2
    first, second = Talker.requests
    assert contents(first) == contents(second) == [("user", "call !calls")]


async def test_the_last_question_is_edited(browser: Browser) -> None:
    page = browser.page
    await ask(browser, "first")
    await ask(browser, "second")
    assert await page.get_by_role("button", name="Edit", exact=True).count() == 1
    await browser.press("Edit")
    assert await page.input_value("#draft") == "second"
    assert await browser.focused() == "textarea Message"
    await browser.press("Cancel")
    assert await page.input_value("#draft") == ""
    await browser.press("Edit")
    await page.fill("#draft", "third")
    await page.keyboard.press("Enter")
    await page.locator(".message.assistant").nth(1).get_by_text("third").wait_for()
    assert await page.locator(".bubble").all_inner_texts() == ["first", "third"]
    assert contents(Talker.requests[-1]) == [("user", "first"), ("assistant", "first"), ("user", "third")]


@pytest.mark.parametrize("way", ["button", "Escape"])
async def test_an_answer_is_stopped_and_kept(browser: Browser, way: str) -> None:
    page = browser.page
    await page.fill("#draft", "begun !wait never")
    await page.keyboard.press("Enter")
    await page.locator(".message.assistant").get_by_text("begun").wait_for()
    await (browser.press("Stop") if way == "button" else page.keyboard.press("Escape"))
    await page.locator(".message.assistant .facts").get_by_text("stopped").wait_for()
    assert await page.locator(".message.assistant .markdown").inner_text() == "begun"
    await ask(browser, "next")
    assert contents(Talker.requests[-1])[:2] == [("user", "begun !wait never"), ("assistant", "begun")]


async def test_a_new_chat_ends_the_answer(browser: Browser) -> None:
    page = browser.page
    await page.fill("#draft", "begun !wait never")
    await page.keyboard.press("Enter")
    await page.locator(".message.assistant").get_by_text("begun").wait_for()
    await browser.press("New chat")
    assert await page.locator(".message").count() == 0
    assert await browser.focused() == "textarea Message"
    await ask(browser, "again")
    assert contents(Talker.requests[-1]) == [("user", "again")]


async def test_the_conversation_survives_a_reload_and_not_the_key(browser: Browser) -> None:
    page = browser.page
    await ask(browser, "**kept**", "kept")
    await page.fill("#draft", "begun !wait never")
    await page.keyboard.press("Enter")
    await page.locator(".message.assistant").get_by_text("begun").wait_for()
    await page.reload()
    await page.locator(".message.assistant strong").wait_for()
    shown = await page.locator(".message.assistant .markdown").all_inner_texts()
    assert shown == ["kept", "begun"]
    assert "stopped" in await page.locator(".message.assistant .facts").last.inner_text()
    forget = "() => import('/console/assets/api.js').then(({ storeKey }) => (storeKey(''), sessionStorage.length))"
    assert await page.evaluate(forget) == 0


async def test_a_lost_connection_is_reported_in_the_place_of_the_answer(browser: Browser) -> None:
    page = browser.page
    cut = """() => {
        const whole = window.fetch;
        window.fetch = async (...all) => {
            const response = await whole(...all);
            const cut = (_, controller) => controller.error(new TypeError("network error"));
            const cutter = new TransformStream({ transform: cut });
            return new Response(response.body.pipeThrough(cutter));
        };
    }"""
    await page.evaluate(cut)
    await page.fill("#draft", "hello")
    await page.keyboard.press("Enter")
    await page.locator(".message.assistant [role=alert]").get_by_text("The connection was lost.").wait_for()
    assert await page.get_by_role("button", name="Try again").count() == 1


async def test_an_answer_is_stopped_when_the_reader_leaves(browser: Browser) -> None:
    page = browser.page
    await page.fill("#draft", "begun !wait never")
    await page.keyboard.press("Enter")
    await page.locator(".message.assistant").get_by_text("begun").wait_for()
    await page.get_by_role("tab", name="Code").click()
    await page.get_by_role("tab", name="Chat").click()
    await page.locator(".message.assistant .facts").get_by_text("stopped").wait_for()


async def test_text_and_code_are_copied(browser: Browser) -> None:
    page = browser.page
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await ask(browser, "Code:\n```py\nx = 1\n```", "x = 1")
    for name, copied in (("Copy the code", "x = 1"), ("Copy the answer", "Code:\n```py\nx = 1\n```")):
        await browser.press(name)
        await page.get_by_role("button", name="Copied").wait_for()
        assert await page.evaluate("() => navigator.clipboard.readText()") == copied
        await page.get_by_role("button", name="Copied").wait_for(state="detached")


# --- settings --------------------------------------------------------------------------------------------------


async def test_settings_are_sent(browser: Browser) -> None:
    page = browser.page
    await browser.press("Settings")
    assert await page.get_by_label("top p").get_attribute("placeholder") == "0.9"
    await page.get_by_label("system prompt").fill("Be brief.")
    for label, value in (
        ("temperature", "0.25"), ("max tokens", "7"), ("seed", "12"),
        ("frequency penalty", "0.5"), ("presence penalty", "-0.5"),
    ):  # fmt: skip
        await page.get_by_label(label).fill(value)
    await page.get_by_text("Stop, structured output, tools").click()
    await page.get_by_label("stop texts, one a line").fill("END\n\n---")
    await page.get_by_label("JSON schema of the answer").fill('{"type": "object"}')
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    await page.get_by_label("tools, as in OpenAI's requests").fill(json.dumps([tool]))
    await page.get_by_text("Think before answering").click()
    await ask(browser, "hello")
    (call,) = Talker.requests
    sampling = call.sampling
    found = (sampling.temperature, sampling.max_new_tokens, sampling.seed, sampling.stop)
    assert found == (0.25, 7, 12, ("END", "---"))
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert "top_p" in sampling.model_defaults, "the model's own value was not left to it"
    assert sampling.grammar is not None
    (chat,) = call.prompts
    assert isinstance(chat, Chat)
    assert [each["function"]["name"] for each in chat.tools] == ["weather"]
    assert chat.options["enable_thinking"] is False
    assert contents(call) == [("system", "Be brief."), ("user", "hello")]
    await page.reload()
    await browser.press("Settings")
    assert await page.get_by_label("system prompt").input_value() == "Be brief."


@pytest.mark.parametrize(
    ("label", "text", "message"),
    [
        ("seed", "18446744073709551615", "seed: expected an integer up to 9007199254740991, got 18446744073709551615"),
        ("JSON schema of the answer", "{", "JSON schema: "),
    ],
)
async def test_a_wrong_setting_keeps_the_message(browser: Browser, label: str, text: str, message: str) -> None:
    page = browser.page
    await browser.press("Settings")
    await page.get_by_text("Stop, structured output, tools").click()
    await page.get_by_label(label).fill(text)
    await page.fill("#draft", "hello")
    await browser.press("Send")
    await page.locator(".composer [role=alert]").get_by_text(message).wait_for()
    assert await page.input_value("#draft") == "hello"
    assert Talker.requests == []
    assert await page.locator("[aria-invalid]:focus").input_value() == text
    await page.keyboard.press("Backspace")
    assert await page.locator("[aria-invalid]").count() == 0


async def test_probabilities_are_off_until_they_are_chosen(browser: Browser) -> None:
    page = browser.page
    async with page.expect_request("**/v1/chat/completions") as sent:
        await ask(browser, "hello there")
    assert "logprobs" not in (await sent.value).post_data_json
    assert await page.locator(".token").count() == 0
    await browser.press("Settings")
    await page.get_by_label("Token probabilities.").check()
    await page.get_by_label("seed").fill("12")
    await browser.press("Try again")
    await page.wait_for_selector(".token")
    facts = page.locator(".message .facts")
    await facts.get_by_text("seed 12").wait_for()
    assert (await facts.inner_text()).startswith("2 tokens · ")
    doubts = await page.locator(".token").evaluate_all("(all) => all.map((e) => e.style.getPropertyValue('--doubt'))")
    assert doubts == ["0.393", "0.393"]
    await page.get_by_text("Probabilities", exact=True).click()
    await browser.has_texts(page.locator(".message td"), ['"hello"', "0.607", "-0.500", '" there"', "0.607", "-0.500"])
    await browser.keep("chat-probabilities")


async def test_without_a_chat_template_a_text_is_continued(browser: Browser) -> None:
    page = browser.page
    await browser.open("/#/models/Writer")
    await page.get_by_label("Text to continue").fill("Once **upon** a time")
    await page.keyboard.press("Enter")
    await page.locator(".message.assistant").get_by_text("seed").wait_for()
    assert await page.locator(".message.assistant .chat-raw").inner_text() == "Once **upon** a time"
    (call,) = Writer.requests
    assert call.prompts == ("Once **upon** a time",)
    assert call.sampling.max_new_tokens == 50, "expected half of the context"
    await browser.press("Settings")
    assert await page.get_by_label("system prompt").count() == 0
    assert await page.get_by_text("Complete the text").count() == 0
    await page.get_by_label("Token probabilities.").check()
    await browser.press("Try again")
    await page.wait_for_selector(".token")


# --- pictures, reasoning and tools -----------------------------------------------------------------------------

RED = png(3, 2, lambda x, y: (200, 10, 20))


async def test_pictures_are_sent(browser: Browser) -> None:
    page = browser.page
    file = {"name": "red.png", "mimeType": "image/png", "buffer": RED}
    await page.set_input_files("input[type=file]", [file, file])
    await page.get_by_role("img", name="Picture 2").wait_for()
    await browser.press("Remove picture 2")
    transfer = await page.evaluate_handle(
        """(bytes) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
            return transfer;
        }""",
        [*RED],
    )
    await page.dispatch_event(".chat", "drop", {"dataTransfer": transfer})
    await page.get_by_role("img", name="Picture 2").wait_for()
    paste = """([transfer]) => document.getElementById("draft")
        .dispatchEvent(new ClipboardEvent("paste", { clipboardData: transfer, cancelable: true }))"""
    await page.evaluate(paste, [transfer])
    await page.get_by_role("img", name="Picture 3").wait_for()
    await ask(browser, "What is it?")
    (call,) = Talker.requests
    (chat,) = call.prompts
    assert isinstance(chat, Chat)
    assert [base64.b64decode(each) for each in chat.images] == [RED] * 3
    assert await page.locator(".message.user img").count() == 3
    await browser.keep("chat-pictures")
    await page.set_input_files("input[type=file]", {"name": "a.png", "mimeType": "image/png", "buffer": b"no picture"})
    await page.get_by_text("'a.png' is not a picture that this browser can read").wait_for()


def event(delta: dict[str, Any], reason: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': reason}]})}\n\n"


async def test_reasoning_is_folded_and_tools_are_answered(browser: Browser) -> None:
    page = browser.page
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": '"Oslo"}'}}
    chunks = [
        event({"role": "assistant", "content": ""}), event({"reasoning_content": "They ask about "}),
        event({"reasoning_content": "Oslo."}), event({"tool_calls": [call]}),
        event({"tool_calls": [rest]}, "tool_calls"), "data: [DONE]\n\n",
    ]  # fmt: skip

    async def respond(route: Any) -> None:
        await route.fulfill(body="".join(chunks), content_type="text/event-stream")

    await page.route("**/v1/chat/completions", respond)
    await page.fill("#draft", "Weather in Oslo?")
    await page.keyboard.press("Enter")
    message = page.locator(".message.assistant")
    await message.get_by_text("calls a tool").wait_for()
    assert await message.get_by_text("They ask about Oslo.").is_visible() is False
    await message.get_by_text("Thoughts").click()
    assert await message.get_by_text("They ask about Oslo.").is_visible()
    assert await message.locator("pre").inner_text() == '{\n  "city": "Oslo"\n}'
    await browser.keep("chat-tools")
    await page.unroute("**/v1/chat/completions")
    await page.get_by_label("result of weather").fill("4 °C")
    await browser.press("Send the result")
    await message.nth(1).get_by_text("seed").wait_for()
    _, called, result = Talker.requests[-1].prompts[0].messages  # type: ignore[union-attr]
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Oslo"}'}
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "4 °C", "call-1")


# --- Markdown --------------------------------------------------------------------------------------------------

MARKDOWN = [
    ("x *y* **z** `c` ~~d~~", "<p>x <em>y</em> <strong>z</strong> <code>c</code> <del>d</del></p>"),
    ("***e***", "<p><em><strong>e</strong></em></p>"),
    ("**bold *it* more** *a **b** c*", "<p><strong>bold <em>it</em> more</strong> <em>a <strong>b</strong> c</em></p>"),
    ("snake_case_word 2 * 3 * 4 5**2 \\*no\\*", "<p>snake_case_word 2 * 3 * 4 5**2 *no*</p>"),
    ("**open *open `open [open](", "<p>**open *open `open [open](</p>"),
    ("`` a`b `` &lt;i&gt; <b>x</b>", "<p><code>a`b</code> &lt;i&gt; &lt;b&gt;x&lt;/b&gt;</p>"),
    ("a\nb<br>c\n\nd", "<p>a<br>b<br>c</p><p>d</p>"),
    ("# A\n### B ###\ntext\n---", '<h3 class="level-1">A</h3><h3 class="level-3">B</h3><p>text</p><hr>'),
    ("- a\n  - b\n- [x] c", '<ul><li><p>a</p><ul><li><p>b</p></li></ul></li><li class="task"><p>☑ c</p></li></ul>'),
    ("3. a\n\n4. b\n  - c", '<ol start="3"><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li></ol>'),
    ("> q\n> - x", "<blockquote><p>q</p><ul><li><p>x</p></li></ul></blockquote>"),
    ("\\(x_1 + y_1\\)", "<p><code>x_1 + y_1</code></p>"),
    ("[x](javascript:alert(1)) [y](/a)", '<p><span title="javascript:alert(1)">x</span> <span title="/a">y</span></p>'),
]  # fmt: skip
LINK = '<a href="{}" target="_blank" rel="noopener noreferrer">{}</a>'
LINKS = [
    ('[t](https://e.org/a_(b) "T")', [("https://e.org/a_(b)", "t")]),
    ("<https://x.y> [m](mailto:a@b.c)", [("https://x.y/", "https://x.y"), ("mailto:a@b.c", "m")]),
    ("(see https://z.w/q?a=b, http://u.v)", [("https://z.w/q?a=b", "https://z.w/q?a=b"), ("http://u.v/", "http://u.v")]),
    ("![alt](https://e.org/i.png)", [("https://e.org/i.png", "picture: alt")]),
    ("[a [b](https://x.y) c](https://z.w)", [("https://x.y/", "b"), ("https://z.w/", "https://z.w")]),
    ("[![b](https://e.org/1.png)](https://e.org/2)", [("https://e.org/2", "picture: b")]),
]  # fmt: skip
RENDER = """async (texts) => {
    const { Markdown } = await import("/console/assets/markdown.js");
    const { html, render } = await import("/console/assets/html.js");
    return texts.map((text) => {
        const holder = document.createElement("div");
        const started = performance.now();
        render(html`<${Markdown} text=${text} />`, holder);
        return [holder.firstChild.innerHTML, performance.now() - started, holder.querySelectorAll("*").length];
    });
}"""


async def test_markdown_becomes_elements(browser: Browser) -> None:
    found = await browser.page.evaluate(RENDER, [text for text, _ in MARKDOWN])
    assert [markup for markup, *_ in found] == [expected for _, expected in MARKDOWN]
    found = await browser.page.evaluate(RENDER, [text for text, _ in LINKS])
    for (markup, *_), (text, links) in zip(found, LINKS, strict=True):
        assert [LINK.format(*link) in markup for link in links] == [True] * len(links), text
        assert markup.count("<a ") == len(links), text
        assert "<img" not in markup


async def test_tables_and_code_of_an_answer(browser: Browser) -> None:
    page = browser.page
    await ask(browser, "|a|b|\n|:-|-:|\n|1|`x`|\n|2\\|3|\n\n```python\nif x:  # why\n    print('hi', 2)\n", "hi")
    cells = await page.locator(".markdown th, .markdown td").all_inner_texts()
    assert cells == ["a", "b", "1", "x", "2|3", ""]
    assert await page.locator(".markdown td.right code").inner_text() == "x"
    assert await page.locator(".markdown pre").inner_text() == "if x:  # why\n    print('hi', 2)\n"
    coloured = {
        kind: await page.locator(f".code-{kind}").all_inner_texts()
        for kind in ("keyword", "comment", "string", "number", "call")
    }
    assert coloured == {"keyword": ["if"], "comment": ["# why"], "string": ["'hi'"], "number": ["2"], "call": ["print"]}


SIZE = 200_000
HOSTILE = [
    "*", "*a ", "a* ", "_a", "~~a", "[", "[](", "`", "`a``b", "|", "> ", "- ", "# ", "\\(", "\\", "&amp", "<https:",
    "```\n", "https://a.", "*_`[~<", "x\n", "| a | b |\n| - | - |\n",
]  # fmt: skip
NESTED = [
    "*a " * 33000 + "a* " * 33000,
    "*" * 100_000 + "a" + "*" * 100_000,
    "[" * 60_000 + "](x" * 40_000,
    "[" * 50_000 + "](x](x)" * 20_000,
    "![" * 50_000 + "](x)" * 25_000,
    " ".join("`" * i for i in range(1, 620)),
    "\n".join("  " * i + "- x" for i in range(440)),
    "|" * 100_000 + "\n" + "|-" * 50_000,
    "```js\n" + "/*" * 100_000,
    " " * SIZE + "x",
]


async def test_the_time_for_hostile_text_is_linear(browser: Browser) -> None:
    """Each takes less than a second; a quadratic search would take minutes, and deep elements exhaust the stack."""
    texts = [(part * (SIZE // len(part))) for part in HOSTILE] + NESTED
    for text in texts:
        ((_, ms, _),) = await browser.page.evaluate(RENDER, [text])
        assert ms < 8000, text[:40]


# --- the page --------------------------------------------------------------------------------------------------

LONG = "\n\n".join(f"Paragraph {i} of a long answer." for i in range(60))
IN_VIEW = """(selector) => {
    const { top, bottom, left, right } = document.querySelector(selector).getBoundingClientRect();
    return top >= 0 && bottom <= innerHeight && left >= 0 && right <= innerWidth;
}"""
AT_END = "() => scrollY + innerHeight >= document.documentElement.scrollHeight - 4"


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
async def test_the_box_is_always_visible_and_the_end_is_followed(browser: Browser, size: Any) -> None:
    page = browser.page
    await page.set_viewport_size(size)
    assert await page.evaluate(IN_VIEW, "#draft")
    width = "(selector) => document.querySelector(selector).getBoundingClientRect().width"
    assert await page.evaluate(width, ".chat-box") == await page.evaluate(width, ".chat")
    await ask(browser, LONG, "Paragraph 59")
    assert await page.evaluate(AT_END)
    await page.fill("#draft", f"{LONG}\n\n!wait {LONG}")
    await page.keyboard.press("Enter")
    await page.locator(".message.assistant").nth(1).get_by_text("Paragraph 59").wait_for()
    assert await page.evaluate(IN_VIEW, ".composer .primary")
    assert await page.evaluate(AT_END)
    await page.evaluate("() => scrollBy(0, -400)")
    await page.get_by_role("button", name="To the end of the conversation").wait_for()
    position = await page.evaluate("() => scrollY")
    Talker.gate.set()
    await page.locator(".message.assistant").nth(1).get_by_text("seed").wait_for()
    assert await page.evaluate("() => scrollY") == position, "the reader was taken away from the text"
    assert await page.evaluate(IN_VIEW, ".composer .primary")
    await browser.press("To the end of the conversation")
    assert await page.evaluate(AT_END)
    assert await page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


async def test_keys(browser: Browser) -> None:
    page = browser.page
    assert await browser.focused() == "textarea Message"
    await page.keyboard.type("one")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("two")
    assert await page.input_value("#draft") == "one\ntwo"
    await page.keyboard.press("Enter")
    await page.locator(".message.assistant").get_by_text("seed").wait_for()
    assert contents(Talker.requests[-1]) == [("user", "one\ntwo")]
    assert await page.input_value("#draft") == ""
    assert await browser.focused() == "textarea Message"
    await page.keyboard.press("Enter")  # nothing to send
    assert len(Talker.requests) == 1
    log = page.get_by_role("log", name="Conversation")
    assert (await log.get_attribute("aria-live"), await log.get_attribute("aria-busy")) == ("polite", "false")


RICH = """# Title

Text with **bold**, `code` and [a link](https://example.org/a).

- one
  1. two

> quoted

| name | a long column with many words in it | another long column with many words | number |
|------|:-:|--|-:|
| x | y | z | 1 |

```python
def function_with_a_long_name(argument, another_argument, a_third_argument):  # comment
    return "text" + 'text' * 20
```
"""


async def test_long_lines_of_code_show_at_which_edge_they_go_on(browser: Browser) -> None:
    image = pytest.importorskip("PIL.Image")
    await browser.page.set_viewport_size(PHONE)
    await ask(browser, f"```\n{'long ' * 30}\n```", "long")
    code = browser.page.locator(".code-block pre")

    async def edges() -> list[tuple[int, ...]]:
        """Return the colours of the empty strip above the text: at its left edge, middle and right edge."""
        picture = image.open(io.BytesIO(await code.screenshot())).convert("RGB")
        return [picture.getpixel((x, 4)) for x in (3, picture.width // 2, picture.width - 4)]

    left, middle, right = await edges()
    assert left == middle
    assert sum(right) < sum(middle) - 60
    await code.evaluate("each => { each.scrollLeft = each.scrollWidth; }")
    left, middle, right = await edges()
    assert sum(left) < sum(middle) - 60
    assert middle == right


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
async def test_no_violation_that_axe_finds_and_no_sideways_scroll(browser: Browser, size: Any) -> None:
    page = browser.page
    await page.set_viewport_size(size)
    found = await browser.find_violations()
    await ask(browser, RICH, "quoted")
    await browser.keep(f"chat-{size['width']}")
    found += await browser.find_violations()
    assert await page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    await page.fill("#draft", "!fail")
    await page.keyboard.press("Enter")
    await page.locator(".message.assistant [role=alert]").wait_for()
    await browser.press("Settings")
    await page.get_by_text("Stop, structured output, tools").click()
    await page.get_by_label("Token probabilities.").check()
    file = {"name": "red.png", "mimeType": "image/png", "buffer": RED}
    await page.set_input_files("input[type=file]", file)
    await page.get_by_role("img", name="Picture 1").wait_for()
    await ask(browser, "hello")
    await browser.press("Edit")
    found += await browser.find_violations()
    assert await page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert await page.evaluate(IN_VIEW, "#draft")
    assert found == []
