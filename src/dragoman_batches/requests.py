"""Shared by the routes: fields of bodies and of queries, pages of lists, contents of files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from dragoman.core.errors import InvalidInput
from dragoman.protocols.parameters import ignored_header, reject_unknown
from dragoman.protocols.wire import Buffer, Headers, Policy
from dragoman_batches.errors import ObjectNotFound
from dragoman_batches.input import convert, map_file

A = TypeVar("A")
B = TypeVar("B", bound=msgspec.Struct)


def parse_body(body: Mapping[str, Any], type_: type[B], policy: Policy) -> tuple[B, Headers]:
    """Return a body as a struct, and the header that names its unknown fields. Raises InvalidInput."""
    unknown = [*_unknown_fields(body, type_, "")]
    reject_unknown(unknown, type_.__struct_fields__, policy)
    return convert(body, type_), ignored_header(unknown)


def _unknown_fields(value: Mapping[str, Any], type_: Any, path: str) -> Iterable[str]:
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(type_)}
    for name, each in value.items():
        if name not in fields:
            yield path + name
        elif isinstance(each, dict):
            for nested in (fields[name], *get_args(fields[name])):
                if isinstance(nested, type) and issubclass(nested, msgspec.Struct):
                    yield from _unknown_fields(each, nested, f"{path}{name}.")


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or not 1 <= int(text) <= most:
        raise InvalidInput(f"query parameter 'limit': expected an integer from 1 to {most}, got {text[:32]!r}")
    return int(text)


def page(found: Sequence[A], query: Mapping[str, str], limit: int, id_of: Callable[[A], str]) -> tuple[list[A], bool]:
    """Return a page of objects that follow `after` or `after_id`, or precede `before_id`, and whether there are more.

    Raises ObjectNotFound if no object has that id.
    """
    ids = [id_of(each) for each in found]
    after, before = query.get("after", query.get("after_id", "")), query.get("before_id", "")
    try:
        start = ids.index(after) + 1 if after else 0
        end = ids.index(before) if before else len(found)
    except ValueError:
        raise ObjectNotFound(f"no such object: '{(after or before)[:100]}'") from None
    if before and not after:
        start = max(0, end - limit)
        return [*found[start:end]], start > 0
    chosen = found[start:end][:limit]
    return [*chosen], start + len(chosen) < end


def map_content(path: str) -> Sequence[Buffer]:
    """Return the content of a file as a body, without reading it. Raises ObjectNotFound."""
    try:
        return (memoryview(map_file(Path(path))),)
    except FileNotFoundError:
        raise ObjectNotFound("the file has been deleted") from None
