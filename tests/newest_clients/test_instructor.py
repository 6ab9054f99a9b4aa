"""instructor: objects of pydantic through tools, JSON, JSON schemas and Responses."""

from collections.abc import Iterable
from typing import Any, Literal

import pytest
from pydantic import BaseModel

instructor: Any = pytest.importorskip("instructor")
openai: Any = pytest.importorskip("openai")

pytestmark = pytest.mark.filterwarnings("ignore")


class Color(BaseModel):
    """A color and how much of it."""

    name: Literal["red", "blue"]
    amount: Literal[1, 2]


QUESTION: list[Any] = [{"role": "user", "content": "a color"}]


def client(url: str, mode: Any) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_constrained_modes(url: str, mode: str) -> None:
    color = client(url, instructor.Mode[mode]).chat.completions.create(
        model="tiny-llama", messages=QUESTION, response_model=Color, max_tokens=100, max_retries=0
    )
    assert isinstance(color, Color)


def test_responses(url: str) -> None:
    color = client(url, instructor.Mode.RESPONSES_TOOLS).responses.create(
        model="tiny-llama", input="a color", response_model=Color, max_retries=0
    )
    assert isinstance(color, Color)


def test_json(url: str) -> None:
    said: list[Any] = [{"role": "user", "content": 'say {"name": "red", "amount": 2}'}]
    color = client(url, instructor.Mode.JSON).chat.completions.create(
        model="Scripted", messages=said, response_model=Color, max_retries=0
    )
    assert (color.name, color.amount) == ("red", 2)


def test_partial_objects(url: str) -> None:
    found = list(
        client(url, instructor.Mode.TOOLS).chat.completions.create_partial(
            model="tiny-llama", messages=QUESTION, response_model=Color, max_tokens=100, max_retries=0
        )
    )
    assert len(found) > 1
    Color.model_validate(found[-1].model_dump())


def test_several_objects(url: str) -> None:
    said: list[Any] = [
        {"role": "user", "content": 'say {"tasks": [{"name": "red", "amount": 2}, {"name": "blue", "amount": 1}]}'}
    ]
    found = client(url, instructor.Mode.JSON).chat.completions.create(
        model="Scripted", messages=said, response_model=Iterable[Color], max_retries=0
    )
    assert [(color.name, color.amount) for color in found] == [("red", 2), ("blue", 1)]


def test_anthropic(url: str) -> None:
    anthropic: Any = pytest.importorskip("anthropic")
    tools = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="-", max_retries=0))
    color = tools.messages.create(
        model="tiny-llama", max_tokens=100, messages=QUESTION, response_model=Color, max_retries=0
    )
    assert isinstance(color, Color)
