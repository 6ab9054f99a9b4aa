"""`dragoman chat` on a terminal: commands, lines, Markdown, history, and answers that are stopped."""

import asyncio
import base64
import json
import os
import re
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.terminals import Terminal, screen_of
from dragoman_text.cli.markdown import split_blocks

MARKDOWN = "# Title\n\nSome **bold** text.\n\n```python\nx = 1\n\ny = 2\n```\n\n1. one\n2. two\n"


class ChatServer:
    """A server of the OpenAI API that answers each message with its last words, or as it is told."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.ids = ["small", "large"]

    async def respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if " /v2/models/" in head:
            known = " /v2/models/small " in head
            values = {"temperature": 0.6, "top_p": "\x1b[31m", "max_new_tokens": 512}
            body = json.dumps({"name": "small", "details": {"default_parameters": values}}).encode()
            await self._send(writer, body if known else b"{}", "200 OK" if known else "404 Not Found")
            return
        if "/v1/chat/completions" not in head:
            models = [{"id": each} for each in self.ids] + [{"id": "small:pirate", "parent": "small"}]
            await self._send(writer, json.dumps({"data": models}).encode())
            return
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None
        body = json.loads(await reader.readexactly(int(length[1])))
        self.bodies.append(body)
        content = body["messages"][-1]["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        if text == "fail":
            await self._send(writer, _event({"error": {"message": "out of ink"}}))
            return
        if text == "gone":
            message = json.dumps({"error": {"message": "unknown model 'small'; there are large"}}).encode()
            await self._send(writer, message, "404 Not Found")
            return
        answer = MARKDOWN if text == "markdown" else f"re: {text}"
        chunks = [answer[i : i + 3] for i in range(0, len(answer), 3)]
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        for chunk in chunks:
            writer.write(_event({"choices": [{"delta": {"content": chunk}}]}))
            await writer.drain()
        if text == "wait":
            await reader.read()  # until the client leaves
        writer.write(_event({"choices": [{"delta": {}, "finish_reason": "stop"}]}))
        writer.close()

    @staticmethod
    async def _send(writer: asyncio.StreamWriter, body: bytes, status: str = "200 OK") -> None:
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        writer.close()


def _event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


class Chat:
    """The command on a terminal."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal

    async def send(self, line: str, expected: str) -> str:
        """Send a line, and return what is shown up to the next prompt, once that matches a pattern."""
        start = len(self.terminal.raw)
        self.terminal.send(line)
        return await self.wait_for(expected, start)

    async def wait_for(self, expected: str, start: int) -> str:
        pattern = re.compile(expected + r".*> $", re.DOTALL)
        for _ in range(600):
            shown = plain(self.terminal.raw[start:])
            if pattern.search(shown):
                return shown
            await asyncio.sleep(0.1)
        raise AssertionError(f"{expected!r} not found in {shown!r}")


def plain(text: str) -> str:
    return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07)", "", text).replace("\r", "")


@asynccontextmanager
async def chatting(folder: Path, *words: str) -> AsyncIterator[tuple[Chat, ChatServer]]:
    """Yield a chat with a server; the user's state is in the folder."""
    own = ChatServer()
    server = await asyncio.start_server(own.respond, "127.0.0.1", 0)
    async with server:
        own.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        command = [sys.executable, "-m", "dragoman", "chat", own.url, "small", *words]
        with Terminal(command, {"XDG_STATE_HOME": str(folder)}, folder) as terminal:
            chat = Chat(terminal)
            await chat.wait_for("small at .*/help lists the commands", 0)
            yield chat, own


def contents(server: ChatServer) -> list[tuple[str, Any]]:
    return [(each["role"], each["content"]) for each in server.bodies[-1]["messages"]]


