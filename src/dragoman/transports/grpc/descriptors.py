"""Descriptors and message classes of the gRPC services that every server has: health and reflection."""

from importlib.resources import files
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass


def load_descriptor(name: str) -> FileDescriptorProto:
    """Return the descriptor of `<name>.proto` in this package, compiled by scripts/protos."""
    compiled = files("dragoman.transports.grpc").joinpath(f"{name}.binpb").read_bytes()
    (file,) = FileDescriptorSet.FromString(compiled).file
    return file


def message_classes(file: FileDescriptorProto) -> dict[str, Any]:
    """Return the message classes of a file by name, in a pool of their own.

    Other packages in this process may have registered the same names in protobuf's default pool, which allows each
    name once.
    """
    pool: Any = DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.{name}")) for name in names}
