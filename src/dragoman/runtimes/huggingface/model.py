"""Hugging Face models, run by the pipelines of transformers."""

import base64
import binascii
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.codecs.elements import strings
from dragoman.core.binding import check_tensor
from dragoman.core.calls import Infer
from dragoman.core.datatypes import BYTES, Array
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor, object_array
from dragoman.runtimes.files import check_pickle, transformers_lock
from dragoman.runtimes.huggingface import RUNTIME
from dragoman.runtimes.huggingface.encoders import AnswerExtractor, Embedder, PairScorer, PoolingOptions
from dragoman.runtimes.huggingface.tasks import ALIASES, PipelineTask, options_of, task_by_architecture, task_by_name
from dragoman.runtimes.recognise import has_pooling

# The formats that are decoded: Pillow has more, some of them little tested.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URL = re.compile(rb"\s*data:image/[\w.+-]+;base64,")
_MAX_PIXELS = 64 * 2**20
_MAX_SCORED_LABELS = 2  # of cross-encoders: a score, or no and yes


def decode_images(tensor: Tensor, name: str) -> list[Any]:
    """Decode the image in each element: the bytes of a file, or base64, also as a data URL.

    Raises InvalidInput if it is not an image. Paths and addresses are never opened.
    """
    image = RUNTIME.require("PIL.Image")
    return [_decode_image(image, element, name) for element in tensor.data.flat]


def images_of_pixels(tensor: Tensor) -> list[Any]:
    """Convert an array of bytes [images, height, width, 3] to images."""
    image = RUNTIME.require("PIL.Image")
    return [image.fromarray(pixels) for pixels in tensor.data]


def _decode_image(image: Any, element: bytes, name: str) -> Any:
    last_error: Exception | None = None
    for content in (element, _from_base64(element)):
        try:
            picture = image.open(io.BytesIO(content), formats=_FORMATS)
            if picture.width * picture.height > _MAX_PIXELS:
                raise InvalidInput(f"input '{name}': expected at most {_MAX_PIXELS} pixels, got {picture.size}")
            picture.load()
        except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
            last_error = error
        else:
            return picture
    raise InvalidInput(
        f"input '{name}': expected an image ({', '.join(_FORMATS)}) as bytes or base64, got {element[:20]!r}"
    ) from last_error


def _from_base64(element: bytes) -> bytes:
    try:
        return base64.b64decode(_DATA_URL.sub(b"", element, count=1).strip(), validate=True)
    except binascii.Error:
        return b""


# What the clients of such models expect: each element is the JSON of one result.
_RESULTS: Mapping[str, str] = {"content_type": "hg_jsonlist"}


