"""`GET /v1/usage`: what keys have used by model and day, in the shape of OpenAI's usage API."""

import time
from datetime import UTC, datetime, timedelta
from itertools import groupby

import msgspec

from dragoman.core.calls import Request, Response
from dragoman.core.errors import InvalidInput
from dragoman.core.usage import ReadUsage, Usage, UsageRow
from dragoman.protocols.parameters import parse_query
from dragoman.protocols.wire import (
    JSON,
    EngineCall,
    HttpProtocol,
    HttpRequest,
    HttpResponse,
    Operation,
    Policy,
    Route,
    error_formatter,
    error_responses,
    message_response,
)

_DAY = timedelta(days=1)
_MOST_DAYS = 400
_LAST_S = 253402300799  # of the year 9999


class UsageResult(msgspec.Struct):
    """What a key has used of a model in a day: calls, tokens, and seconds that the model worked on them."""

    api_key_id: str
    model: str
    num_model_requests: int
    input_tokens: int
    output_tokens: int
    compute_seconds: float
    object: str = "usage.result"


class UsageBucket(msgspec.Struct):
    """A day, UTC: Unix times of its start and end."""

    start_time: int
    end_time: int
    results: list[UsageResult]
    object: str = "bucket"


class UsagePage(msgspec.Struct):
    data: list[UsageBucket]
    object: str = "page"
    has_more: bool = False
    next_page: None = None


_TIME = {"type": "integer", "minimum": 0}
_OPERATION = Operation(
    "Report requests, tokens and compute seconds by key, model and day",
    {200: {JSON: UsagePage}},
    query={"start_time": _TIME, "end_time": _TIME, "api_key_id": {"type": "string"}, "model": {"type": "string"}},
)


def protocol(_policy: Policy) -> HttpProtocol:
    """Return the table of the route. A key with the role read sees its own usage, one with the role admin all."""
    route = Route("GET", "/v1/usage", _usage, role="read", operation=_OPERATION)
    return HttpProtocol("usage", (route,), error_formatter(), errors=error_responses())


def _usage(http: HttpRequest) -> EngineCall[tuple[UsageRow, ...], HttpResponse]:
    """Return the call for the days from `start_time` (default: today) to before `end_time` (default: now)."""
    query = parse_query(http.query, ("start_time", "end_time", "api_key_id", "model"))
    now_s = int(time.time())
    end_s = _unix_time(query, "end_time", now_s + 1)
    start_s = _unix_time(query, "start_time", end_s - 1)
    if start_s >= end_s:
        raise InvalidInput(f"query parameters: expected start_time before end_time, got {start_s} and {end_s}")
    first, last = _date(start_s), _date(end_s - 1)
    if last - first >= _MOST_DAYS * _DAY:
        raise InvalidInput(f"query parameters: expected at most {_MOST_DAYS} days, got {(last - first).days + 1}")
    name, model = query.get("api_key_id"), query.get("model")

    def format_response(response: Response[tuple[UsageRow, ...]]) -> HttpResponse:
        rows = [row for row in response.answer if name in (None, row.name) and model in (None, row.model)]
        by_day = {day: [*of_day] for day, of_day in groupby(rows, key=lambda row: row.day)}
        days = [first + number * _DAY for number in range((last - first).days + 1)]
        return message_response(UsagePage([_bucket(day, by_day.get(f"{day:%Y-%m-%d}", [])) for day in days]))

    return EngineCall(Request(ReadUsage(f"{first:%Y-%m-%d}", f"{last:%Y-%m-%d}")), format_response)


def _unix_time(query: dict[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(_LAST_S)) or int(text) > _LAST_S:
        raise InvalidInput(f"query parameter '{name}': expected a Unix time in seconds, got {text[:32]!r}")
    return int(text)


def _date(time_s: int) -> datetime:
    return datetime.fromtimestamp(time_s, UTC).replace(hour=0, minute=0, second=0)


def _bucket(day: datetime, rows: list[UsageRow]) -> UsageBucket:
    start_s = int(day.timestamp())
    return UsageBucket(start_s, start_s + int(_DAY.total_seconds()), [_result(row) for row in rows])


def _result(row: UsageRow) -> UsageResult:
    usage: Usage = row.usage
    return UsageResult(row.name, row.model, *usage[:3], round(usage.compute_s, 6))
