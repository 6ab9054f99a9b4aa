"""Parse the parameters of Qwen3-Coder's calls, `<parameter=KEY>value</parameter>`, in chunks of any size."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dragoman.protocols.text_common.tool_formats import SPACE, prefixes
from dragoman.protocols.text_common.tool_values import StreamedValue, schema_types
from dragoman.protocols.wire import replace_surrogates

_KEY = r"[^<>]{1,256}"
_NEXT = re.compile(rf"{SPACE}(?:<parameter=(?P<key>{_KEY})>|</function>)")
_MAYBE_NEXT = re.compile(rf"{SPACE}(?:<parameter=[^<>]{{0,256}}|{prefixes('<parameter=')}|{prefixes('</function>')})")
# Models may forget to close a value or the call. A line break before the end is not part of the value.
_END = re.compile(r"\n?(?:</parameter>|(?=<parameter=|</function>|</tool_call>))")
_ENDERS = ("</parameter>", "<parameter=", "</function>", "</tool_call>")
_MAYBE_END = re.compile(rf"\n?(?:{'|'.join(map(prefixes, _ENDERS))})\Z")
_LONGEST_END = 1 + max(map(len, _ENDERS))


@dataclass(frozen=True, slots=True)
class XmlChunk:
    """The result of a chunk: JSON of the arguments, the number of characters consumed, and whether the call is
    complete."""

    arguments: str
    used: int
    complete: bool


class XmlParameters:
    """Parses the parameters of one call by the schema of its tool; the caller writes the `{` of the arguments."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        named = schema.get("properties")
        self._named: Mapping[str, Any] = named if isinstance(named, dict) else {}
        self._value: StreamedValue | None = None
        self._lead = ""  # separator before the next key
        self._complete = False
        self._out: list[str] = []

    def feed(self, text: str, *, last: bool, cut: bool) -> XmlChunk:
        """Parse more text; unconsumed text is passed again with more. The `last` chunk may be `cut` off."""
        self._out, at = [], 0
        stop: int | None = 0
        while stop is not None and not self._complete:
            at = stop
            stop = self._key(text, at) if self._value is None else self._end(text, at, self._value)
        used = self._rest(text, at, last=last, cut=cut) if stop is None else stop
        return XmlChunk("".join(self._out), used, self._complete)

    def _key(self, text: str, at: int) -> int | None:
        """Return where the value of the next parameter begins, or the call ends; None if neither is there yet."""
        found = _NEXT.match(text, at)
        if found is None:
            return None
        if found["key"] is None:
            self._close()
        else:
            key = found["key"].strip()
            self._out.append(f"{self._lead}{replace_surrogates(json.dumps(key, ensure_ascii=False))}: ")
            self._lead = ", "
            self._value = StreamedValue(schema_types(self._named.get(key), self._schema))
        return found.end()

    def _end(self, text: str, at: int, value: StreamedValue) -> int | None:
        """Return where a value ends; None if it continues."""
        found = _END.search(text, at)
        if found is None:
            return None
        self._out += [value.add(text[at : found.start()]), value.end()]
        self._value = None
        return found.end()

    def _close(self) -> None:
        self._out.append("}")
        self._complete = True

    def _rest(self, text: str, at: int, *, last: bool, cut: bool) -> int:
        """Handle the end of the text; return how much was consumed."""
        if self._value is None:
            if _MAYBE_NEXT.fullmatch(text, at) and (cut or not last):
                return len(text) if last else at
            self._close()  # forgotten by the model
            return at
        if last and not cut:
            self._out += [self._value.add(text[at:].removesuffix("\n")), self._value.end()]
            self._close()
            return len(text)
        held = _MAYBE_END.search(text, max(at, len(text) - _LONGEST_END))
        assert held is not None, "it may match nothing"
        self._out.append(self._value.add(text[at : held.start()]))
        return len(text) if last else held.start()
