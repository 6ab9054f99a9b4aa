"""MLServer's runtime for pipelines of transformers, for the tasks that Dragoman's own runtime does not have."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.core.documents import parse_json
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.pipelines.inputs import decode_audio
from dragoman.pipelines.loading import load_model, load_parts, make_pipeline
from dragoman.pipelines.results import to_json
from dragoman.pipelines.tasks import TASKS, task_name
from dragoman.system.transformers_loads import transformers_lock
from dragoman_mlserver.mlserver.codecs.base import InputCodec, register_input_codec
from dragoman_mlserver.mlserver.codecs.utils import decode_request_input
from dragoman_mlserver.mlserver.errors import InferenceError
from dragoman_mlserver.mlserver.model import MLModel
from dragoman_mlserver.mlserver.types import (
    InferenceRequest,
    InferenceResponse,
    Parameters,
    RequestInput,
    ResponseOutput,
)

# The kinds of rows that are images or audio, which pipelines get decoded.
_IMAGES, _AUDIO = frozenset({"image", "document"}), frozenset({"audio"})
# Kinds of rows for which MLServer has no content type.
_UNSUPPORTED = frozenset({"video", "json", "image pair"})
# The arguments of pipelines that are their data, which are images or audio for some tasks.
_DATA = frozenset(("image", "images", "audio", "audios", "inputs", "raw", "array"))
# The arguments that clients may set. Others start processes, open files or run code of a repository.
_ARGUMENTS = _DATA | frozenset(
    """
    aggregation_strategy align_to_words candidate_labels chunk_length_s clean_up_tokenization_spaces context
    continue_final_message diversity_penalty do_sample doc_stride early_stopping epsilon_cutoff eta_cutoff
    forced_bos_token_id function_to_apply generate_kwargs handle_impossible_answer handle_long_generation
    hypothesis_template ignore_labels length_penalty mask_threshold max_answer_len max_length max_new_tokens
    max_question_len max_seq_len max_time min_length min_new_tokens min_p multi_label no_repeat_ngram_size num_beams
    num_return_sequences overlap_mask_area_threshold padding pool prefix query question repetition_penalty
    return_all_scores return_full_text return_language return_tensors return_text return_timestamps return_type
    sampling_rate sequences sequential skip_special_tokens src_lang stop_sequence stride stride_length_s subtask table
    targets temperature text text_inputs text_pair tgt_lang threshold tokenizer_kwargs top_k top_p truncation typical_p
    word_boxes
    """.split()  # noqa: SIM905
)


class _JsonCodec(InputCodec):
    """Values as JSON in elements of BYTES."""

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> ResponseOutput:
        texts = [to_json(each) for each in cls._to_elements(payload)]
        shape = [1] if cls is HuggingfaceSingleJSONCodec else [len(texts), 1]
        parameters = Parameters(content_type=cls.ContentType)
        return ResponseOutput(name=name, shape=shape, datatype="BYTES", data=texts, parameters=parameters)

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> Any:
        return cls._decode(response_output)

    @classmethod
    def encode_input(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> RequestInput:
        return RequestInput(**vars(cls.encode_output(name, payload)))

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        return cls._decode(request_input)

    @classmethod
    def _to_elements(cls, payload: Any) -> list[Any]:
        return list(payload)

    @classmethod
    def _decode(cls, tensor: Any) -> Any:
        try:
            return [parse_json(each) for each in tensor.data]
        except (ValueError, TypeError) as error:  # TypeError: null, or a number
            raise InferenceError(f"input '{tensor.name}': expected JSON in each element: {error}") from error


@register_input_codec
class HuggingfaceListJSONCodec(_JsonCodec):
    """A list of values."""

    ContentType = "hg_jsonlist"
    TypeHint = list

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return isinstance(payload, list) and bool(payload) and all(isinstance(each, dict) for each in payload)


@register_input_codec
class HuggingfaceSingleJSONCodec(_JsonCodec):
    """One value."""

    ContentType = "hg_json"
    TypeHint = dict

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return isinstance(payload, dict)

    @classmethod
    def _to_elements(cls, payload: Any) -> list[Any]:
        return [payload]

    @classmethod
    def _decode(cls, tensor: Any) -> Any:
        return super()._decode(tensor)[0]


class HuggingFaceRuntime(MLModel):
    """A pipeline of the task `parameters.extra.task`, whose model is a folder.

    The inputs `args` and `array_inputs` are its first argument, the others are keyword arguments. The output has one
    element of JSON for each result.
    """

    _model: Any = None
    _kind = "text"

    async def load(self) -> bool:
        parameters = self.settings.parameters
        assert parameters is not None
        extra: Mapping[str, Any] = parameters.extra or {}
        named = str(extra["task"]) + (str(extra.get("task_suffix") or "") if extra["task"] == "translation" else "")
        task = TASKS.get(task_name(named))
        if task is None or task.kind in _UNSUPPORTED:
            known = ", ".join(each.name for each in TASKS.values() if each.kind not in _UNSUPPORTED)
            raise ModelFailed(f"the task '{named}' is not supported: expected one of {known}")
        self._kind = task.kind
        device = extra.get("device")
        with transformers_lock(importlib.import_module) as transformers:
            source = self._folder(str(parameters.uri))
            local = {"trust_remote_code": False, "local_files_only": True}
            config = transformers.AutoConfig.from_pretrained(source, **local)
            # Other weights than safetensors are pickles.
            options = {**(extra.get("model_kwargs") or {}), **local, "use_safetensors": True}
            model = load_model(transformers, source, task, config, options)
            tokenizer = extra.get("pretrained_tokenizer")
            parts = load_parts(transformers, self._folder(str(tokenizer)) if tokenizer else source, task, local)
            if "tokenizer" in parts:
                from dragoman.pipelines.limits import limit_tokenizer  # which imports PyTorch

                limit_tokenizer(parts["tokenizer"], model)
            self._model = make_pipeline(
                transformers, task, named, model, parts, -1 if device is None else device, self.settings.max_batch_size
            )
        return True

    def _folder(self, name: str) -> str:
        """Return the absolute path of a folder beside the settings. Raises ModelFailed if it does not exist."""
        source = self.settings._source
        path = Path(source).parent / name if source is not None else Path(name)
        if not path.is_dir():
            raise ModelFailed(f"'{name}' is not a folder: models are not downloaded; save the model to one")
        return str(path)

    def _decoder(self) -> Callable[[bytes, str], Any]:
        """Return a function of a file and its place that decodes the images or the audio of a request."""
        if self._kind in _AUDIO:
            rate = getattr(self._model.feature_extractor, "sampling_rate", 0)
            return lambda file, where: decode_audio(file, rate, where)
        from dragoman.codecs.image import image_decoder  # which imports Pillow

        return image_decoder()

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        arguments = {each.name: _value(each) for each in payload.inputs}
        texts = [*_as_list(arguments.pop("array_inputs", [])), *_as_list(arguments.pop("args", []))]
        _check_names(arguments)
        for name in ("generate_kwargs", "tokenizer_kwargs"):
            if not isinstance(options := arguments.get(name, {}), Mapping):
                raise InvalidInput(f"input '{name}': expected an object (content type 'hg_json')")
            _check_names(options, f"'{name}': ")
        if self._kind in _IMAGES | _AUDIO:
            decode = self._decoder()
            texts = _decode_files("args", texts, decode)
            arguments = _decode_files("", arguments, decode)
        given = () if not texts else (texts[0],) if len(texts) == 1 else (texts,)
        try:
            result = self._model(*given, **arguments)
        except Exception as error:
            if not isinstance(error, ValueError | TypeError | KeyError) and type(error).__name__ != "PipelineException":
                raise
            raise InferenceError(f"{type(self._model).__name__}: {error}") from error
        output = HuggingfaceListJSONCodec.encode_output("output", result if isinstance(result, list) else [result])
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=[output])


def _value(tensor: RequestInput) -> Any:
    """Return the value of an input by its content type; else texts, a single number, or a list of numbers."""
    content_type = tensor.parameters.content_type if tensor.parameters is not None else None
    if content_type not in (None, "raw"):
        return decode_request_input(tensor)
    values = [_text(each) if isinstance(each, bytes) else each for each in tensor.data]
    is_single = len(values) == 1 and (content_type == "raw" or tensor.datatype != "BYTES")
    return values[0] if is_single else values


def _text(element: bytes) -> str | bytes:
    """Return an element as text if it is UTF-8: others are files."""
    try:
        return element.decode()
    except UnicodeDecodeError:
        return element


def _check_names(names: Iterable[str], where: str = "") -> None:
    for name in names:
        if name not in _ARGUMENTS:
            raise InvalidInput(
                f"{where}input '{name[:64]}': not an argument that requests may set; expected args, array_inputs, "
                f"{', '.join(sorted(_ARGUMENTS))}"
            )


def _decode_files(name: str, value: Any, decode: Callable[[bytes, str], Any]) -> Any:
    """Return data with its files decoded, by a function of a file and its place; of an object only members for data.

    Raises InvalidInput for text that is no file: pipelines take it for a path or an address.
    """
    if isinstance(value, Mapping):
        _check_names(value)
        return {k: _decode_files(k, v, decode) if k in _DATA else v for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_decode_files(name, each, decode) for each in value]
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        return _decode_files(name, value.tolist(), decode)
    if not isinstance(value, str | bytes):
        return value
    return decode(value.encode() if isinstance(value, str) else value, f"input '{name}'")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


__all__ = ["HuggingFaceRuntime", "HuggingfaceListJSONCodec", "HuggingfaceSingleJSONCodec"]
