"""Models of transformers, run by its pipelines; embeddings and scores of pairs by our own code."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dragoman.core.calls import Embed, Infer, Inference
from dragoman.core.datatypes import BYTES, FP32, Array
from dragoman.core.errors import DragomanError, InvalidInput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor, object_array
from dragoman.pipelines import loading
from dragoman.pipelines.examples import example_call
from dragoman.pipelines.inputs import choose_task, input_specs, rows_of, shared_of
from dragoman.pipelines.results import ARRAYS, to_json
from dragoman.pipelines.tasks import PipelineTask, options_of, task_by_name
from dragoman.runtimes.class_names import names_of
from dragoman.runtimes.files import check_pickle
from dragoman.runtimes.huggingface import RUNTIME
from dragoman.runtimes.huggingface.sentence_transformers import EncoderFiles, apply_parameters, read_encoder_files
from dragoman.runtimes.pretrained import is_sentence_transformers
from dragoman.runtimes.saved_sizes import INDEX, WEIGHTS, check_sizes
from dragoman.system.transformers_loads import transformers_lock

_MAX_SCORED_LABELS = 2  # of cross-encoders: a score, or no and yes
# Tasks whose results name the classes of the model's configuration.
_TASKS_OF_CLASSES = frozenset(
    {
        "audio-classification",
        "image-classification",
        "image-segmentation",
        "object-detection",
        "text-classification",
        "token-classification",
        "video-classification",
    }
)
# The output of embeddings, beside the arrays of the pipeline.
_VECTORS = "embeddings"
# What the clients of such models expect: each element is the JSON of one result.
_RESULTS: Mapping[str, str] = {"content_type": "hg_jsonlist"}

Run = Callable[[list[Any], Mapping[str, Any]], list[Any]]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the model's pipelines consist of. rate: of sounds, in Hz."""

    model: Any
    tokenizer: Any
    runs: Mapping[str, Run]
    rate: int = 0


