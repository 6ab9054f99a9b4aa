"""Trace and log settings over REST and gRPC: effects, inheritance by models, and changes that are refused."""

import asyncio
import io
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import pytest
import pytest_asyncio
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

import dragoman
from dragoman.system import logs
from e2e.otlp_receiver import OtlpReceiver, running_receiver
from rest.rest_server import RestServer, serving

SPAN = "b7ad6b7169203331"
X = {"inputs": [{"name": "x", "datatype": "FP64", "shape": [1], "data": [1.0]}]}
OPEN: dict[str, Any] = {"control_open": True, "grpc_port": 0}


class First(dragoman.Model):
    """Return the inputs; `headers` are those of the trace context of the last request."""

    placement = "inline"
    headers: ClassVar[dict[str, str]] = {}

    def infer(self, call: dragoman.Infer) -> Any:
        First.headers = dragoman.trace_headers()
        return dict(call.inputs)


class Second(First): ...


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with running_receiver() as found:
        yield found


@pytest_asyncio.fixture
async def traced(receiver: OtlpReceiver) -> AsyncIterator[RestServer]:
    receiver.spans.clear()
    async with serving(First, Second, tracing_endpoint=receiver.url, **OPEN) as server:
        yield server


@pytest_asyncio.fixture
async def plain() -> AsyncIterator[RestServer]:
    async with serving(First, **OPEN) as server:
        yield server


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Log to a text, as `dragoman serve` logs to standard error."""
    root, found = logging.getLogger(), io.StringIO()
    before = root.handlers, root.level
    for name in ("DRAGOMAN_LOG_FORMAT", "DRAGOMAN_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "stderr", found)
    logs.set_up("text")
    yield found
    root.handlers = before[0]
    root.setLevel(before[1])


async def traces(server: RestServer, changes: Any = None, model: str = "") -> Any:
    path = f"/v2/models/{model}/trace/setting" if model else "/v2/trace/setting"
    response = await server.request("GET" if changes is None else "POST", path, changes)
    return response.json if response.status == 200 else (response.status, response.error)


async def log(server: RestServer, changes: Any = None) -> Any:
    response = await server.request("GET" if changes is None else "POST", "/v2/logging", changes)
    return response.json if response.status == 200 else (response.status, response.error)


async def infer(server: RestServer, model: str, count: int = 1, headers: Any = None) -> None:
    for _ in range(count):
        assert (await server.request("POST", f"/v2/models/{model}/infer", X, headers)).status == 200


def shown(level: str = "TIMESTAMPS", rate: str = "1", count: str = "-1") -> dict[str, Any]:
    return {"trace_level": [level], "trace_rate": rate, "trace_count": count, "trace_mode": "opentelemetry"}


def models(receiver: OtlpReceiver) -> list[str]:
    """Return the models of the requests that were traced, in order."""
    spans = sorted(receiver.spans, key=lambda span: span.start)
    return [span.attributes["dragoman.model.name"] for span in spans if span.name == "POST /v2/models/{model}/infer"]


# --- traces ----------------------------------------------------------------------------------------------------------


async def test_settings_choose_the_requests_that_are_traced(receiver: OtlpReceiver) -> None:
    receiver.spans.clear()
    sampled = {"traceparent": f"00-{'1' * 32}-{SPAN}-01"}
    async with serving(First, Second, tracing_endpoint=receiver.url, **OPEN) as server:
        assert await traces(server) == shown()
        assert await traces(server, {"trace_level": ["OFF"]}) == shown("OFF")
        await infer(server, "First", 5)
        await infer(server, "First", 1, sampled)
        assert First.headers == sampled  # passed on as they are
        assert await traces(server, {"trace_level": ["TIMESTAMPS"]}, "Second") == shown()
        await infer(server, "First", 5)
        await infer(server, "First", 1, sampled)
        await infer(server, "Second", 2)  # traced
        assert await traces(server, {"trace_count": "2"}, "Second") == shown(count="2")
        await infer(server, "Second", 5)  # two of them
        assert await traces(server, None, "Second") == shown(count="0")
        assert await traces(server, {"trace_level": None, "trace_rate": "0"}) == shown(rate="0")
        await infer(server, "First", 5)
        await infer(server, "First", 1, sampled)  # traced
    assert models(receiver) == ["Second"] * 4 + ["First"]


@pytest.mark.parametrize("reset", [None, []])
async def test_a_level_that_is_reset_is_that_of_the_server(receiver: OtlpReceiver, reset: list[str] | None) -> None:
    async with serving(First, tracing_endpoint=receiver.url, **OPEN) as server:
        assert await traces(server, {"trace_level": ["OFF"]}) == shown("OFF")
        assert await traces(server, {"trace_level": ["TIMESTAMPS"]}, "First") == shown()
        assert await traces(server, {"trace_level": reset}, "First") == shown("OFF")


async def test_one_of_so_many_requests_is_traced(receiver: OtlpReceiver) -> None:
    """With a binomial distribution, 100 of 200 have a standard deviation of 7."""
    receiver.spans.clear()
    async with serving(First, Second, tracing_endpoint=receiver.url, **OPEN) as server:
        assert await traces(server, {"trace_rate": "2"}, "First") == shown(rate="2")
        await infer(server, "First", 200)
        await infer(server, "Second", 3)
    found = models(receiver)
    assert 58 <= found.count("First") <= 142
    assert found.count("Second") == 3


async def test_models_inherit_what_they_do_not_set(traced: RestServer) -> None:
    assert await traces(traced, {"trace_rate": "12", "log_frequency": None}, "First") == shown(rate="12")
    assert await traces(traced, {"trace_rate": "56", "trace_count": "78", "trace_level": "OFF"}) == shown(
        "OFF", "56", "78"
    )
    assert await traces(traced, None, "First") == shown("OFF", "12", "78")
    assert await traces(traced, None, "Second") == shown("OFF", "56", "78")
    assert await traces(traced, {"trace_rate": None, "trace_count": None}) == shown("OFF")
    assert await traces(traced, {"trace_rate": None}, "First") == shown("OFF")
    assert await traces(traced, b"") == shown("OFF")


async def test_the_clients_of_triton(traced: RestServer) -> None:
    def run() -> None:
        http = triton_http.InferenceServerClient(f"127.0.0.1:{traced.port}")
        assert http.update_trace_settings(model_name="First", settings={"trace_rate": "3"}) == shown(rate="3")
        assert http.get_trace_settings() == shown()
        http.close()
        grpc = triton_grpc.InferenceServerClient(traced.dragoman.grpc_url)
        found = grpc.get_trace_settings(model_name="First", as_json=True)["settings"]
        assert found["trace_rate"] == {"value": ["3"]}
        assert found["trace_level"] == {"value": ["TIMESTAMPS"]}
        found = grpc.update_trace_settings("First", {"trace_rate": None, "trace_count": "9"}, as_json=True)["settings"]
        assert (found["trace_rate"], found["trace_count"]) == ({"value": ["1"]}, {"value": ["9"]})
        with pytest.raises(InferenceServerException, match="Request for unknown model : Third"):
            grpc.get_trace_settings("Third")
        with pytest.raises(InferenceServerException, match="expect only 1 value for 'trace_rate'"):
            grpc.update_trace_settings(settings={"trace_rate": ["1", "2"]})
        grpc.close()

    await asyncio.to_thread(run)


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "file": ({"trace_file": "x"}, "trace file location can not be updated through network protocol"),
    "two levels": ({"trace_level": ["OFF", "TIMESTAMPS"]}, "Expect only one trace level 'OFF' is specified"),
    "tensors": ({"trace_level": ["TIMESTAMPS", "TENSORS"]}, "values of tensors are not traced"),
    "level": ({"trace_level": ["HIGH"]}, "expected TIMESTAMPS or OFF, got 'HIGH'"),
    "rate": ({"trace_rate": "often"}, "Unable to parse 'trace_rate', got: often"),
    "large": ({"trace_rate": "4294967296"}, r"value is out of range [ 0, 4294967295 ], got: 4294967296"),
    "count": ({"trace_count": "-2"}, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
    "number": ({"trace_rate": 5}, "'trace_rate': expected text, got 5"),
    "frequency": ({"log_frequency": "5"}, "'log_frequency': traces are exported to an OpenTelemetry collector only"),
    "mode": ({"trace_mode": "triton"}, "'trace_mode'"),
    "unknown": ({"trace_rat": "1"}, "unknown trace setting 'trace_rat'"),
}


async def test_invalid_trace_settings_change_nothing(traced: RestServer) -> None:
    for changes, error in INVALID.values():
        status, found = await traces(traced, {"trace_count": "5", **changes})
        assert (status, error in found) == (400, True), found
    assert await traces(traced) == shown()
    assert await traces(traced, None, "Third") == (400, "Request for unknown model : Third")


async def test_without_a_collector_tracing_cannot_be_switched_on(plain: RestServer) -> None:
    assert await traces(plain) == shown("OFF", "0")
    for changes in ({"trace_level": ["TIMESTAMPS"]}, {"trace_rate": "5"}):
        assert await traces(plain, changes) == (
            400, "traces are not exported; start the server with --tracing-endpoint",
        )  # fmt: skip
    assert await traces(plain, {"trace_level": ["OFF"]}) == shown("OFF", "0")


async def test_settings_need_the_control_token() -> None:
    async with serving(First, control_token="secret") as server:
        for call in (traces, log):
            assert (await call(server))[0] == 401
        response = await server.request("GET", "/v2/trace/setting", headers={"authorization": "Bearer secret"})
        assert response.json == shown("OFF", "0")
    async with serving(First) as server:
        assert [(await call(server))[0] for call in (traces, log)] == [403, 403]
        assert not {"trace", "logging"} & {*(await server.request("GET", "/v2")).json["extensions"]}


# --- log -------------------------------------------------------------------------------------------------------------

LOG = {
    "log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0,
    "log_format": "default",
}  # fmt: skip


def lines(written: io.StringIO) -> list[str]:
    """Log a line of each level and return their levels."""
    written.seek(0)
    written.truncate()
    for level in ("debug", "info", "warning", "error"):
        getattr(logging.getLogger("some"), level)("hello")
    return [line.split()[2].lower() for line in written.getvalue().splitlines() if "hello" in line]


async def test_levels_are_switched_one_by_one(written: io.StringIO, plain: RestServer) -> None:
    assert await log(plain) == LOG
    assert lines(written) == ["info", "warning", "error"]
    assert await log(plain, {"log_warning": False, "log_info": None}) == {**LOG, "log_warning": False}
    assert lines(written) == ["info", "error"]
    assert await log(plain, {"log_verbose_level": 3}) == {**LOG, "log_warning": False, "log_verbose_level": 3}
    assert (await log(plain, {"log_verbose_level": 2.0}))["log_verbose_level"] == 2
    assert lines(written) == ["debug", "info", "error"]
    none = {"log_info": False, "log_warning": False, "log_error": False, "log_verbose_level": 0}
    assert await log(plain, none) == {**LOG, **none}
    assert lines(written) == []
    assert await log(plain, {"log_error": True}) == {**LOG, **none, "log_error": True}
    assert lines(written) == ["error"]
    assert os.environ["DRAGOMAN_LOG_LEVEL"] == "error"
    plain.dragoman.reload()  # reads the settings anew
    assert await log(plain) == LOG


async def test_times_in_iso_8601(written: io.StringIO, plain: RestServer) -> None:
    assert await log(plain, {"log_format": "ISO8601"}) == {**LOG, "log_format": "ISO8601"}
    written.truncate(0)
    logging.getLogger("some").info("hello")
    date, _, rest = written.getvalue().strip("\0").partition(" ")
    assert (date[10], date[-1], len(date)) == ("T", "Z", 24)
    assert rest.startswith("INFO")
    logs.set_up("json")
    assert await log(plain) == {**LOG, "log_format": "ISO8601"}
    status, error = await log(plain, {"log_format": "default"})
    assert (status, error) == (400, "'log_format': the times of a log in JSON are in ISO 8601")


async def test_the_log_of_a_program_is_left_alone(plain: RestServer) -> None:
    assert await log(plain) == (
        400, "the log is set up by the program that runs the server, which has its settings",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"log_file": "x"}, "log file location can not be updated through network protocol"),
        ({"log_info": 1}, "expect boolean for 'log_info'"),
        ({"log_verbose_level": "1"}, "expect int32 for 'log_verbose_level'"),
        ({"log_verbose_level": -1}, "expect int32 for 'log_verbose_level'"),
        ({"log_format": 5}, "expect string for 'log_format'"),
        ({"log_format": "rfc"}, "invalid argument for log_format, got: rfc"),
        ({"log_warnings": True}, "unknown log setting 'log_warnings'"),
        ([1], "the request is not valid"),
    ],
)
async def test_invalid_log_settings_change_nothing(
    written: io.StringIO, plain: RestServer, changes: Any, error: str
) -> None:
    sent = {"log_error": False, **changes} if isinstance(changes, dict) else changes
    status, found = await log(plain, sent)
    assert (status, error in found) == (400, True), found
    assert await log(plain) == LOG


async def test_log_settings_over_grpc(written: io.StringIO, plain: RestServer) -> None:
    def run() -> None:
        client = triton_grpc.InferenceServerClient(plain.dragoman.grpc_url)
        changes = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
        found = client.update_log_settings(changes, as_json=True)["settings"]
        assert found["log_verbose_level"] == {"uint32_param": 2}
        assert found["log_format"] == {"string_param": "ISO8601"}
        assert found["log_file"] == {"string_param": ""}
        with pytest.raises(InferenceServerException, match="invalid argument for log_format, got: rfc"):
            client.update_log_settings({"log_format": "rfc"})
        client.close()

    await asyncio.to_thread(run)
    assert lines(written)[0] != "info"
    assert (await log(plain))["log_info"] is False
