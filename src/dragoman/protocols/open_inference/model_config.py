"""The model configuration extension: Triton's configuration of a model, from its signature and batching."""

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from dragoman.core.calls import ModelDescription
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.sequences import SequenceOptions
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.formats import grpc_messages as m
from dragoman.formats.model_config import config_from_json
from dragoman.protocols.open_inference.extensions import configuration, metadata_tensors

# Triton's platform and backend, by the part of our platform before the first underscore.
_PLATFORMS = {
    "onnx": ("onnxruntime_onnx", "onnxruntime"),
    "pytorch": ("pytorch_libtorch", "pytorch"),
    "tensorflow": ("tensorflow_savedmodel", "tensorflow"),
    "openvino": ("openvino", "openvino"),
    "python": ("python", "python"),
}
_GPU_ONLY = "tensorrt"
_IDLE_US = 1_000_000  # of a sequence without a limit


def config_message(model: ModelDescription) -> Any:
    """Return the ModelConfig of a model, with the defaults that Triton fills in.

    It is that of its `config.pbtxt`, else made from its signature. With a positive `max_batch_size` the dims lack the
    first axis.
    """
    given = configuration(model)
    return _make_config(model) if given is None else _complete_config(config_from_json(given, "config.pbtxt"), model)


def check(spec: ModelSpec) -> None:
    """Check the configuration in the settings of a model. Raises ModelFailed."""
    try:
        config_from_json(spec.protocols["triton"]["config"], "config.pbtxt")
    except (KeyError, TypeError, InvalidInput) as error:
        raise ModelFailed(f"setting 'protocols.triton.config': expected a configuration: {error}") from error


def _complete_config(config: Any, model: ModelDescription) -> Any:
    """Return the configuration of a file with Triton's defaults for the fields that it leaves out."""
    generated = _make_config(model)
    config.name = model.name
    for field in ("input", "output", "instance_group"):
        if not getattr(config, field):
            getattr(config, field).extend(getattr(generated, field))
    if config.HasField("ensemble_scheduling"):
        del config.instance_group[:]
    for number, group in enumerate(config.instance_group):
        group.name, group.count = group.name or f"{model.name}_{number}", group.count or 1
        group.kind = group.kind or group.KIND_CPU
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    for name in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(name):
            getattr(config.optimization, name).enable = True
    if model.max_batch_size and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()
    if config.HasField("dynamic_batching") and not config.dynamic_batching.preferred_batch_size:
        config.dynamic_batching.preferred_batch_size.append(config.max_batch_size)
    if config.HasField("sequence_batching"):
        batching = config.sequence_batching
        batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or _IDLE_US
        if batching.HasField("oldest") and not batching.oldest.preferred_batch_size and config.max_batch_size:
            batching.oldest.preferred_batch_size.append(config.max_batch_size)
    return config


def _make_config(model: ModelDescription) -> Any:
    """Return the ModelConfig of a model without `config.pbtxt`."""
    platform, backend = _PLATFORMS.get(model.platform.partition("_")[0], (model.platform, model.platform))
    signature, skipped_axes = model.signature, 1 if model.max_batch_size else 0
    kind = "KIND_GPU" if model.platform.startswith(_GPU_ONLY) else "KIND_CPU"
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
        instance_group=[{"name": model.name, "count": model.replicas, "kind": kind}],
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


def _file_name(path: str) -> str:
    """Return the name of a model's file, "" for a folder or an object of a module."""
    name = PurePath(path).name
    script, is_script, _ = name.partition(".py:")
    if is_script:
        return f"{script}.py"
    return name if PurePath(name).suffix and ":" not in name else ""


def _tensors(specs: tuple[TensorSpec, ...], skipped_axes: int) -> Iterable[tuple[dict[str, Any], TensorSpec]]:
    known = [spec for spec in specs if spec.datatype is not None]
    for spec, (name, datatype, shape, _) in zip(known, metadata_tensors(known, {}), strict=True):
        data_type = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
        yield {"name": name, "data_type": data_type, "dims": shape[skipped_axes:]}, spec
