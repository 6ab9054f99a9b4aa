"""Read `config.pbtxt`: check it as Triton does, and return our settings of the model and the fields not honoured."""

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.remarks import Effect, Remark
from dragoman.formats.model_config import ConfigFile, config_json, parse_config
from dragoman_triton.backends import CONFIG_FILE, ENSEMBLE, PYTHON, Backend, find_backend, unsupported_reason
from dragoman_triton.checks import check_config

log = logging.getLogger("dragoman.compat")

RUNTIME = "triton"
# Memory for the responses of a model with `response_cache`, in bytes; in Triton it is a setting of the server.
_CACHE_BYTES = 16 << 20
_TYPE_STRING = 13  # of the enumeration DataType
_MIN_IDLE_S = 0.001  # of a sequence; a shorter one would end it between two requests
_MAX_SEQUENCES = 1024  # live ones of a model; in Triton their number has no limit

_TENSORRT = "only TensorRT has such tensors"
_NO_DELAY = "an idle worker takes what is queued, up to max_batch_size"
_STATE_MEMORY = "tuning of the memory of states"
_LIBRARIES = "libraries of operators are not loaded"
# Fields with another effect than in Triton, by their paths without indices.
FIELDS: Mapping[str, tuple[Effect, str]] = {
    "input.allow_ragged_batch": ("different", "requests are merged only if their shapes are equal"),
    "input.is_shape_tensor": ("rejected", _TENSORRT),
    "output.is_shape_tensor": ("rejected", _TENSORRT),
    "input.is_non_linear_format_io": ("rejected", _TENSORRT),
    "output.is_non_linear_format_io": ("rejected", _TENSORRT),
    "batch_input": ("rejected", "inputs that the batcher generates are not supported"),
    "batch_output": ("rejected", "outputs that the batcher scatters are not supported"),
    "instance_group.profile": ("unused", _TENSORRT),
    "instance_group.passive": ("missing", "every instance answers requests"),
    "instance_group.host_policy": ("missing", "workers run on any CPU"),
    "instance_group.secondary_devices": ("missing", "the model runs on one device"),
    "instance_group.rate_limiter": ("missing", "there are no resources that models share"),
    "instance_group.gpus": ("missing", "the devices of a model are not selected: set CUDA_VISIBLE_DEVICES"),
    "cc_model_filenames": ("missing", "the default file is loaded on every device"),
    "metric_tags": ("missing", "metrics have no labels but model and version"),
    "model_metrics": ("missing", "metrics have fixed buckets"),
    "dynamic_batching.preferred_batch_size": ("different", _NO_DELAY),
    "dynamic_batching.preserve_ordering": ("unused", "responses of a stream are in the order of their requests"),
    "sequence_batching.direct.max_queue_delay_microseconds": ("unused", _NO_DELAY),
    "sequence_batching.direct.minimum_slot_utilization": ("unused", _NO_DELAY),
    "sequence_batching.oldest.max_queue_delay_microseconds": ("unused", _NO_DELAY),
    "sequence_batching.oldest.preferred_batch_size": ("different", _NO_DELAY),
    "sequence_batching.oldest.preserve_ordering": ("unused", "a request waits for the earlier ones of its sequence"),
    "sequence_batching.state.use_same_buffer_for_input_output": ("unused", _STATE_MEMORY),
    "sequence_batching.state.use_growable_memory": ("unused", _STATE_MEMORY),
    "ensemble_scheduling.step.model_namespace": ("missing", "models have no namespaces"),
    "optimization.cuda": ("unused", "tuning of CUDA"),
    "model_operations": ("rejected", _LIBRARIES),
    "model_repository_agents": ("rejected", "agents run code when a model is loaded, which is not supported"),
    "runtime": ("rejected", "backends that are shared libraries are not loaded"),
    "response_cache": ("different", f"each version has a cache of its own, of {_CACHE_BYTES >> 20} MiB"),
}
_ENVIRONMENT = "models have no Python environment of their own: install the packages in that of the server"
_PARAMETERS: Mapping[str, Mapping[str, tuple[Effect, str]]] = {
    PYTHON: {
        "EXECUTION_ENV_PATH": ("missing", _ENVIRONMENT),
        "FORCE_CPU_ONLY_INPUT_TENSORS": ("unused", "inputs are always in CPU memory"),
    },
    "onnx": {
        **dict.fromkeys(("intra_op_thread_count", "inter_op_thread_count", "execution_mode"), ("same", "")),
        "providers": ("same", ""),
    },
}
_UNUSED: tuple[Effect, str] = ("unused", "not a parameter of this runtime")