async def test_commands(tmp_path: Path) -> None:
    async with chatting(tmp_path, "--system", "short") as (chat, server):
        shown = await chat.send("/set", r"temperature +\(0.6, default of the server\)")
        assert re.search(r"  top_p +\(default of the server\)\n  max_tokens +\(512, default of the server\)\n", shown)
        for word in ("/help", "/?"):
            shown = await chat.send(word, "Ctrl-C +stops an answer")
            assert all(
                name in shown for name in ("/retry", "/set [NAME [VALUE]]", "/image FILE", "/save FILE", "/copy")
            )
        await chat.send("/retyr", "unknown command /retyr; did you mean '/retry'")
        await chat.send("/retry", "no message to ask again")
        await chat.send("one", "re: one")
        assert contents(server) == [("system", "short"), ("user", "one")]
        await chat.send("/set temperature 0.2", "temperature: 0.2")
        await chat.send("/set max-tokens 5", "max_tokens: 5")
        await chat.send("/set seed 1.5", "seed: expected a whole number, or default, got '1.5'")
        await chat.send("/set temprature 1", "unknown setting 'temprature'; did you mean 'temperature'")
        await chat.send("/set", r"temperature +0.2\n  top_p +\(default of the server\)")
        await chat.send("/retry", "re: one")
        assert contents(server) == [("system", "short"), ("user", "one")]  # not twice
        assert (server.bodies[-1]["temperature"], server.bodies[-1]["max_tokens"]) == (0.2, 5)
        shown = await chat.send("/set temperature", r"expected a number from 0, such as 0.7, or default")
        assert re.search(r"  temperature +0.2\n", shown)
        await chat.send("/set seed", r"  seed +\(default of the server\)\n  expected a whole number, or default")
        await chat.send("/set temperature default", "temperature: default of the server")
        await chat.send("two", "re: two")
        assert "temperature" not in server.bodies[-1]
        assert contents(server)[1:] == [("user", "one"), ("assistant", "re: one"), ("user", "two")]
        await chat.send("/model lrge", "has no language model 'lrge'; did you mean 'large'")
        await chat.send("/model", r"\* small\n  large")
        await chat.send("/model large", r"\(large\)")
        await chat.send("/set max_tokens default", "max_tokens: default of the server")
        await chat.send("/set", r"max_tokens +\(default of the server\)")  # the server does not say
        await chat.send("fail", "dragoman: out of ink")
        await chat.send("three", "re: three")
        assert server.bodies[-1]["model"] == "large"
        assert "fail" not in [content for _, content in contents(server)]
        await chat.send("/system", "without system prompt")
        await chat.send("four", "re: four")
        assert contents(server) == [("user", "four")]
        chat.terminal.send("/exit")
        assert await asyncio.to_thread(chat.terminal.wait_for_exit) == 0


async def test_an_error_that_names_the_models_is_shown_as_it_is(tmp_path: Path) -> None:
    async with chatting(tmp_path) as (chat, server):
        server.ids = ["iris", "large"]  # the model is unloaded
        shown = await chat.send("gone", "unknown model 'small'; there are large")
        assert "expected" not in shown
        assert "did you mean" not in shown


async def test_files(tmp_path: Path) -> None:
    async with chatting(tmp_path) as (chat, server):
        await chat.send("/copy", "no answer to copy")
        await chat.send("hello", "re: hello")
        start = len(chat.terminal.raw)
        await chat.send("/copy", "9 characters sent")
        assert f"\x1b]52;c;{base64.b64encode(b're: hello').decode()}\x07" in chat.terminal.raw[start:]
        await chat.send("/save talk.md", "2 messages in talk.md")
        assert (tmp_path / "talk.md").read_text() == "## user\n\nhello\n\n## assistant\n\nre: hello\n"
        await chat.send("/save talk.md", "'talk.md' exists: expected another name")
        await chat.send("/save talk.json", "2 messages")
        assert json.loads((tmp_path / "talk.json").read_text())["messages"][1]["content"] == "re: hello"
        (tmp_path / "p.png").write_bytes(b"pixels")
        await chat.send("/image talk.md", "expected a picture")
        await chat.send("/image none.png", "'none.png' cannot be read: No such file")
        await chat.send("/image p.png", "1 picture for the next message")
        await chat.send("what is it?", "re: what is it?")
        url = f"data:image/png;base64,{base64.b64encode(b'pixels').decode()}"
        expected = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
        assert contents(server)[-1] == ("user", expected)
        await chat.send("and now?", "re: and now")
        assert contents(server)[-1] == ("user", "and now?")


