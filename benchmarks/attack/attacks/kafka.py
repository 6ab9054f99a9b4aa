"""Hostile messages of Kafka, beside a client that sends good ones, with the mock brokers of librdkafka."""

import json
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import confluent_kafka

from benchmarks.attack.attack import AimMissedError, Attack, Target

_ASKED, _ANSWERED = "asked", "answered"
_MESSAGES = 500
_ANSWERED_S = 60.0  # by when the good messages are answered
_BYTES = 20_000  # the mock brokers keep a few megabytes


@cache
def _producer() -> Any:
    """Return a client whose library runs the brokers."""
    return confluent_kafka.Producer({"bootstrap.servers": "", "test.mock.num.brokers": 1})


def _prepare(_: Path) -> Sequence[str]:
    """Start the brokers and return the flags."""
    metadata = _producer().list_topics()
    servers = ",".join(map(str, metadata.brokers.values())).split("/")[0]
    for topic in (_ASKED, _ANSWERED):
        _producer().list_topics(topic)  # creates it
    return "--kafka-servers", servers, "--kafka-topic-input", _ASKED, "--kafka-topic-output", _ANSWERED


def _good(number: int) -> bytes:
    tensor = {"name": "x", "datatype": "FP64", "shape": [1], "data": [number]}
    return json.dumps({"id": str(number), "inputs": [tensor]}).encode()


def _hostile() -> Sequence[tuple[bytes, Mapping[str, bytes]]]:
    """Return values and headers of messages."""
    own = {"mlserver-model": b"doubled"}
    return (
        (b"[" * _BYTES, own),
        (b'{"inputs":[' + b"{}," * (_BYTES // 3) + b"{}]}", own),
        (b'{"x":[' + b'{"a":{}},' * (_BYTES // 9) + b'1],"inputs":[]}', own),
        (b"\xff" * 1000, own),
        (b"", own),
        (_good(1), {}),
        (_good(1), {"mlserver-model": b"../../doubled?a=b#c"}),
        (_good(1), {"mlserver-model": b"\xff\x00" * 5000}),
        (_good(1), {**own, "mlserver-version": b"9" * 5000}),
        (_good(1), {**own, "mlserver-method": b"load"}),
        (_good(1), {**own, "inference-header-content-length": b"99999999999999999999"}),
        (_good(1), {**own, "content-encoding": b"gzip"}),
        (_good(1), {**own, "content-type": b"text/html"}),
        (_good(1), {**own, "x-request-id": b"\r\nx: y" * 1000}),
    )


def _messages(target: Target) -> str:
    """Send hostile messages with good ones between them: each good one is answered."""
    producer, hostile = _producer(), _hostile()
    responses = confluent_kafka.Consumer({"bootstrap.servers": target.argument("--kafka-servers"), "group.id": "a"})
    responses.assign([confluent_kafka.TopicPartition(_ANSWERED, n, 0) for n in range(4)])
    try:
        _send(producer, _good(0), {"mlserver-model": b"doubled"})
        missing = {0}
        while 0 in missing:  # until the server reads
            _receive(responses, missing)
            if missing:
                _send(producer, _good(0), {"mlserver-model": b"doubled"})
        missing = {1000 + n for n in range(_MESSAGES // 100)}
        began_s = time.monotonic()
        for number in range(_MESSAGES):
            _send(producer, *hostile[number % len(hostile)])
            if number % 100 == 0:
                _send(producer, _good(1000 + number // 100), {"mlserver-model": b"doubled"})
        while missing:
            if time.monotonic() - began_s > _ANSWERED_S:
                raise AimMissedError(f"{len(missing)} good messages have no answer after {_ANSWERED_S:g} s")
            _receive(responses, missing)
        took_s = time.monotonic() - began_s
    finally:
        responses.close()
    return f"{_MESSAGES:,} messages; the good ones between them were answered within {took_s:.1f} s"


def _send(producer: Any, value: bytes, headers: Mapping[str, bytes]) -> None:
    producer.produce(_ASKED, value, headers=list(headers.items()), partition=0)
    producer.poll(0)
    while len(producer) > 100:
        producer.poll(0.1)


def _receive(responses: Any, missing: set[int]) -> None:
    message = responses.poll(0.5)
    if message is None or message.error() is not None:
        return
    answer = json.loads(message.value())
    number = int(answer["id"]) if answer.get("id", "").isdecimal() else -1
    if answer["outputs"][0]["data"] == [2 * number]:
        missing.discard(number)


ATTACKS = (
    Attack(
        name="kafka-messages",
        about=f"{_MESSAGES:,} messages of Kafka that are broken, nested or for other models",
        run=_messages,
        prepare=_prepare,
        body_bytes=64 << 20,
    ),
)
