"""The calls to the service of files and batches."""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from dragoman.core.datatypes import Buffer
from dragoman.core.services import ServiceCall
from dragoman_batches.batch import Api, Batch
from dragoman_batches.files import StoredFile

SERVICE = "batches"


class AddFile(msgspec.Struct, ServiceCall[StoredFile], frozen=True):
    """Store a file. expires_after_s: None to keep it."""

    service: ClassVar[str] = SERVICE
    filename: str
    purpose: str
    data: Buffer
    expires_after_s: int | None = None


class ReadFile(msgspec.Struct, ServiceCall[StoredFile], frozen=True):
    service: ClassVar[str] = SERVICE
    id: str


class OpenFile(msgspec.Struct, ServiceCall[tuple[StoredFile, str]], frozen=True):
    """Return a file and the path of its content."""

    service: ClassVar[str] = SERVICE
    id: str


class ListFiles(msgspec.Struct, ServiceCall[list[StoredFile]], frozen=True):
    """Return the files of the caller, oldest first."""

    service: ClassVar[str] = SERVICE


class DeleteFile(msgspec.Struct, ServiceCall[None], frozen=True):
    service: ClassVar[str] = SERVICE
    id: str


class CreateBatch(msgspec.Struct, ServiceCall[Batch], frozen=True):
    """Create a batch of the lines of a file."""

    service: ClassVar[str] = SERVICE
    runs_later: ClassVar[bool] = True
    input_file_id: str
    endpoint: str
    window: str
    window_s: float
    metadata: Mapping[str, str] | None = None
    output_expires_after_s: int | None = None


class CreateMessageBatch(msgspec.Struct, ServiceCall[Batch], frozen=True):
    """Create a batch of messages. lines: its input, as of a file."""

    service: ClassVar[str] = SERVICE
    runs_later: ClassVar[bool] = True
    lines: list[bytes]
    window_s: float


class ReadBatch(msgspec.Struct, ServiceCall[Batch], frozen=True):
    service: ClassVar[str] = SERVICE
    id: str
    api: Api


class ListBatches(msgspec.Struct, ServiceCall[list[Batch]], frozen=True):
    """Return the batches of the caller, oldest first."""

    service: ClassVar[str] = SERVICE
    api: Api


class CancelBatch(msgspec.Struct, ServiceCall[Batch], frozen=True):
    service: ClassVar[str] = SERVICE
    id: str
    api: Api


class DeleteBatch(msgspec.Struct, ServiceCall[None], frozen=True):
    """Delete a batch that has ended, with its results."""

    service: ClassVar[str] = SERVICE
    id: str
    api: Api


class OpenResults(msgspec.Struct, ServiceCall[str], frozen=True):
    """Return the path of the results of a batch of messages that has ended."""

    service: ClassVar[str] = SERVICE
    id: str
