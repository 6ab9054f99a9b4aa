"""Files and batches through the real SDK of OpenAI and over HTTP: what they answer, refuse and leave behind."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

import dragoman
from access.access_models import KeyFile

WAIT_S = 120.0
INFER = "/v2/models/double/infer"
# Bytes of a request body; an upload may have more.
MAX_BODY = 1 << 16


def double(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2 * x


class Slow(dragoman.Model):
    """Takes a while, unless a batch was cancelled meanwhile."""

    placement = "thread"
    inputs = (dragoman.TensorSpec("x", dragoman.FP64, (-1,)),)
    outputs = (dragoman.TensorSpec("y", dragoman.FP64, (-1,)),)

    def infer(self, call: dragoman.Infer) -> Any:
        time.sleep(0.3)
        return {"y": call.inputs["x"].data}


def line(custom_id: str, data: Any, url: str = INFER, name: str = "x", **fields: Any) -> dict[str, Any]:
    tensor = {"name": name, "shape": [len(data)], "datatype": "FP64", "data": data}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"inputs": [tensor]}, **fields}


def jsonl(*lines: Any) -> bytes:
    return b"".join((each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


KEYS: dict[str, str] = {}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[dragoman.Server]:
    keys = KeyFile(folder / "keys.toml")
    KEYS.update({name: keys.add(name, roles=["infer"]) for name in ("ann", "bob")})
    options: dict[str, Any] = {"http_port": 0, "grpc_port": -1, "max_body_bytes": MAX_BODY, "max_files": 20}
    with dragoman.Server(
        double, Slow, state=str(folder), api_keys=str(keys.path), max_file_bytes=1 << 20, max_batch_lines=50, **options
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: dragoman.Server) -> openai.OpenAI:
    return client_of(server, "ann")


def client_of(server: dragoman.Server, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http_url}/v1", api_key=KEYS[name], max_retries=0)


def ended(client: openai.OpenAI, batch: Any) -> Any:
    end_s = time.monotonic() + WAIT_S
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < end_s, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def run(client: openai.OpenAI, content: bytes, endpoint: Any = INFER, window: Any = "24h", **options: Any) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    try:
        batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **options)
    finally:
        client.files.delete(file.id)  # the batch keeps what it needs
    return ended(client, batch)


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def stored(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and "-files" in str(path.parent))


# --- batches -------------------------------------------------------------------------------------------------


def test_lines_are_answered_in_order_and_errors_have_a_file_of_their_own(client: openai.OpenAI) -> None:
    lines = [line(f"n-{n}", ["no number"] if n == 3 else [n]) for n in range(6)]
    batch = run(client, jsonl(*lines), metadata={"night": "1"})
    assert (batch.status, batch.metadata, batch.errors) == ("completed", {"night": "1"}, None)
    assert batch.request_counts.model_dump() == {"total": 6, "completed": 5, "failed": 1}
    answers = results(client, batch.output_file_id)
    assert [each["custom_id"] for each in answers] == ["n-0", "n-1", "n-2", "n-4", "n-5"]
    assert [each["response"]["body"]["outputs"][0]["data"] for each in answers] == [[0.0], [2.0], [4.0], [8.0], [10.0]]
    assert {each["response"]["status_code"] for each in answers} == {200}
    assert len({each["id"] for each in answers}) == 5
    (error,) = results(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"], error["error"]) == ("n-3", 400, None)
    assert batch.id in [each.id for each in client.batches.list()]


def test_a_line_goes_to_the_protocol_that_its_url_names(client: openai.OpenAI) -> None:
    v1 = {"custom_id": "v1", "method": "POST", "url": "/v1/models/double:predict", "body": {"instances": [1.5]}}
    missing = {"custom_id": "gone", "method": "POST", "url": "/v2/models/none/infer", "body": {"inputs": []}}
    point = {"name": "double", "input": [[1.0, 2.0]], "config": {}}
    umbridge = {"custom_id": "um", "method": "POST", "url": "/Evaluate", "body": point}
    batch = run(client, jsonl(line("v2", [1.0]), v1, missing, umbridge), endpoint="*")
    found = {each["custom_id"]: each["response"] for each in results(client, batch.output_file_id)}
    assert found["v1"]["body"] == {"predictions": [3.0]}
    assert found["v2"]["body"]["outputs"][0]["data"] == [2.0]
    errors = {each["custom_id"]: each["response"]["status_code"] for each in results(client, batch.error_file_id)}
    assert errors["gone"] == 404
    assert {*found, *errors} == {"v1", "v2", "gone", "um"}


@pytest.mark.parametrize(
    ("content", "code", "number", "param"),
    [
        (jsonl(line("a", [1]), b"{nonsense"), "invalid_json_line", 2, None),
        (jsonl(line("a", [1]), b"", line("a", [1])), "duplicate_custom_id", 3, "custom_id"),
        (jsonl({"custom_id": "a", "url": INFER}), "invalid_line", 1, "body"),
        (jsonl(line("a", [1]) | {"custom_id": 7}), "invalid_line", 1, "custom_id"),
        (jsonl(line("a", [1], method="GET")), "invalid_method", 1, "method"),
        (jsonl(line("a", [1], url="/v2/models/slow/infer")), "mismatched_endpoint", 1, "url"),
        (jsonl(line("a", [1]) | {"body": [1]}), "invalid_body", 1, "body"),
        (jsonl(*(line(f"{n}", [n]) for n in range(51))), "too_many_lines", None, None),
        (jsonl(line("a", [0] * MAX_BODY)), "line_too_large", 1, None),
        (b"\n \n", "empty_file", None, None),
    ],
)
def test_an_input_that_is_not_valid_fails_with_the_line(
    client: openai.OpenAI, content: bytes, code: str, number: int | None, param: str | None
) -> None:
    batch = run(client, content)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    problem = batch.errors.data[0]
    assert (problem.code, problem.line, problem.param) == (code, number, param)


@pytest.mark.parametrize("url", ["/v2/repository/models/double/unload", "/v1/files", "/nowhere", "/v1/batches"])
def test_lines_reach_models_only(client: openai.OpenAI, url: str) -> None:
    batch = run(client, jsonl({"custom_id": "a", "method": "POST", "url": url, "body": {}}), endpoint=url)
    assert batch.errors.data[0].code == "invalid_url"


def test_a_batch_that_is_cancelled_keeps_what_was_answered(client: openai.OpenAI) -> None:
    url = "/v2/models/Slow/infer"
    file = client.files.create(file=("in.jsonl", jsonl(*(line(f"{n}", [n], url) for n in range(40)))), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    while client.batches.retrieve(batch.id).request_counts.completed == 0:
        time.sleep(0.02)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    done = batch.request_counts.completed
    assert batch.status == "cancelled"
    assert 0 < done < 40
    assert [each["custom_id"] for each in results(client, batch.output_file_id)] == [f"{n}" for n in range(done)]
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.batches.cancel(batch.id)


def test_lines_that_are_not_sent_in_time_expire(client: openai.OpenAI) -> None:
    url = "/v2/models/Slow/infer"
    batch = run(client, jsonl(*(line(f"{n}", [n], url) for n in range(40))), endpoint=url, window="1s")
    assert batch.status == "expired"
    expired = [each for each in results(client, batch.error_file_id) if each["response"] is None]
    answered = results(client, batch.output_file_id)
    assert {each["error"]["code"] for each in expired} == {"batch_expired"}
    assert [each["custom_id"] for each in answered + expired] == [f"{n}" for n in range(40)]


# --- files ---------------------------------------------------------------------------------------------------


def test_a_file_is_described_listed_read_and_deleted(client: openai.OpenAI, folder: Path) -> None:
    content = bytes(range(256)) * 1024  # more than a request body may have, so it goes through a file
    file = client.files.create(
        file=("däta 1.bin", content), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.filename, file.bytes, file.purpose) == ("däta 1.bin", len(content), "user_data")
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == content
    other = client.files.create(file=("b", b""), purpose="user_data")
    assert client.files.content(other.id).content == b""
    assert [each.id for each in client.files.list(purpose="user_data", limit=1)] == [other.id, file.id]
    assert [each.id for each in client.files.list(purpose="user_data", order="asc")] == [file.id, other.id]
    for each in (file, other):
        assert client.files.delete(each.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(each.id)
    assert file.id not in stored(folder)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_an_upload_that_is_cut_off_leaves_nothing(
    server: dragoman.Server, client: openai.OpenAI, folder: Path, is_chunked: bool
) -> None:
    before = stored(folder), [each.id for each in client.files.list()]
    length = "transfer-encoding: chunked" if is_chunked else f"content-length: {1 << 20}"
    part = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + bytes(1 << 19)
    with socket.create_connection(("127.0.0.1", server.http_ports[0])) as connection:
        connection.sendall(
            f"POST /v1/files HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEYS['ann']}\r\n"
            f"content-type: multipart/form-data; boundary=b\r\n{length}\r\n\r\n".encode()
        )
        connection.sendall(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)
    assert (stored(folder), [each.id for each in client.files.list()]) == before


def test_an_upload_of_unknown_length_beyond_the_limit_is_rejected(server: dragoman.Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_ports[0], timeout=WAIT_S)
    headers = {"content-type": FORM, "authorization": f"Bearer {KEYS['ann']}"}
    chunks = (bytes(1 << 17) for _ in range(10))
    connection.request("POST", "/v1/files", chunks, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_an_upload_beyond_the_limit_is_rejected(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        client.files.create(file=("a", bytes((1 << 20) + 1)), purpose="batch")
    assert raised.value.status_code == 413


# --- what is refused -------------------------------------------------------------------------------------------


def post(server: dragoman.Server, path: str, body: bytes, content_type: str = "application/json") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_ports[0], timeout=WAIT_S)
    headers = {"content-type": content_type, "authorization": f"Bearer {KEYS['ann']}"}
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    found = json.loads(response.read())
    connection.close()
    return response.status, found | {"ignored": response.headers.get("x-ignored-parameters")}


BATCH = {"input_file_id": "file-1", "endpoint": INFER, "completion_window": "24h"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": 1}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"endpoint": "v1"}, "endpoint"),
        ({"completion_window": "1 day"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"seconds": 3600}}, "output_expires_after.anchor"),
    ],
)
def test_a_wrong_field_is_named(server: dragoman.Server, change: Mapping[str, Any], param: str) -> None:
    status, found = post(server, "/v1/batches", json.dumps({**BATCH, **change}).encode())
    assert (status, found["error"]["param"]) == (400, param)


def test_unknown_fields_are_reported(server: dragoman.Server, client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", jsonl(line("a", [1]))), purpose="batch")
    expires = {"anchor": "created_at", "seconds": 3600, "unit": "s"}
    body = {**BATCH, "input_file_id": file.id, "speed": 1, "output_expires_after": expires}
    status, found = post(server, "/v1/batches", json.dumps(body).encode())
    assert (status, found["ignored"]) == (200, "speed, output_expires_after.unit")
    ended(client, client.batches.retrieve(found["id"]))
    client.files.delete(file.id)


FORM = "multipart/form-data; boundary=b"


def form(**fields: str) -> bytes:
    parts = (f'--b\r\ncontent-disposition: form-data; name="{name}"{value}\r\n' for name, value in fields.items())
    return "".join(parts).encode() + b"--b--\r\n"


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{}", "application/json", 400),
        (b"--b\r\n", FORM, 400),
        (b"--b--\r\n", FORM, 400),
        (b"--b\r\nno headers\r\n--b--\r\n", FORM, 400),
        (form(file='; filename="a"\r\n\r\nx', purpose="\r\n\r\nparty"), FORM, 400),
        (form(file="\r\n\r\nx", purpose="\r\n\r\nbatch"), FORM, 400),
        (form(purpose="\r\n\r\nbatch"), FORM, 400),
        (form(file='; filename="a"\r\n\r\nx', purpose="\r\n\r\nbatch"), FORM, 200),
    ],
)
def test_a_form_that_is_not_complete_is_rejected(
    server: dragoman.Server, client: openai.OpenAI, body: bytes, content_type: str, status: int
) -> None:
    got, found = post(server, "/v1/files", body, content_type)
    assert got == status, found
    if status == 200:
        assert client.files.content(found["id"]).content == b"x"
        client.files.delete(found["id"])


def test_objects_of_other_keys_do_not_exist(server: dragoman.Server, client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", jsonl(line("a", [1]))), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=INFER, completion_window="24h")
    ended(client, batch)
    bob = client_of(server, "bob")
    attempts: list[Callable[[], Any]] = [
        lambda: bob.files.retrieve(file.id),
        lambda: bob.files.content(file.id),
        lambda: bob.files.delete(file.id),
        lambda: bob.batches.create(input_file_id=file.id, endpoint=INFER, completion_window="24h"),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
    ]
    for attempt in attempts:
        with pytest.raises(openai.NotFoundError):
            attempt()
    assert [*bob.files.list()] == [*bob.batches.list()] == []
    client.files.delete(file.id)


def test_a_key_that_has_as_much_as_it_may_gets_429(server: dragoman.Server) -> None:
    bob = client_of(server, "bob")
    files = [bob.files.create(file=("a", b"x"), purpose="batch") for _ in range(20)]
    with pytest.raises(openai.RateLimitError):
        bob.files.create(file=("a", b"x"), purpose="batch")
    for file in files:
        bob.files.delete(file.id)


def test_metrics_count_batches_and_lines(server: dragoman.Server, client: openai.OpenAI) -> None:
    names = {family.name for source in server.engine.metric_sources for family in source()}
    assert {
        "dragoman_batch_jobs",
        "dragoman_batches_ended_total",
        "dragoman_batch_lines_total",
        "dragoman_files",
    } <= names
