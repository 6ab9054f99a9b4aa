"""Kafka input: inference requests from one topic, their responses to another, in the messages of MLServer.

The value of a message is the JSON of an Open Inference request, its headers name the model. librdkafka is polled in a
thread; requests are answered in the event loop of the server.
"""

import asyncio
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from dragoman.core.calls import DescribeModels, Request
from dragoman.core.errors import InvalidInput
from dragoman.core.foreign_code import is_interruption
from dragoman.core.options import KafkaOptions
from dragoman.engine.call_handler import CallHandler
from dragoman.protocols.wire import JSON_TYPE, HttpRequest
from dragoman.system.request_context import client_request_id, new_context
from dragoman.transports.application import Application
from dragoman.transports.response_writer import CollectingWriter

log = logging.getLogger("dragoman.kafka")

MODEL_HEADER, VERSION_HEADER, METHOD_HEADER = "mlserver-model", "mlserver-version", "mlserver-method"
_MAX_IN_FLIGHT = 256  # messages whose responses have not been delivered
_POLL_S = 0.1
_FLUSH_S = 2.0
_METADATA_S = 10.0
_CHECK_S = 30.0  # between looks for new partitions
# A model that is overloaded or not ready is asked again for this time.
_RETRY_S, _FIRST_RETRY_S = 30.0, 0.05
_UNAVAILABLE = 503
_LOGGED_CHARACTERS = 500
_TOPIC = re.compile(r"(?!\.\.?$)[a-zA-Z0-9._-]{1,249}")
_Fields = dict[str, msgspec.Raw]


