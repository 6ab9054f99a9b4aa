"""Message classes of open_inference.proto, in a separate descriptor pool.

protobuf's default pool accepts each name once, and a client library in the same process may have registered them.
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from dragoman.core.errors import InvalidInput, InvalidOutput
from dragoman.core.tensor import Parameters, Scalar
from dragoman.formats.policy import Buffer

SERVICE = "inference.GRPCInferenceService"

# A serialized FileDescriptorSet, compiled from open_inference.proto by scripts/protos.
DESCRIPTORS = files("dragoman.formats").joinpath("open_inference.binpb").read_bytes()
# The same for a service of MLServer, whose messages are those of Open Inference in another package.
REPOSITORY_SERVICE = "inference.model_repository.ModelRepositoryService"
REPOSITORY_DESCRIPTORS = files("dragoman.formats").joinpath("model_repository.binpb").read_bytes()


def _classes() -> dict[str, Any]:
    pool = DescriptorPool()
    classes: dict[str, Any] = {}
    for file in FileDescriptorSet.FromString(DESCRIPTORS).file:
        pool.Add(file)
        for message in file.message_type:
            descriptor = pool.FindMessageTypeByName(f"{file.package}.{message.name}")
            classes[message.name] = GetMessageClass(descriptor)
    return classes


# Classes created at run time have no static types.
_CLASSES = _classes()
CudaSharedMemoryRegisterRequest = _CLASSES["CudaSharedMemoryRegisterRequest"]
CudaSharedMemoryRegisterResponse = _CLASSES["CudaSharedMemoryRegisterResponse"]
CudaSharedMemoryStatusRequest = _CLASSES["CudaSharedMemoryStatusRequest"]
CudaSharedMemoryStatusResponse = _CLASSES["CudaSharedMemoryStatusResponse"]
CudaSharedMemoryUnregisterRequest = _CLASSES["CudaSharedMemoryUnregisterRequest"]
CudaSharedMemoryUnregisterResponse = _CLASSES["CudaSharedMemoryUnregisterResponse"]
InferParameter = _CLASSES["InferParameter"]
InferTensorContents = _CLASSES["InferTensorContents"]
LogSettingsRequest = _CLASSES["LogSettingsRequest"]
LogSettingsResponse = _CLASSES["LogSettingsResponse"]
ModelConfig = _CLASSES["ModelConfig"]
ModelConfigRequest = _CLASSES["ModelConfigRequest"]
ModelConfigResponse = _CLASSES["ModelConfigResponse"]
ModelInferRequest = _CLASSES["ModelInferRequest"]
ModelInferResponse = _CLASSES["ModelInferResponse"]
ModelMetadataRequest = _CLASSES["ModelMetadataRequest"]
ModelMetadataResponse = _CLASSES["ModelMetadataResponse"]
ModelReadyRequest = _CLASSES["ModelReadyRequest"]
ModelReadyResponse = _CLASSES["ModelReadyResponse"]
ModelStatisticsRequest = _CLASSES["ModelStatisticsRequest"]
ModelStatisticsResponse = _CLASSES["ModelStatisticsResponse"]
ModelStreamInferResponse = _CLASSES["ModelStreamInferResponse"]
RepositoryIndexRequest = _CLASSES["RepositoryIndexRequest"]
RepositoryIndexResponse = _CLASSES["RepositoryIndexResponse"]
RepositoryModelLoadRequest = _CLASSES["RepositoryModelLoadRequest"]
RepositoryModelLoadResponse = _CLASSES["RepositoryModelLoadResponse"]
RepositoryModelUnloadRequest = _CLASSES["RepositoryModelUnloadRequest"]
RepositoryModelUnloadResponse = _CLASSES["RepositoryModelUnloadResponse"]
ServerLiveRequest = _CLASSES["ServerLiveRequest"]
ServerLiveResponse = _CLASSES["ServerLiveResponse"]
ServerMetadataRequest = _CLASSES["ServerMetadataRequest"]
ServerMetadataResponse = _CLASSES["ServerMetadataResponse"]
ServerReadyRequest = _CLASSES["ServerReadyRequest"]
ServerReadyResponse = _CLASSES["ServerReadyResponse"]
SystemSharedMemoryRegisterRequest = _CLASSES["SystemSharedMemoryRegisterRequest"]
SystemSharedMemoryRegisterResponse = _CLASSES["SystemSharedMemoryRegisterResponse"]
SystemSharedMemoryStatusRequest = _CLASSES["SystemSharedMemoryStatusRequest"]
SystemSharedMemoryStatusResponse = _CLASSES["SystemSharedMemoryStatusResponse"]
SystemSharedMemoryUnregisterRequest = _CLASSES["SystemSharedMemoryUnregisterRequest"]
SystemSharedMemoryUnregisterResponse = _CLASSES["SystemSharedMemoryUnregisterResponse"]
TraceSettingRequest = _CLASSES["TraceSettingRequest"]
TraceSettingResponse = _CLASSES["TraceSettingResponse"]


def parse_message(kind: Any, body: Buffer) -> Any:
    """Parse a message. Raises InvalidInput."""
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise InvalidInput(f"the message is not a valid {kind.DESCRIPTOR.full_name}: {error}") from error


def parameters_from_proto(message: Mapping[str, Any], where: str) -> dict[str, Scalar]:
    """Return the parameters of a message. Raises InvalidInput, beginning with `where`, if one has no value."""
    parameters: dict[str, Scalar] = {}
    if not message:  # faster than an empty loop over a protobuf map
        return parameters
    for name, value in message.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidInput(f"{where}parameter '{name}': expected a value, got none")
        parameters[name] = getattr(value, choice)
    return parameters


def parameters_to_proto(parameters: Parameters, message: Any) -> None:
    """Add parameters to the map of a message. Raises InvalidOutput for an integer beyond 64 bits or another type."""
    for name, value in parameters.items():
        match value:
            case bool():
                message[name].bool_param = value
            case int() if -(1 << 63) <= value < 1 << 63:
                message[name].int64_param = value
            case int() if (1 << 63) <= value < 1 << 64:
                message[name].uint64_param = value
            case float():
                message[name].double_param = value
            case str():
                message[name].string_param = value
            case _:
                raise InvalidOutput(
                    f"parameter '{name}': expected a bool, a 64-bit integer, a float or text, got {value!r}"
                )


def length_delimited(field: int, value: Buffer) -> tuple[Buffer, Buffer]:
    """Return a serialized field of type bytes or message: its tag and length, and its value."""
    return delimiter(field, len(value)), value


def delimiter(field: int, size: int) -> bytes:
    """Return the tag and length of a field of type bytes or message, or of packed numbers."""
    if field < 16 and size < 0x80:  # a byte each
        return bytes((field << 3 | 2, size))
    return bytes(_varint(field << 3 | 2) + _varint(size))


def _varint(number: int) -> bytearray:
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return digits
