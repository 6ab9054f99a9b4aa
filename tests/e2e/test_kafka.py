"""Messages of Kafka to the models of a folder of MLServer, with the mock brokers of librdkafka."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dragoman
from dragoman.core.errors import InvalidInput

kafka = pytest.importorskip("confluent_kafka")

TIMEOUT_S = 60.0
CODE = """
import asyncio

from mlserver import MLModel
from mlserver.errors import MLServerError
from mlserver.types import InferenceResponse, ResponseOutput


NAMES = ("x-user", "mlserver-model", "authorization")


class Doubled(MLModel):
    async def predict(self, payload):
        if self.settings.parameters.extra["wait"]:
            await asyncio.sleep(60)
        numbers = [2 * each for each in payload.inputs[0].data]
        if numbers[0] < 0:
            raise MLServerError("negative", 422)
        output = ResponseOutput(name="y", datatype="FP32", shape=[len(numbers)], data=numbers)
        seen = {name: str(payload.parameters.headers.get(name)) for name in NAMES}
        return InferenceResponse(model_name=self.name, outputs=[output], parameters=seen)
"""


def body(*numbers: float, **fields: Any) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(numbers)], "data": numbers}
    return json.dumps({**fields, "inputs": [tensor]}).encode()


class Broker:
    """The brokers, which run in the client library, and a client that sends requests and reads responses."""

    def __init__(self) -> None:
        self.producer = kafka.Producer({"bootstrap.servers": "", "test.mock.num.brokers": 1})
        self.servers = ",".join(map(str, self.producer.list_topics().brokers.values())).split("/")[0]
        self.responses = kafka.Consumer({"bootstrap.servers": self.servers, "group.id": "test"})

    def send(self, value: bytes, key: str | None = None, topic: str = "asked", **headers: str) -> None:
        names = {name.replace("_", "-"): text.encode() for name, text in headers.items()}
        self.producer.produce(topic, value, key, headers=list(names.items()), partition=0)
        assert self.producer.flush(TIMEOUT_S) == 0

    def receive(self) -> tuple[Any, Mapping[str, str], Any]:
        """Return key, headers and JSON of the next response."""
        message = wait_for(lambda: self.responses.poll(0.1))
        assert message.error() is None
        headers = {name: text.decode() for name, text in message.headers()}
        return message.key(), headers, json.loads(message.value())


def slow(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    time.sleep(0.05)
    return x


def wait_for(attempt: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + TIMEOUT_S
    while not (found := attempt()):
        assert time.monotonic() < end_s
    return found


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    found = Broker()
    for topic in ("asked", "answered", "shared"):
        found.producer.list_topics(topic)  # creates it
    found.responses.assign([kafka.TopicPartition("answered", n, 0) for n in range(4)])
    yield found
    found.responses.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "doubling.py").write_text(CODE)
    for name, waits in (("m", False), ("waiting", True)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "doubling.py").write_text(CODE)
        parameters = {"extra": {"wait": waits}}
        settings = {"name": name, "implementation": "doubling.Doubled", "parallel_workers": 0, "parameters": parameters}
        (tmp_path / name / "model-settings.json").write_text(json.dumps(settings))
    topics = {"kafka_enabled": True, "kafka_topic_input": "asked", "kafka_topic_output": "answered"}
    (tmp_path / "settings.json").write_text(json.dumps({**topics, "http_port": 0, "grpc_port": 0}))
    (tmp_path / "kafka.properties").write_text("# the smallest that librdkafka accepts\nmessage.max.bytes = 1000\n")
    return tmp_path


def test_messages_are_answered_as_by_mlserver(broker: Broker, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dragoman.kafka")
    invalid: tuple[tuple[bytes, dict[str, str], str], ...] = (
        (body(-1), {"mlserver_model": "m"}, 'status 400: {"error":"negative"}'),
        (b"{", {"mlserver_model": "m"}, "status 400"),
        (body(1), {}, "header 'mlserver-model' is missing"),
        (body(1), {"mlserver_model": "m", "mlserver_method": "load"}, "expected infer, got 'load'"),
        (body(1), {"mlserver_model": "n/\n"}, "status 404"),
        (body(1), {"mlserver_model": "m", "mlserver_version": "v9"}, "status 404"),
        (body(*range(1000)), {"mlserver_model": "m"}, "expected at most 2000 bytes, got 4964"),
        (body(*range(300)), {"mlserver_model": "m"}, "cannot be sent: KafkaError{code=MSG_SIZE_TOO_LARGE"),
    )
    broker.send(body(9, id="before the start"), mlserver_model="m")
    with dragoman.Server(
        str(folder),
        slow,
        http_port=0,
        grpc_port=-1,
        kafka_servers=broker.servers,
        kafka_properties=str(folder / "kafka.properties"),
        max_body_bytes=2000,
        max_queue=1,
        access_log=str(folder / "access.log"),
        access_log_format="json",
    ):
        wait_for(lambda: "reading 4 partitions of topic 'asked'" in caplog.text)
        for value, headers, _ in invalid:
            broker.send(value, **headers)
        named = {"x_user": "ada", "authorization": "secret", "x_request_id": "ordered"}
        broker.send(body(1, 2, id="own"), mlserver_model="m", **named)
        broker.send(body(3, id="own"), "key", mlserver_model="m")
        found = [broker.receive() for _ in range(2)]
        wait_for(lambda: caplog.text.count("message at partition 0, offset") == len(invalid))
        # More than its queue holds: asked again until the model is free.
        for _ in range(6):
            broker.send(body(4), "slow", mlserver_model="slow")
        assert [broker.receive()[0] for _ in range(6)] == [b"slow"] * 6
    assert [message for _, _, message in invalid if message not in caplog.text] == []
    by_key = {key: (headers, response) for key, headers, response in found}
    assert {*by_key} == {b"own", b"key"}
    sent_headers, response = by_key[b"own"]
    sent = [sent_headers[name] for name in ("Ce-Modelid", "Ce-Id", "content-type")]
    assert sent == ["m", "own", "application/json"]
    assert (response["id"], response["outputs"][0]["data"]) == ("own", [2.0, 4.0])
    assert response["parameters"] == {"x-user": "ada", "mlserver-model": "m", "authorization": "None"}
    sent_headers, response = by_key[b"key"]  # the key has precedence over the id in the body
    assert (sent_headers["Ce-Id"], response["id"], response["outputs"][0]["data"]) == ("key", "key", [6.0])
    lines = [json.loads(line) for line in (folder / "access.log").read_text().splitlines()]
    logged = [(line["protocol"], line["path"], line["model"], line["status"], line["request_id"]) for line in lines]
    path = "/v2/models/m/infer"
    assert logged.count(("kafka", path, "m", 200, "ordered")) == 1
    statuses = {status for protocol, where, _, status, _ in logged if (protocol, where) == ("kafka", path)}
    assert statuses == {200, 400}
    assert sum(line["model"] == "slow" and line["status"] == 200 for line in lines) == 6
    (own,) = (line for line in lines if line["request_id"] == "ordered")
    assert own["received_bytes"] == len(body(1, 2, id="own"))
    assert own["compute_ms"] > 0


def test_a_group_continues_after_the_last_message_that_was_answered(broker: Broker, folder: Path) -> None:
    """Joining a group takes the 3 s by which brokers delay its first rebalance."""
    consumer = kafka.Consumer({"bootstrap.servers": broker.servers, "group.id": "g", "enable.auto.commit": False})
    consumer.commit(offsets=[kafka.TopicPartition("shared", n, 0) for n in range(4)], asynchronous=False)
    for number in range(3):
        broker.send(body(number, id=str(number)), topic="shared", mlserver_model="m")
    broker.send(body(0), topic="shared", mlserver_model="waiting")
    broker.send(body(4, id="4"), topic="shared", mlserver_model="m")
    with dragoman.Server(
        str(folder),
        http_port=0,
        grpc_port=-1,
        kafka_servers=broker.servers,
        kafka_topic_input="shared",
        kafka_group="g",
    ):
        found = [broker.receive() for _ in range(4)]
    assert sorted(key for key, _, _ in found) == [b"0", b"1", b"2", b"4"]
    # The fourth message has no response yet: after a restart it is read again.
    committed = consumer.committed([kafka.TopicPartition("shared", 0)], timeout=TIMEOUT_S)
    assert committed[0].offset == 3
    consumer.close()


def test_invalid_properties_are_reported(folder: Path) -> None:
    file = folder / "kafka.properties"
    file.write_text("# comment\nno.such.property = 1\n")
    with pytest.raises(InvalidInput, match=r"'kafka_properties': .*no\.such\.property"):
        dragoman.Server(str(folder), kafka_servers="127.0.0.1:1", kafka_properties=str(file))
    file.write_text("security.protocol\n")
    with pytest.raises(InvalidInput, match="expected lines of name=value"):
        dragoman.Server(str(folder), kafka_servers="127.0.0.1:1", kafka_properties=str(file))
    with pytest.raises(InvalidInput, match=r"'kafka_properties': .*cannot be read"):
        dragoman.Server(str(folder), kafka_servers="127.0.0.1:1", kafka_properties=str(folder / "none"))


@pytest.mark.parametrize("topic", ["", "a b", ".", "x" * 250])
@pytest.mark.parametrize("name", ["kafka_topic_input", "kafka_topic_output"])
def test_invalid_topics_are_reported(name: str, topic: str) -> None:
    settings: dict[str, Any] = {name: topic}
    with pytest.raises(InvalidInput, match=f"'{name}': expected 1 to 249 letters, digits, .*, got '{topic[:50]}"):
        dragoman.Server(slow, kafka_servers="127.0.0.1:1", **settings)


def test_a_missing_topic_is_logged(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    with dragoman.Server(slow, http_port=0, grpc_port=-1, kafka_servers=broker.servers, kafka_topic_input="missing"):
        wait_for(lambda: caplog.messages)
        assert "topic 'missing' cannot be read: Broker: Unknown topic or partition; next attempt in 30 s" in caplog.text


def test_files_beside_models_cannot_name_brokers(folder: Path) -> None:
    (folder / "dragoman.toml").write_text('[server]\nkafka_servers = "127.0.0.1:9092"\n')
    with pytest.raises(InvalidInput, match="'kafka_servers' cannot be set in a file beside models"):
        dragoman.Server(str(folder))