class HuggingFaceModel(Model):
    """A folder of `save_pretrained`, for one of the tasks in `tasks`.

    Inputs: texts `args` (or `inputs`, `text_inputs`, `array_inputs`); `question` and `context`; images `inputs`
    (encoded) or `pixels`. Output: `output`, the JSON of the pipeline's result for each row. For feature-extraction
    also `features`, [rows, tokens, size] padded with zeros, and `attention_mask`, on request.

    Parameters: `task` (else by the architecture), `pretrained_model` and `pretrained_tokenizer` (else the uri),
    `device` ("cpu" by default), `model_kwargs`; of embeddings `pooling` and `normalize`, see `PoolingOptions`. Nothing
    is downloaded unless `allow_download` is true; no code of a model is run; pickled weights need `allow_pickle`.
    """

    platform = "huggingface_pytorch"
    merges = 0

    def load(self) -> None:
        self._check_parameters()
        self._torch = RUNTIME.require("torch")
        with transformers_lock(RUNTIME) as self._transformers:
            self._load_all()

    def _load_all(self) -> None:
        source = self._source(str(self.spec.parameters.get("pretrained_model") or self.spec.uri))
        tokenizer_source = self._source(str(self.spec.parameters.get("pretrained_tokenizer") or source))
        try:
            self._load(source, tokenizer_source)
        except ModelFailed:
            raise
        except Exception as error:  # transformers promises no class of error
            raise ModelFailed(f"'{Path(source).name}' cannot be loaded by transformers: {error}") from error

    def signature(self) -> Signature:
        return Signature(
            inputs=self._task.inputs,
            outputs=(TensorSpec("output", BYTES, (-1,)), *self._task.extra_outputs),
            # The input may have other names; `infer` checks them.
            open_inputs=self._task.reads != "questions",
            batched=self._task.rows,
        )

    def infer(self, call: Infer) -> Mapping[str, Tensor | Array]:
        options = options_of(self._task, call.parameters)
        rows = self._rows(call.inputs)
        try:
            results = self._run(rows, options) if len(rows) else []
        except (IndexError, RuntimeError):
            self._check_lengths(rows)
            raise
        requested = call.outputs or ("output",)
        outputs: dict[str, Tensor | Array] = {}
        if "output" in requested:
            outputs["output"] = _as_json(results)
        if self._task.extra_outputs and set(requested) - {"output"}:
            outputs["features"], outputs["attention_mask"] = _pad(results)
        return outputs

    # --- loading -----------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        parameters = self.spec.parameters
        if parameters.get("optimum_model"):
            raise ModelFailed("optimum_model is not supported; export the model to ONNX and serve it with `onnx`")
        if parameters.get("framework", "pt") not in ("pt", None):
            raise ModelFailed(f"framework '{parameters['framework']}' is not supported; expected 'pt', PyTorch")
        if parameters.get("task"):
            task_by_name(str(parameters["task"]))

    def _source(self, name: str) -> str:
        """Return the folder of this name, also relative to the model; or a name on the hub, if downloads are
        allowed."""
        for path in (Path(name), Path(self.spec.uri) / name):
            if name and path.is_dir():
                return str(path.resolve())
        if self.spec.parameters.get("allow_download") is True:
            return name
        raise ModelFailed(f"folder '{name}' not found; nothing is downloaded unless parameters.allow_download is true")

    def _load(self, source: str, tokenizer_source: str) -> None:
        transformers = self._transformers
        common = {
            "trust_remote_code": False,
            "local_files_only": self.spec.parameters.get("allow_download") is not True,
        }
        config = transformers.AutoConfig.from_pretrained(source, **common)
        self._task = self._find_task(config, Path(source))
        if Path(source).is_dir() and not any(Path(source).glob("*.safetensors")):
            check_pickle(Path(source), self.spec)
        kwargs = {**(self.spec.parameters.get("model_kwargs") or {}), **common, "config": config}
        if not self.spec.allow_pickle:
            kwargs["use_safetensors"] = True
        model, value = getattr(transformers, self._task.auto).from_pretrained(
            source, output_loading_info=True, **kwargs
        )
        missing = sorted(value["missing_keys"])
        if missing and not self._task.extra_outputs:
            # transformers would initialize them randomly; feature extraction does not need the heads.
            raise ModelFailed(
                f"the weights lack {', '.join(missing[:3])}: they are not those of a {self._task.name} model"
            )
        self._run = self._runner(model.eval(), tokenizer_source, common)
        if self._task.extra_outputs:
            options = PoolingOptions.of(Path(source), self.spec.parameters)
            embedder = Embedder(self._torch, model, self._tokenizer, options)
            self.embed = embedder.__call__  # type: ignore[method-assign]
        if self._task.name == "text-classification" and model.config.num_labels <= _MAX_SCORED_LABELS:
            self.score = PairScorer(self._torch, model, self._tokenizer).__call__  # type: ignore[method-assign]

    def _find_task(self, config: Any, folder: Path) -> PipelineTask:
        parameters = self.spec.parameters
        if parameters.get("task"):
            return task_by_name(str(parameters["task"]))
        if "pooling" in parameters or has_pooling(folder):
            return task_by_name("feature-extraction")
        return task_by_architecture(config.architectures)

    def _runner(self, model: Any, source: str, common: Mapping[str, Any]) -> Callable[[Any, Mapping[str, Any]], Any]:
        """Return the function that computes the results of rows."""
        transformers, device = self._transformers, _device(self.spec.parameters.get("device"))
        self._tokenizer: Any = None
        if self._task.reads == "images":
            processor = transformers.AutoImageProcessor.from_pretrained(source, **common)
            parts = {"image_processor": processor}
        else:
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(source, **common)
            # Not every tokenizer knows how many positions its model has.
            positions = getattr(model.config, "max_position_embeddings", None) or self._tokenizer.model_max_length
            self._tokenizer.model_max_length = min(self._tokenizer.model_max_length, positions)
            parts = {"tokenizer": self._tokenizer}
        if self._task.reads == "questions":
            if not self._tokenizer.is_fast:
                raise ModelFailed("question answering needs a fast tokenizer, a tokenizer.json in the model's folder")
            reader = AnswerExtractor(self._torch, model.to(device), self._tokenizer)
            return lambda rows, options: [reader(question, context, options) for question, context in rows]
        if self._task.extra_outputs:
            parts = {**parts, "return_tensors": True}
        pipeline = transformers.pipeline(self._task.name, model=model, device=device, **parts)
        size = self._pipeline_batch_size()
        return lambda rows, options: pipeline(rows, batch_size=size, **options)

    def _pipeline_batch_size(self) -> int:
        """Return how many rows are computed together; texts can only be padded with a padding token."""
        unpadded = self._tokenizer is not None and self._tokenizer.pad_token_id is None
        return 1 if unpadded or not self._task.rows else max(1, self.spec.max_batch_size)

    # --- inputs ------------------------------------------------------------------------------------------

    def _rows(self, inputs: Mapping[str, Tensor]) -> list[Any]:
        if self._task.reads == "questions":
            question, context = (strings(inputs[name], name).tolist() for name in ("question", "context"))
            return list(zip(question, context, strict=True))
        if len(inputs) != 1:
            raise InvalidInput(f"expected one input, {self._input_names()}; got {', '.join(inputs) or 'none'}")
        ((name, tensor),) = inputs.items()
        known = {spec.name: spec for spec in self._task.inputs}
        spec = known.get(name) or (self._task.inputs[0] if name in ALIASES else None)
        if spec is None:
            raise InvalidInput(f"unexpected inference input '{name}'; expected {self._input_names()}")
        check_tensor(tensor, TensorSpec(name, spec.datatype, spec.shape), "input")
        if self._task.reads == "texts":
            texts: list[Any] = strings(tensor, name).tolist()
            return texts
        return decode_images(tensor, name) if tensor.datatype is BYTES else images_of_pixels(tensor)

    def _input_names(self) -> str:
        return " or ".join(f"'{spec.name}'" for spec in self._task.inputs)

    def _check_lengths(self, rows: list[Any]) -> None:
        """Raise InvalidInput if a text is longer than the model allows."""
        if self._task.reads != "texts":
            return
        limit = self._tokenizer.model_max_length
        for i, text in enumerate(rows):
            count = len(self._tokenizer(text, verbose=False)["input_ids"])
            if count > limit:
                raise InvalidInput(
                    f"text {i} has {count} tokens and the model takes {limit}; send less, or the parameter "
                    "truncation=true"
                )


def _device(name: Any) -> str:
    """Return PyTorch's name of a device: a number is a GPU, -1 the CPU."""
    if name is None or name == -1:
        return "cpu"
    return f"cuda:{name}" if isinstance(name, int) else str(name)


# --- results ---------------------------------------------------------------------------------------------


def _as_json(results: list[Any]) -> Tensor:
    texts = [json.dumps(result, default=_to_plain).encode() for result in results]
    return Tensor(object_array(texts, (len(texts),)), BYTES, _RESULTS)


def _to_plain(value: Any) -> Any:
    """Convert NumPy numbers and PyTorch tensors for JSON."""
    return value.tolist()


def _pad(vectors: list[Any]) -> tuple[Array, Array]:
    """Pad vectors of texts, each [1, tokens, size], to one array and its attention mask."""
    arrays = [np.asarray(each.float().cpu().numpy())[0] for each in vectors]
    counts = [len(each) for each in arrays] or [0]
    features = np.zeros((len(arrays), max(counts), arrays[0].shape[1] if arrays else 0), np.float32)
    mask = np.zeros((len(arrays), max(counts)), np.int64)
    for i, each in enumerate(arrays):
        features[i, : len(each)] = each
        mask[i, : len(each)] = 1
    return features, mask
