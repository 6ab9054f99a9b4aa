"""Scenarios of sequences: several requests one after the other, whose answers depend on each other."""

from collections.abc import Iterator
from typing import Any

from benchmarks.side_by_side.cases import Case, Pause, Rpc, Step, infer_message, post, tensor

Identity = int | str


def _parameters(identity: Identity | None, flags: str) -> dict[str, Any]:
    found: dict[str, Any] = {} if identity is None else {"sequence_id": identity}
    if "s" in flags:
        found["sequence_start"] = True
    if "e" in flags:
        found["sequence_end"] = True
    return found


def _body(model: str, value: int, identity: Identity | None, flags: str) -> dict[str, Any]:
    shape = [1, 1] if model == "oldest" else [1]
    return {"inputs": [tensor("X", "INT32", shape, [value])], "parameters": _parameters(identity, flags)}


def rest(model: str, value: int, identity: Identity | None, flags: str = "") -> Step:
    """Return a request of a sequence. `flags`: s for the start, e for the end."""
    return post(f"/v2/models/{model}/infer", _body(model, value, identity, flags))


def grpc(model: str, value: int, identity: Identity | None, flags: str = "") -> Step:
    """Return a call of a sequence."""
    return Rpc("ModelInfer", [infer_message(model, _body(model, value, identity, flags))])


def sequence_cases() -> Iterator[Case]:
    """Yield all scenarios. Each uses ids of its own, and ends its sequences where it can."""
    for protocol, send, base in (("rest", rest, 1000), ("grpc", grpc, 2000)):
        for model, offset in (("direct", 0), ("oldest", 200)):
            for at, (title, steps) in enumerate(_common(model, send, base + offset)):
                del at
                yield Case("sequence", f"sequence {protocol} {model}: {title}", steps)
        for title, steps in _other(send, base + 400):
            yield Case("sequence", f"sequence {protocol} {title}", steps)
    yield Case("sequence", "sequence stream direct: three calls", [_stream("direct", 3000)])
    yield Case("sequence", "sequence stream oldest: three calls", [_stream("oldest", 3001)])


def _common(model: str, send: Any, n: int) -> Iterator[tuple[str, list[Step]]]:
    yield "start, continue, end", [send(model, 1, n, "s"), send(model, 2, n), send(model, 3, n, "e")]
    yield "start and end in one", [send(model, 5, n + 1, "se"), send(model, 6, n + 1, "se")]
    yield "continue without a start", [send(model, 5, n + 2)]
    yield "end without a start", [send(model, 5, n + 3, "e")]
    yield "continue after the end", [send(model, 1, n + 4, "se"), send(model, 2, n + 4)]
    yield "start again", [send(model, 1, n + 5, "s"), send(model, 2, n + 5, "s"), send(model, 3, n + 5, "e")]
    if model == "oldest":  # the direct one has one slot
        yield (
            "two interleaved",
            [
                send(model, 1, n + 6, "s"),
                send(model, 10, n + 7, "s"),
                send(model, 2, n + 6),
                send(model, 20, n + 7),
                send(model, 3, n + 6, "e"),
                send(model, 30, n + 7, "e"),
            ],
        )
    yield "no id", [send(model, 1, None, "s")]
    yield "no id and no flags", [send(model, 1, None)]
    yield "id 0", [send(model, 1, 0, "se")]
    yield "an empty text as id", [send(model, 1, "", "se")]
    yield "id of text to numbers", [send(model, 1, "abc", "se"), send(model, 1, n + 8, "se")]
    yield "id of digits as text", [send(model, 1, str(n + 9), "se")]
    yield "id -1", [send(model, 1, -1, "s"), send(model, 2, -1, "e")]
    yield "id 2^63", [send(model, 1, 2**63, "s"), send(model, 2, 2**63, "e")]
    yield "id 2^64 - 1", [send(model, 1, 2**64 - 1, "s"), send(model, 2, 2**64 - 1, "e")]
    yield (
        "a wrong request within",
        [
            send(model, 1, n + 10, "s"),
            _wrong(model, n + 10),
            send(model, 2, n + 10, "e"),
        ],
    )


def _other(send: Any, n: int) -> Iterator[tuple[str, list[Step]]]:
    yield "named: start, continue, end", [send("named", 1, "a", "s"), send("named", 2, "a"), send("named", 3, "a", "e")]
    yield "named: id of 128 letters", [send("named", 1, "x" * 128, "se")]
    yield "named: id of 129 letters", [send("named", 1, "x" * 129, "se")]
    yield "named: id of a number", [send("named", 1, 5, "se"), send("named", 1, "b", "se")]
    yield "named: id of other letters", [send("named", 1, "ä€", "se")]
    yield "named: continue without a start", [send("named", 1, "c")]
    yield "short: id 2^32 - 1", [send("short", 1, 2**32 - 1, "se")]
    yield "short: id 2^32", [send("short", 1, 2**32, "se"), send("short", 1, 7, "se")]
    yield "idle: expiry", [send("idle", 1, n, "s"), Pause(1.6), send("idle", 2, n)]
    yield "idle: start again after expiry", [send("idle", 1, n + 1, "s"), Pause(1.6), send("idle", 2, n + 1, "se")]
    yield "idle: another one after expiry", [send("idle", 1, n + 2, "s"), Pause(1.6), send("idle", 2, n + 3, "se")]


def _wrong(model: str, identity: int) -> Step:
    body = {"inputs": [tensor("X", "INT32", [1, 9], [0] * 9)], "parameters": {"sequence_id": identity}}
    return post(f"/v2/models/{model}/infer", body)


def _stream(model: str, identity: int) -> Rpc:
    bodies = [_body(model, value, identity, flags) for value, flags in ((1, "s"), (2, ""), (3, "e"))]
    return Rpc("ModelStreamInfer", [infer_message(model, body) for body in bodies])