class KafkaInput:
    """Reads messages from `start` to `begin_drain`, and sends the responses of those that were read.

    Without a group every server gets all messages that are sent while it runs, as with MLServer. With a group a message
    is committed when its response has been delivered, so it is answered at least once.

    Raises InvalidInput if the client library is missing or a topic or property is invalid.
    make_application: called by `start`. What observes its requests is closed with the input.
    """

    def __init__(self, engine: CallHandler, make_application: Callable[[], Application], options: KafkaOptions) -> None:
        self._library, self._consumer, self._producer = open_clients(options)
        self._engine = engine
        self._make_application = make_application
        self._application: Application | None = None  # until it is started
        self._options = options
        self._thread = threading.Thread(target=self._poll, name="dragoman-kafka", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._drains, self._ends = threading.Event(), threading.Event()
        self._checked_s = -_CHECK_S
        self._in_flight = 0  # changed by the thread only
        self._finished: deque[Any] = deque()  # messages that need no further work
        self._offsets: dict[int, dict[int, bool]] = {}  # by partition: offsets in flight and whether they are finished

    async def start(self) -> None:
        """Begin to read messages once every model has been tried; returns at once."""
        self._application = self._make_application()
        self._loop = asyncio.get_running_loop()
        self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        await self._engine.call(Request(DescribeModels(after_start=True)))
        self._thread.start()

    def begin_drain(self) -> None:
        """Read no further messages."""
        self._drains.set()
        if self._starting is not None:
            self._starting.cancel()

    async def close(self, grace_s: float) -> None:
        """Send the responses of calls that are finished, for at most `grace_s` seconds, and disconnect."""
        self.begin_drain()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for task in self._tasks:
            task.cancel()
        self._ends.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        if self._application is not None and (observation := self._application.executor.observation) is not None:
            await asyncio.to_thread(observation.close)

    # --- in the thread -----------------------------------------------------------------------------------------

    def _poll(self) -> None:
        if self._options.kafka_group:
            self._consumer.subscribe([self._options.kafka_topic_input], on_assign=self._assign)
        while not self._ends.is_set():
            try:
                self._poll_once()
            except self._library.KafkaException as error:
                log.error("Kafka: %s", error)
                self._ends.wait(_POLL_S)
            except BaseException:  # the thread must not end before the server
                log.exception("unexpected error while reading topic '%s'", self._options.kafka_topic_input)
                self._ends.wait(_POLL_S)
        self._producer.flush(_FLUSH_S)
        self._settle()
        self._consumer.close()

    def _poll_once(self) -> None:
        self._producer.poll(0)
        self._settle()
        if not self._options.kafka_group and time.monotonic() - self._checked_s > _CHECK_S:
            self._assign_all()
        if self._drains.is_set() or self._in_flight >= _MAX_IN_FLIGHT:
            self._producer.poll(_POLL_S)
        elif (message := self._consumer.poll(_POLL_S)) is not None:
            self._receive(message)

    def _assign(self, consumer: Any, partitions: list[Any]) -> None:
        self._offsets = {partition.partition: {} for partition in partitions}
        consumer.assign(partitions)
        log.info("reading %d partitions of topic '%s'", len(partitions), self._options.kafka_topic_input)

    def _assign_all(self) -> None:
        """Read all partitions: from their end, or those that were added later from their beginning."""
        self._checked_s = time.monotonic()
        topic, library = self._options.kafka_topic_input, self._library
        described = self._consumer.list_topics(topic, timeout=_METADATA_S).topics[topic]
        added = [number for number in described.partitions if number not in self._offsets]
        if described.error is not None:
            log.warning("topic '%s' cannot be read: %s; next attempt in %g s", topic, described.error.str(), _CHECK_S)
        if described.error is not None or not added:
            return
        found = [library.TopicPartition(topic, number) for number in added]
        for partition in found:
            ends = self._consumer.get_watermark_offsets(partition, timeout=_METADATA_S)
            partition.offset = library.OFFSET_BEGINNING if self._offsets else ends[1]
        self._consumer.incremental_assign(found)
        self._offsets |= {number: {} for number in added}
        log.info("reading %d partitions of topic '%s'", len(self._offsets), topic)

    def _receive(self, message: Any) -> None:
        if message.error() is not None:
            log.warning("topic '%s': %s", self._options.kafka_topic_input, message.error())
            return
        self._in_flight += 1
        self._offsets.setdefault(message.partition(), {})[message.offset()] = False
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin, message)

    def _settle(self) -> None:
        """Mark messages as finished, and commit the offset before the first unfinished one."""
        while self._finished:
            message = self._finished.popleft()
            self._in_flight -= 1
            partition = message.partition()
            offsets = self._offsets.get(partition, {})
            if message.offset() not in offsets:  # the partition was taken away, and perhaps given back
                continue
            offsets[message.offset()] = True
            done = -1
            for offset, is_finished in [*offsets.items()]:
                if not is_finished:
                    break
                done = offset
                del offsets[offset]
            if done >= 0:
                self._store(message.topic(), partition, done + 1)

    def _store(self, topic: str, partition: int, offset: int) -> None:
        try:
            self._consumer.store_offsets(offsets=[self._library.TopicPartition(topic, partition, offset)])
        except self._library.KafkaException as error:  # another member of the group has the partition now
            log.info("offset %d of partition %d is not committed: %s", offset, partition, error)

    # --- in the event loop -------------------------------------------------------------------------------------

    def _begin(self, message: Any) -> None:
        task = asyncio.ensure_future(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Any) -> None:
        """Answer one message; an error is logged, as in MLServer."""
        place = f"partition {message.partition()}, offset {message.offset()}"
        try:
            if await self._respond(message):
                return  # finished when the response has been delivered
        except InvalidInput as error:
            log.warning("no response to the message at %s: %s", place, error.message[:_LOGGED_CHARACTERS])
        except _Abandoned:
            return  # and not committed
        except (self._library.KafkaException, BufferError) as error:
            log.error("the response to the message at %s cannot be sent: %s", place, error)
        except BaseException as error:
            if is_interruption(error):
                raise
            log.exception("unexpected error, message at %s", place)
        self._finished.append(message)

    async def _respond(self, message: Any) -> bool:
        """Send the response to a message. Raises InvalidInput with the error of the model or protocol."""
        application = self._application
        assert application is not None
        limit, size = application.limits.max_body_bytes, len(message.value() or b"")
        if size > limit:
            raise InvalidInput(f"expected at most {limit} bytes, got {size}")
        key, request = _to_http(message)
        match = application.match("POST", request.path, {})
        request = msgspec.structs.replace(request, params=match.params)
        delay_s, end_s = _FIRST_RETRY_S, time.monotonic() + _RETRY_S
        while True:
            response = CollectingWriter()
            await application.answer(match, request, response)
            if response.status == 200:
                break
            if self._drains.is_set() and response.status == _UNAVAILABLE:
                raise _Abandoned
            if response.status != _UNAVAILABLE or time.monotonic() > end_s:
                raise InvalidInput(f"status {response.status}: {response.body.decode(errors='replace')}")
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, 1.0)
        self._producer.produce(
            self._options.kafka_topic_output,
            key=key or None,
            value=bytes(response.body),
            headers=[(name.title() if name.startswith("ce-") else name, value) for name, value in response.headers],
            on_delivery=lambda error, _: self._finish(message, error),
        )
        return True

    def _finish(self, message: Any, error: Any) -> None:
        """Handle the delivery of a response; called in the thread."""
        if error is not None:
            log.error("a response was not delivered to topic '%s': %s", self._options.kafka_topic_output, error)
        self._finished.append(message)