class HuggingFaceModel(Model):
    """A folder of `save_pretrained`, for one of the tasks in `dragoman.pipelines.tasks`.

    Inputs: those of the task. Output: `output`, the JSON of the pipeline's result for each row. On request also the
    arrays of the task, and the `embeddings` of texts.

    Parameters: `task` (else by the architecture), `pretrained_model` and `pretrained_tokenizer` (else the uri),
    `device` ("cpu" by default), `model_kwargs`; of embeddings and scores `pooling`, `normalize`, `truncate` and
    those of `apply_parameters`. Nothing is downloaded unless `allow_download` is true; no code of a model is run;
    pickled weights need `allow_pickle`.
    """

    platform = "huggingface_pytorch"
    merges = 0

    _tasks: list[PipelineTask]
    _parts: _Parts
    _embedder: Any = None

    def load(self) -> None:
        self._check_parameters()
        RUNTIME.require("torch")
        with transformers_lock(RUNTIME.require) as self._transformers:
            source = self._source(str(self.spec.parameters.get("pretrained_model") or self.spec.uri))
            try:
                self._load(source)
            except DragomanError:
                raise
            except Exception as error:  # transformers promises no class of error
                name, reason = Path(source).name, loading.first_line(error)
                raise ModelFailed(f"'{name}' cannot be loaded by transformers: {reason}") from error

    def signature(self) -> Signature:
        arrays = tuple(spec for task in self._tasks for spec in task.arrays)
        vectors = (TensorSpec(_VECTORS, FP32, (-1, -1), optional=True),) if self._embedder is not None else ()
        return Signature(
            inputs=input_specs(self._tasks),
            outputs=(TensorSpec("output", BYTES, (-1,)), *arrays, *vectors),
            open_inputs=True,  # the first may have other names; `infer` checks them
            batched=all(task.batched for task in self._tasks),
        )

    def details(self) -> Mapping[str, Any]:
        details: dict[str, Any] = {"tasks": [task.name for task in self._tasks]}
        if self._parts.tokenizer is not None and self._parts.tokenizer.model_max_length < 1 << 30:
            details["max_context"] = self._parts.tokenizer.model_max_length
        return details | (self._embedder.details() if self._embedder is not None else {})

    def class_labels(self) -> Mapping[str, Sequence[str]]:
        if not any(task.name in _TASKS_OF_CLASSES for task in self._tasks):
            return {}
        names = names_of(getattr(self._parts.model.config, "id2label", None))
        return {"output": names} if names else {}

    def infer(self, call: Infer) -> Inference:
        task = choose_task(self._tasks, call.inputs)
        options = options_of(task, call.parameters)
        rows = rows_of(task, call.inputs, call.parameters, self._parts.rate)
        shared = shared_of(task, call.inputs)
        requested = set(call.outputs or ("output",))
        outputs: dict[str, Tensor | Array] = {}
        if requested - {_VECTORS}:
            results = self._results(task, rows, {**options, **shared})
            if "output" in requested:
                texts = [to_json(result).encode() for result in results]
                outputs["output"] = Tensor(object_array(texts, (len(texts),)), BYTES, _RESULTS)
            if task.name in ARRAYS and requested - {"output", _VECTORS}:
                outputs |= ARRAYS[task.name](results)
        if _VECTORS in requested:
            truncate = 0 if options.get("truncation") else None
            outputs[_VECTORS] = self._embedder(Embed(tuple(rows), truncate)).vectors
        return Inference({name: _tensor(value) for name, value in outputs.items()})

    def _results(self, task: PipelineTask, rows: list[Any], options: Mapping[str, Any]) -> list[Any]:
        """Return the result of each row. Raises InvalidInput for a row that is the reason of a failure."""
        if not rows:
            return []
        try:
            return self._parts.runs[task.name](rows, options)
        except DragomanError:
            raise
        except Exception as error:
            self._check_rows(task, rows, options)
            if type(error).__name__ == "PipelineException":  # such as a text without a mask
                raise InvalidInput(f"{task.name}: {error}") from error
            raise

    # --- loading -----------------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        parameters = self.spec.parameters
        if parameters.get("optimum_model"):
            raise ModelFailed("optimum_model is not supported; export the model to ONNX and serve it with `onnx`")
        if parameters.get("framework", "pt") not in ("pt", None):
            raise ModelFailed(f"framework '{parameters['framework']}' is not supported; expected 'pt', PyTorch")
        if parameters.get("task"):
            task_by_name(str(parameters["task"]))
        if parameters.get("truncate") not in (None, True, False):
            raise ModelFailed(f"parameter 'truncate': expected true or false, got {parameters['truncate']!r}")

    def _source(self, name: str) -> str:
        """Return the folder of this name, also relative to the model; or a name on the hub, if downloads are
        allowed."""
        for path in (Path(name), Path(self.spec.uri) / name):
            if name and path.is_dir():
                return str(path.resolve())
        if self.spec.parameters.get("allow_download") is True:
            return name
        raise ModelFailed(f"folder '{name}' not found; nothing is downloaded unless parameters.allow_download is true")

    def _load(self, source: str) -> None:
        transformers, parameters = self._transformers, self.spec.parameters
        files = (
            read_encoder_files(Path(source)) if is_sentence_transformers(Path(source)) else EncoderFiles(Path(source))
        )
        files = replace(files, **apply_parameters(files, parameters))
        is_encoder = bool(files.modules) or "pooling" in parameters
        folder = str(files.folder) if files.modules else source
        common = {"trust_remote_code": False, "local_files_only": parameters.get("allow_download") is not True}
        if any((Path(folder) / name).is_file() for name in (WEIGHTS, INDEX)):
            check_sizes(Path(folder))
        config = transformers.AutoConfig.from_pretrained(folder, **files.config_kwargs, **common)
        self._tasks = self._find_tasks(config, files, is_encoder=is_encoder)
        task = self._tasks[0]
        if loading.has_pickled_weights(folder):
            check_pickle(Path(folder), self.spec)
        kwargs = {**files.model_kwargs, **(parameters.get("model_kwargs") or {}), **common}
        if not self.spec.allow_pickle:
            kwargs["use_safetensors"] = True
        model = loading.load_model(transformers, folder, task, config, kwargs)
        own = str(parameters.get("pretrained_tokenizer") or "")
        parts = loading.load_parts(
            transformers, self._source(own) if own else folder, task, {**files.tokenizer_kwargs, **common}
        )
        self._parts = self._make_parts(model, parts, files)
        for each in self._tasks:
            self._try(each, parts)
        self._add_calls(model, files)

    def _find_tasks(self, config: Any, files: EncoderFiles, *, is_encoder: bool) -> list[PipelineTask]:
        parameters = self.spec.parameters
        if parameters.get("task"):
            return [task_by_name(str(parameters["task"]))]
        if is_encoder:
            name = "text-classification" if files.task == "sequence-classification" else files.task
            return [task_by_name(name)]
        return loading.tasks_of_model(self._transformers, config)

    def _make_parts(self, model: Any, parts: dict[str, Any], files: EncoderFiles) -> _Parts:
        from dragoman.pipelines.limits import limit_tokenizer

        tokenizer = parts.get("tokenizer")
        if tokenizer is not None:
            limit_tokenizer(tokenizer, model, files.max_length, lowercase=files.lowercase)
        device = _device(self.spec.parameters.get("device"))
        runs = {task.name: self._run(task, model, parts, device) for task in self._tasks}
        return _Parts(model, tokenizer, runs, getattr(parts.get("feature_extractor"), "sampling_rate", 0))

    def _run(self, task: PipelineTask, model: Any, parts: Mapping[str, Any], device: str) -> Run:
        """Return the function that computes the results of rows with the options of a call."""
        from dragoman.pipelines.running import run_function

        name = str(self.spec.parameters.get("task") or task.name)
        suffix = str(self.spec.parameters.get("task_suffix") or "")
        size = max(1, self.spec.max_batch_size) if task.joins else 1
        return run_function(self._transformers, task, name + suffix, model, parts, device, size)

    def _try(self, task: PipelineTask, parts: Mapping[str, Any]) -> None:
        """Answer a call. Raises ModelFailed for a package that is missing, which pipelines need only then."""
        rows, options = example_call(task, self._parts.model, parts)
        try:
            to_json(self._parts.runs[task.name](rows, options))
        except ImportError as error:
            reason = loading.first_line(error)
            raise ModelFailed(f"the task '{task.name}' needs a package that is not installed: {reason}") from error
        except Exception as error:  # code of any model
            reason = f"{type(error).__name__}: {loading.first_line(error)}"
            raise ModelFailed(f"the model fails with a small example of the task '{task.name}': {reason}") from error

    def _add_calls(self, model: Any, files: EncoderFiles) -> None:
        """Offer embeddings of an encoder, and scores of pairs by a classifier of one or two labels."""
        from dragoman.runtimes.huggingface.embeddings import Embedder
        from dragoman.runtimes.huggingface.pair_scorer import PairScorer

        task, tokenizer = self._tasks[0], self._parts.tokenizer
        if task.name == "feature-extraction" or (task.name == "fill-mask" and files.modules):
            self._embedder = Embedder(model, tokenizer, files, self.spec)
            self.embed = self._embedder.__call__  # type: ignore[method-assign]
        if task.name == "text-classification" and model.config.num_labels <= _MAX_SCORED_LABELS:
            self.score = PairScorer(model, tokenizer, files, self.spec).__call__  # type: ignore[method-assign]

    # --- errors ------------------------------------------------------------------------------------------------

    def _check_rows(self, task: PipelineTask, rows: list[Any], options: Mapping[str, Any]) -> None:
        """Raise InvalidInput if a text has no tokens, or more than the model takes."""
        tokenizer = self._parts.tokenizer
        if tokenizer is None:
            return
        limit = tokenizer.model_max_length
        for name in (spec.name for spec in task.shared if spec.name in options):
            for i, label in enumerate(options[name]):
                count = len(tokenizer(label, verbose=False)["input_ids"])
                if count > limit:
                    raise InvalidInput(f"input '{name}': label {i} has {count} tokens and the model takes {limit}")
        for i, row in enumerate(rows if task.kind == "text" else ()):
            texts = [row["text"], row["text_pair"]] if isinstance(row, dict) else [row]
            count = len(tokenizer(*texts, verbose=False)["input_ids"])
            if count == 0:
                raise InvalidInput(f"text {i}: expected at least one token, got {texts[0]!r}")
            if count > limit and not options.get("truncation"):
                way = ", or the parameter truncation=true" if "truncation" in task.options else ""
                raise InvalidInput(f"text {i} has {count} tokens and the model takes {limit}; send less{way}")


def _tensor(value: Tensor | Array) -> Tensor:
    return value if isinstance(value, Tensor) else Tensor.of(value)


def _device(name: Any) -> str:
    """Return PyTorch's name of a device: a number is a GPU, -1 the CPU."""
    if name is None or name == -1:
        return "cpu"
    return f"cuda:{name}" if isinstance(name, int) else str(name)