async def test_messages_of_several_lines(tmp_path: Path) -> None:
    async with chatting(tmp_path) as (chat, server):
        chat.terminal.send('"""a')
        await asyncio.to_thread(chat.terminal.wait_for, r"\.\.\. $")
        chat.terminal.send("/exit")
        await chat.send('b"""', "re: a")
        assert contents(server)[-1] == ("user", "a\n/exit\nb")
        chat.terminal.send("c\\")
        await chat.send("d", "re: c")
        assert contents(server)[-1] == ("user", "c\nd")


async def test_an_answer_that_is_stopped_stays_in_the_conversation(tmp_path: Path) -> None:
    async with chatting(tmp_path) as (chat, server):
        start = len(chat.terminal.raw)
        chat.terminal.send("wait")
        await asyncio.to_thread(chat.terminal.wait_for, "re: wait")
        chat.terminal.popen.send_signal(signal.SIGINT)
        await chat.wait_for(r"re: wait.*\(stopped\)", start)
        await chat.send("next", "re: next")
        assert contents(server) == [("user", "wait"), ("assistant", "re: wait"), ("user", "next")]
        chat.terminal.popen.send_signal(signal.SIGINT)  # at the prompt
        await chat.wait_for(r"\(Ctrl-D or /exit ends\)", start)
        os.write(chat.terminal.handle, b"\x04")
        assert await asyncio.to_thread(chat.terminal.wait_for_exit) == 0


async def test_the_history_is_a_file_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "dragoman" / "chat_history"
    async with chatting(tmp_path, "--no-history") as (chat, _):
        await chat.send("hidden", "re: hidden")
    assert not file.exists()
    async with chatting(tmp_path) as (chat, _):
        await chat.send("first", "re: first")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    async with chatting(tmp_path) as (chat, server):
        os.write(chat.terminal.handle, b"\x1b[A")  # the arrow
        await chat.send("", "re: first")
        assert contents(server)[-1] == ("user", "first")
    assert file.read_text().splitlines()[-2:] == ["first", "first"][-file.read_text().count("first") :]


async def test_markdown_on_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    async with chatting(tmp_path) as (chat, _):
        start = len(chat.terminal.raw)
        await chat.send("markdown", "2 two")
        raw = chat.terminal.raw[start:]
        assert "\x1b[1mbold\x1b[0m" in raw
        final = screen_of(raw)
        assert "```" not in final
        assert "**" not in final
        assert re.search(r"Title.*Some bold text\..*x = 1.*y = 2.*1 one.*2 two", final, re.DOTALL)
        assert final.count("Some bold text.") == 1
    async with chatting(tmp_path, "--no-markdown") as (chat, _):
        shown = await chat.send("markdown", "2. two")
        assert "Some **bold** text." in shown


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("a\n", ""),
        ("a\n\n", ""),
        ("a\n\nb", "a\n\n"),
        ("- a\n\n  more\n", ""),
        ("```\na\n\nb\n", ""),
        ("```\na\n```\n", "```\na\n```\n"),
        ("```\na\n```", ""),
        ("````\n```\n\nb\n````\nc", "````\n```\n\nb\n````\n"),
        ("~~~\n```\n\nb\n", ""),
        ("a\n\nb\n\nc", "a\n\nb\n\n"),
    ],
)
def test_blocks_are_complete_at_their_end(text: str, complete: str) -> None:
    assert split_blocks(text) == (complete, text[len(complete) :])
