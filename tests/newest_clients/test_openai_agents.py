"""openai-agents: agents with tools, handoffs, sessions and typed output over both APIs of OpenAI."""

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

agents: Any = pytest.importorskip("agents")
openai: Any = pytest.importorskip("openai")

pytestmark = pytest.mark.filterwarnings("ignore")


class Color(BaseModel):
    name: Literal["red", "blue"]


@pytest.fixture(params=["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
def api(url: str, request: pytest.FixtureRequest) -> Any:
    """A function from the name of a model to the agents' model for one of the APIs."""
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    return lambda name: getattr(agents, request.param)(model=name, openai_client=client)


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: its name.
    """
    return f"rain in {city}"


async def test_an_agent_answers(api: Any) -> None:
    agent = agents.Agent(name="a", instructions="Obey.", model=api("Scripted"))
    result = await agents.Runner.run(agent, "say good day")
    assert result.final_output == "good day"


async def test_an_agent_calls_a_tool(api: Any) -> None:
    agent = agents.Agent(name="a", model=api("Scripted"), tools=[agents.function_tool(weather)])
    result = await agents.Runner.run(agent, 'call weather {"city": "Oslo"}')
    assert result.final_output == "the result is rain in Oslo"


async def test_streams(api: Any) -> None:
    agent = agents.Agent(name="a", model=api("Scripted"), tools=[agents.function_tool(weather)])
    result = agents.Runner.run_streamed(agent, 'call weather {"city": "Oslo"}')
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert result.final_output == "the result is rain in Oslo"
    assert "".join(deltas) == result.final_output


async def test_a_handoff(api: Any) -> None:
    other = agents.Agent(name="other", model=api("Scripted"))
    first = agents.Agent(name="first", model=api("Scripted"), handoffs=[other])
    result = await agents.Runner.run(first, "call transfer_to_other {}")
    assert result.last_agent is other
    assert json.loads(str(result.final_output).removeprefix("the result is "))["assistant"] == "other"


async def test_a_session(api: Any) -> None:
    agent, session = agents.Agent(name="a", model=api("Scripted")), agents.SQLiteSession("one")
    await agents.Runner.run(agent, "say good day", session=session)
    result = await agents.Runner.run(agent, "say good night", session=session)
    assert result.final_output == "good night"
    assert len(await session.get_items()) == 4


async def test_typed_output(api: Any) -> None:
    agent = agents.Agent(name="a", model=api("tiny-llama"), output_type=Color)
    result = await agents.Runner.run(agent, "a color")
    assert isinstance(result.final_output, Color)


async def test_stored_responses(url: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    model = agents.OpenAIResponsesModel(model="Scripted", openai_client=client)
    agent = agents.Agent(name="a", model=model)
    first = await agents.Runner.run(agent, "say good day")
    result = await agents.Runner.run(agent, "say good night", previous_response_id=first.last_response_id)
    assert result.final_output == "good night"
    items = await client.responses.input_items.list(result.last_response_id)
    assert len(items.data) >= 1
