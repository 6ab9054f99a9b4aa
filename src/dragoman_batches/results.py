"""Lines of results, in the forms of OpenAI's and Anthropic's APIs."""

import msgspec

from dragoman.core.services import WireResponse
from dragoman_batches.batch import Api
from dragoman_batches.errors import ANTHROPIC_ERRORS

_EXPIRED = "This request could not be executed before the completion window expired."
_CANCELLED = "This request was not executed because the batch was cancelled."


def line_id(batch_id: str, number: int) -> str:
    """Return the id of the request of a line, which is the same whenever it is sent."""
    return f"batch_req_{batch_id.rpartition('_')[2]}_{number + 1}"


def format_result(api: Api, batch_id: str, number: int, custom_id: str, response: WireResponse) -> bytes:
    """Return the line for the response to a line."""
    name, body = msgspec.json.encode(custom_id), _json(response)
    if api == "openai":
        id_ = line_id(batch_id, number).encode()
        return (
            b'{"id":"%b","custom_id":%b,"response":{"status_code":%d,"request_id":"%b","body":%b},"error":null}\n'
            % (id_, name, response.status, id_, body)
        )
    if response.status < 400:
        return b'{"custom_id":%b,"result":{"type":"succeeded","message":%b}}\n' % (name, body)
    return b'{"custom_id":%b,"result":{"type":"errored","error":%b}}\n' % (name, _anthropic_error(response, body))


def format_unsent(api: Api, batch_id: str, number: int, custom_id: str, *, expired: bool) -> bytes:
    """Return the line for a line that was not sent, because the batch has expired or was cancelled."""
    name = msgspec.json.encode(custom_id)
    if api == "anthropic":
        return b'{"custom_id":%b,"result":{"type":"%b"}}\n' % (name, b"expired" if expired else b"canceled")
    code, text = ("batch_expired", _EXPIRED) if expired else ("batch_cancelled", _CANCELLED)
    error = msgspec.json.encode({"code": code, "message": text})
    id_ = line_id(batch_id, number).encode()
    return b'{"id":"%b","custom_id":%b,"response":null,"error":%b}\n' % (id_, name, error)


def _json(response: WireResponse) -> bytes:
    """Return a body as JSON on one line: as it is if it is JSON, else as a string."""
    body = response.body
    if "json" in response.headers.get("content-type", ""):
        try:
            msgspec.json.decode(body, type=msgspec.Raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
        else:  # a line break is white space there
            return body.replace(b"\n", b" ").replace(b"\r", b" ")
    return msgspec.json.encode(body.decode(errors="replace"))


class _Typed(msgspec.Struct):
    type: str = ""


def _anthropic_error(response: WireResponse, body: bytes) -> bytes:
    """Return an error in Anthropic's form, as the protocol of messages writes it."""
    try:
        if msgspec.json.decode(body, type=_Typed).type == "error":
            return body
    except msgspec.DecodeError:
        pass
    kind = ANTHROPIC_ERRORS.get(response.status, "api_error")
    text = response.body.decode(errors="replace")[:2000]
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": text}})