@dataclass(frozen=True, slots=True)
class TritonModel:
    """A model folder of Triton: its configuration, and the backend that runs it."""

    folder: Path
    file: ConfigFile
    backend: Backend

    @property
    def config(self) -> Any:
        return self.file.message

    @property
    def merges(self) -> bool:
        """Whether the engine merges requests. The Python backend gets a list of requests instead.

        Triton adds dynamic batching to models of ONNX and TensorRT that name no scheduler.
        """
        if self.backend.runtime == PYTHON:
            return False
        choice = self.config.WhichOneof("scheduling_choice")
        is_default = choice is None and self.backend.runtime in ("onnx", "tensorrt")
        is_merging = is_default or choice in ("dynamic_batching", "sequence_batching")
        has_fixed_states = not any(-1 in state.dims for state in self.config.sequence_batching.state)
        return self.config.max_batch_size > 1 and is_merging and has_fixed_states

    def sequence_options(self) -> dict[str, Any]:
        """Return the options of sequences, none for models that have no state."""
        batching = self.config.sequence_batching
        if not self.config.HasField("sequence_batching") or batching.iterative_sequence:
            return {}
        slots = max(1, self.config.max_batch_size)
        if batching.HasField("oldest"):
            slots = batching.oldest.max_candidate_sequences or slots
        return {
            "strategy": "oldest",  # direct is the same with a slot for each row
            "max_candidates": slots,
            "max_sequences": max(_MAX_SEQUENCES, slots * self.replicas),
            "idle_s": max(_MIN_IDLE_S, (batching.max_sequence_idle_microseconds or 1_000_000) / 1e6),
            "ids": self._sequence_ids(),
        }

    def _sequence_ids(self) -> str:
        """Return the ids that a control input takes: Triton rejects the others."""
        for table in self.config.sequence_batching.control_input:
            for control in table.control:
                if control.kind == control.CONTROL_SEQUENCE_CORRID:
                    return "text" if control.data_type == _TYPE_STRING else "integer"
        return "any"

    def schedule_options(self) -> dict[str, Any]:
        """Return the options of the queue, none where it has neither priorities nor limits."""
        batching = self.config.dynamic_batching
        policy = batching.default_queue_policy
        if not (batching.priority_levels or policy.max_queue_size or policy.default_timeout_microseconds):
            return {}
        levels = batching.priority_queue_policy
        return {
            "priority_levels": max(1, batching.priority_levels),
            "default_priority": batching.default_priority_level,
            **_queue_policy(policy),
            "levels": {str(n): _queue_policy(levels[n]) for n in sorted(levels) if 1 <= n <= batching.priority_levels},
        }

    @property
    def replicas(self) -> int:
        return sum(group.count or 1 for group in self.config.instance_group) or 1


def _queue_policy(policy: Any) -> dict[str, Any]:
    return {
        "max_queue_size": policy.max_queue_size,
        "timeout_s": policy.default_timeout_microseconds / 1e6,
        "timeout_action": "delay" if policy.timeout_action == policy.DELAY else "reject",
        "allow_timeout_override": policy.allow_timeout_override,
    }


def model_table(folder: Path) -> dict[str, Any]:
    """Return our settings of the model of a folder with a `config.pbtxt`.

    Raises InvalidInput naming file, line and field.
    """
    path = folder / CONFIG_FILE
    stat = path.stat() if path.exists() else None
    files = frozenset(file.name for version in _versions(folder)[-1:] for file in version.iterdir())
    model = _read_and_report(path, stat.st_mtime_ns if stat else 0, stat.st_size if stat else 0, files)
    config = model.config
    table: dict[str, Any] = {
        "name": config.name,
        "runtime": RUNTIME,
        "platform": config.platform or config.backend,
        "max_batch_size": config.max_batch_size if model.merges else 0,
        "max_batch_wait_s": config.dynamic_batching.max_queue_delay_microseconds / 1e6,
        "replicas": model.replicas,
        "sequences": model.sequence_options(),
        "schedule": {} if model.backend.runtime == PYTHON else model.schedule_options(),
        "labels": _labels(model),
        "response_cache_bytes": _CACHE_BYTES if config.response_cache.enable else 0,
        "version_policy": _version_policy(model),
        "protocols": {RUNTIME: {"config": config_json(config)}},
        "parameters": {
            "config": config_json(config),
            "source": str(path),
            "backend": model.backend.runtime,
            "file": config.default_model_filename,
            "schedule": model.schedule_options(),  # of the Python backend, which has a queue of its own
        },
    }
    required = ("max_batch_size", "max_batch_wait_s", "replicas", "response_cache_bytes")  # not those of the server
    return {key: value for key, value in table.items() if value or key in required}