class _Abandoned(Exception):
    """The server stops before a message has been answered."""


def _to_http(message: Any) -> tuple[str, HttpRequest]:
    """Return the key of the response, and a message as a request over HTTP. Raises InvalidInput."""
    headers = {name.lower(): (value or b"").decode(errors="replace") for name, value in message.headers() or ()}
    model, version = headers.get(MODEL_HEADER, ""), headers.get(VERSION_HEADER, "")
    if not model:
        raise InvalidInput(f"header '{MODEL_HEADER}' is missing")
    if headers.get(METHOD_HEADER, "infer") != "infer":
        raise InvalidInput(f"header '{METHOD_HEADER}': expected infer, got {headers[METHOD_HEADER]!r}")
    path = f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
    key, body = _with_id((message.key() or b"").decode(errors="replace"), message.value() or b"")
    context = new_context(client_request_id(headers))
    return key, HttpRequest("POST", f"{path}/infer", {}, dict([JSON_TYPE]) | headers, body, context=context, version="")


def _with_id(key: str, body: bytes) -> tuple[str, bytes]:
    """Return the id and the body of a request; the key of its message, if any, replaces the id in the body."""
    try:
        fields = msgspec.json.decode(body, type=_Fields)
        own = msgspec.json.decode(fields["id"]) if "id" in fields else None
    except (msgspec.DecodeError, RecursionError):
        return key, body  # which the protocol rejects
    if not key:
        return own if isinstance(own, str) else "", body
    return key, body if own == key else msgspec.json.encode({**fields, "id": key})


def open_clients(options: KafkaOptions) -> tuple[Any, Any, Any]:
    """Return the library, a consumer, which reads nothing yet, and a producer. Raises InvalidInput."""
    try:
        import confluent_kafka
    except ModuleNotFoundError as error:
        hint = "Kafka needs the package 'confluent-kafka': pip install 'dragoman[kafka]'"
        raise InvalidInput(f"setting 'kafka_servers': {hint}") from error
    for name in ("kafka_topic_input", "kafka_topic_output"):
        if not _TOPIC.fullmatch(topic := getattr(options, name)):
            expected = "1 to 249 letters, digits, '.', '_' and '-'"
            raise InvalidInput(f"setting '{name}': expected {expected}, got {topic!r:.80}")
    properties = {**_read_properties(options.kafka_properties), "bootstrap.servers": options.kafka_servers}
    group = {
        "group.id": options.kafka_group or "dragoman",  # required, and unused without a subscription
        "auto.offset.reset": "latest",
        "enable.auto.offset.store": False,
        "enable.auto.commit": bool(options.kafka_group),
    }
    try:
        consumer = confluent_kafka.Consumer({**properties, **group}, logger=log)
        return confluent_kafka, consumer, confluent_kafka.Producer(properties, logger=log)
    except (confluent_kafka.KafkaException, ValueError, TypeError) as error:
        raise InvalidInput(f"setting 'kafka_properties': {error}") from error


def _read_properties(file: str) -> dict[str, str]:
    """Return the properties in a file of lines `name=value`, as librdkafka names them. Raises InvalidInput."""
    if not file:
        return {}
    try:
        lines = [line.strip() for line in Path(file).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"setting 'kafka_properties': '{file}' cannot be read: {error}") from error
    found: dict[str, str] = {}
    for line in lines:
        name, separator, value = line.partition("=")
        if line and not line.startswith("#"):
            if not separator:
                raise InvalidInput(f"setting 'kafka_properties': {file}: expected lines of name=value")
            found[name.strip()] = value.strip()
    return found
