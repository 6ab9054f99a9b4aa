"""The model configuration extension: Triton's configuration of a model, from its signature and batching."""

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict

from dragoman.core.calls import ModelDescription
from dragoman.core.options import SequenceOptions
from dragoman.core.signature import TensorSpec
from dragoman.formats import oip_messages as m
from dragoman.protocols.open_inference.extensions import metadata_tensors

# Triton's platform and backend, by the part of our platform before the first underscore.
_PLATFORMS = {
    "onnx": ("onnxruntime_onnx", "onnxruntime"),
    "pytorch": ("pytorch_libtorch", "pytorch"),
    "tensorflow": ("tensorflow_savedmodel", "tensorflow"),
    "openvino": ("openvino", "openvino"),
    "python": ("python", "python"),
}
_WIDE_INTEGERS = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def config_message(model: ModelDescription) -> Any:
    """Return the ModelConfig of a model, with the defaults that Triton fills in.

    With a positive `max_batch_size` the dims lack the first axis.
    """
    platform, backend = _PLATFORMS.get(model.platform.partition("_")[0], (model.platform, model.platform))
    signature, skipped_axes = model.signature, 1 if model.max_batch_size else 0
    config = m.ModelConfig(
        name=model.name,
        platform=platform,
        backend=backend,
        max_batch_size=model.max_batch_size,
        input=[{**tensor, "optional": spec.optional} for tensor, spec in _tensors(signature.inputs, skipped_axes)],
        output=[
            {**tensor, "label_filename": model.labels[spec.name].file if spec.name in model.labels else ""}
            for tensor, spec in _tensors(signature.outputs, skipped_axes)
        ],
        instance_group=[{"name": model.name, "count": model.replicas, "kind": "KIND_MODEL"}],
        default_model_filename=_file_name(model.path),
        optimization={"input_pinned_memory": {"enable": True}, "output_pinned_memory": {"enable": True}},
    )
    numbers = [int(version) for version in model.versions if version.isdecimal()]
    if len(numbers) > 1:
        config.version_policy.specific.versions.extend(numbers)
    else:
        config.version_policy.latest.num_versions = 1
    if model.sequences is not None:
        _add_sequences(config.sequence_batching, model.sequences, model.max_batch_size)
    elif model.max_batch_size:
        config.dynamic_batching.preferred_batch_size.append(model.max_batch_size)
        config.dynamic_batching.max_queue_delay_microseconds = round(model.max_batch_wait_s * 1e6)
    if model.caches:
        config.response_cache.enable = True
    if model.streams:
        config.model_transaction_policy.decoupled = True
    return config


def _add_sequences(batching: Any, options: SequenceOptions, max_batch_size: int) -> None:
    batching.max_sequence_idle_microseconds = round(options.idle_s * 1e6)
    if options.strategy == "oldest":
        batching.oldest.max_candidate_sequences = options.max_candidates
        batching.oldest.preferred_batch_size.append(max(1, max_batch_size))
    else:
        batching.direct.SetInParent()


def config_json(config: Any) -> dict[str, Any]:
    """Return a ModelConfig as JSON with Triton's names: all plain fields, and 64-bit integers as numbers."""
    fields = MessageToDict(config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _with_numbers(fields, config.DESCRIPTOR)


def _file_name(path: str) -> str:
    """Return the name of a model's file, "" for a folder or an object of a module."""
    name = PurePath(path).name
    script, is_script, _ = name.partition(".py:")
    if is_script:
        return f"{script}.py"
    return name if PurePath(name).suffix and ":" not in name else ""


def _tensors(specs: tuple[TensorSpec, ...], skipped_axes: int) -> Iterable[tuple[dict[str, Any], TensorSpec]]:
    known = [spec for spec in specs if spec.datatype is not None]
    for spec, (name, datatype, shape, _) in zip(known, metadata_tensors(known), strict=True):
        data_type = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
        yield {"name": name, "data_type": data_type, "dims": shape[skipped_axes:]}, spec


def _with_numbers(fields: dict[str, Any], message: Any) -> dict[str, Any]:
    """Return the JSON of a message with its 64-bit integers as numbers, which protobuf writes as strings."""
    return {name: _value(value, message.fields_by_name[name]) for name, value in fields.items()}


def _value(value: Any, field: Any) -> Any:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        return {key: _value(each, entry.fields_by_name["value"]) for key, each in value.items()}
    if isinstance(value, list):
        return [_scalar(each, field) for each in value]
    return _scalar(value, field)


def _scalar(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _with_numbers(value, field.message_type)
    return int(value) if field.cpp_type in _WIDE_INTEGERS else value