@functools.lru_cache(1024)
def _read_and_report(path: Path, _changed_ns: int, _size: int, _files: frozenset[str]) -> TritonModel:
    """Read a file, once until it or the names of the model's files change, which may choose the backend.

    Log the fields that are not honoured in one warning.
    """
    model = read_model(path.parent)
    model_remarks = list(remarks(model, str(path)))
    for remark in model_remarks:
        if remark.effect == "rejected":
            raise model.file.error(remark.subject, remark.note)
    if ignored := [f"'{r.subject}' ({r.note})" for r in model_remarks if r.effect in ("missing", "unused")]:
        log.warning("%s: not honoured: %s", path, ", ".join(ignored))
    return model


def read_model(folder: Path) -> TritonModel:
    """Read and check the configuration of a folder. Raises InvalidInput naming file, line and field."""
    path = folder / CONFIG_FILE
    try:
        text = path.read_text() if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    file = parse_config(text, str(path))
    config, name = file.message, folder.resolve().name
    if config.name not in ("", name):
        raise file.error("name", f"unexpected directory name '{name}' for model '{config.name}', expected equal names")
    config.name = name
    versions = _versions(folder)
    backend = find_backend(config.backend, config.platform, name, versions[-1] if versions else None)
    if config.WhichOneof("scheduling_choice") == "ensemble_scheduling":
        backend = find_backend("", ENSEMBLE, name, None)
    if backend is None:
        raise file.error(
            "backend" if config.backend else "platform", unsupported_reason(config.backend, config.platform)
        )
    is_completed = backend.runtime == PYTHON and bool(versions) and _completes_config(versions[-1] / backend.file)
    check_config(file, backend, is_completed=is_completed)
    config.backend = config.backend or backend.name
    config.platform = config.platform or backend.platform
    config.default_model_filename = config.default_model_filename or backend.file
    return TritonModel(folder, file, backend)


def _completes_config(source: Path) -> bool:
    try:
        return b"auto_complete_config" in source.read_bytes()
    except OSError:
        return False


def remarks(model: TritonModel, location: str) -> Iterator[Remark]:
    """Yield the fields that are not honoured as in Triton."""
    for name, line in model.file.unknown:
        yield Remark(f"{location}:{line}", name, "unused", "unknown field")
    for path in dict.fromkeys(_set_fields(model.config)):
        if path in FIELDS:
            yield Remark(f"{location}:{model.file.line(path)}", path, *FIELDS[path])
    known = _PARAMETERS.get(model.backend.runtime, {})
    for name in model.config.parameters:
        effect, note = known.get(name, ("same", "") if model.backend.runtime == PYTHON else _UNUSED)
        if effect != "same":
            yield Remark(f"{location}:{model.file.line('parameters')}", f"parameters.{name}", effect, note)
    if any(group.kind == group.KIND_GPU for group in model.config.instance_group):
        yield from _gpu_remarks(model, location)


def _gpu_remarks(model: TritonModel, location: str) -> Iterator[Remark]:
    line = model.file.line("instance_group.kind")
    if model.backend.runtime not in (PYTHON, "tensorrt"):
        note = "the model runs on the CPU; for ONNX, name CUDAExecutionProvider in the parameter 'providers'"
        yield Remark(f"{location}:{line}", "instance_group.kind", "missing", note)


def _set_fields(message: Any, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all fields that are set, without indices; not those of map entries."""
    for descriptor, value in message.ListFields():
        path = f"{prefix}{descriptor.name}"
        yield path
        if descriptor.message_type is None or descriptor.message_type.GetOptions().map_entry:
            continue
        for each in value if isinstance(value, Sequence) or hasattr(value, "__len__") else (value,):
            yield from _set_fields(each, f"{path}.")


def _versions(folder: Path) -> list[Path]:
    folders = [p for p in folder.iterdir() if p.is_dir() and p.name.isdecimal() and not p.name.startswith("0")]
    return sorted(folders, key=lambda p: int(p.name))


def _version_policy(model: TritonModel) -> str:
    policy = model.config.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return "all"
    if choice == "specific":
        return ",".join(map(str, policy.specific.versions))
    if choice == "latest" and policy.latest.num_versions > 1:
        return ",".join(p.name for p in _versions(model.folder)[-policy.latest.num_versions :])
    return "latest" if choice == "latest" else ""


def _labels(model: TritonModel) -> dict[str, str]:
    """Return the files of class labels; an output of an ensemble has those of the step that produces it."""
    files = {o.name: str(model.folder / o.label_filename) for o in model.config.output if o.label_filename}
    for step in model.config.ensemble_scheduling.step:
        folder = model.folder.parent / step.model_name
        if not (folder / CONFIG_FILE).is_file():
            continue
        try:
            labels = _labels(read_model(folder))
        except InvalidInput:
            continue  # loading that model reports it
        for name, tensor in step.output_map.items():
            if name in labels:
                files.setdefault(tensor, labels[name])
    outputs = {o.name for o in model.config.output}
    return {name: path for name, path in files.items() if name in outputs}
