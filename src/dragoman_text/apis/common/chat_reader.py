"""Chats for APIs other than OpenAI's: the request from a translated body, and the parts of the one completion."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.core.calls import Response
from dragoman.core.text import FinishReason, Generation, Token
from dragoman.formats.exact_json import load_json
from dragoman_text.apis.common.chat import ChatRequest
from dragoman_text.apis.common.completion_parser import CompletionParser
from dragoman_text.apis.common.openai_format import TokenUsage
from dragoman_text.apis.common.tools import Reasoning, ToolCallDelta


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a tool call as an object; text that is not one is kept as `invalid_json`."""
    try:
        value = load_json((text or "{}").encode(errors="replace"))
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"invalid_json": text}


def join_system_messages(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with all leading system messages joined into one: many templates accept only one."""
    count = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    if count < 2:
        return list(messages)
    text = "\n\n".join(each["content"] for each in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


class ChatReader:
    """Reads the completion of a chat with one choice, whole or in chunks."""

    def __init__(self, request: ChatRequest) -> None:
        self._tools = request.tools
        self._splits_reasoning = request.parameters.options["splits_reasoning"]
        self._parser: CompletionParser | None = None
        self.model = ""
        self.usage = TokenUsage()
        self.finish: FinishReason = ""
        self.stop: str | int | None = None
        self.has_calls = False
        self.tokens: Sequence[Token] = ()  # of the last chunk

    def read(
        self, response: Response[Generation], *, is_whole: bool = False
    ) -> Sequence[str | Reasoning | ToolCallDelta]:
        """Return the parts of a chunk, in their order."""
        generation = response.answer
        self.model = response.model
        self.usage.add(generation)
        if self._parser is None:
            prompt = generation.prompts[0].text if generation.prompts else ""
            self._parser = CompletionParser(self._tools, prompt, splits_reasoning=self._splits_reasoning)
        parts: list[str | Reasoning | ToolCallDelta] = []
        self.tokens = tuple(token for text in generation.texts for token in text.tokens)
        for text in generation.texts:
            parts += self._parser.feed(text, is_whole=is_whole).parts
            self.finish, self.stop = text.finish, text.stop
        self.usage.reasoning[0] = self._parser.reasoning_tokens
        self.has_calls = self.has_calls or any(isinstance(part, ToolCallDelta) for part in parts)
        return parts
