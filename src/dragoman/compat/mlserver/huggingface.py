"""MLServer's runtime for pipelines of transformers, for the tasks that Dragoman's own runtime does not have."""

import importlib
import json
from base64 import b64decode
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dragoman.codecs.codec import CODECS
from dragoman.compat.mlserver.codecs.base import InputCodec, register_input_codec
from dragoman.compat.mlserver.codecs.utils import decode_request_input
from dragoman.compat.mlserver.errors import InferenceError
from dragoman.compat.mlserver.model import MLModel
from dragoman.compat.mlserver.types import (
    InferenceRequest,
    InferenceResponse,
    Parameters,
    RequestInput,
    ResponseOutput,
)
from dragoman.core.datatypes import BYTES
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.tensor import Tensor, object_array
from dragoman.system.threads import TRANSFORMERS_LOADS

# The tasks whose pipelines read nothing but texts, or also images or audio, which they get decoded. Pipelines of other
# tasks open files and addresses that are in requests.
_TEXTS, _IMAGES, _AUDIO = "texts", "images", "audio"
_TASKS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "feature-extraction",
            "fill-mask",
            "ner",
            "question-answering",
            "sentiment-analysis",
            "summarization",
            "table-question-answering",
            "text-classification",
            "text-generation",
            "text-to-audio",
            "text-to-speech",
            "text2text-generation",
            "token-classification",
            "translation",
            "zero-shot-classification",
        ),
        _TEXTS,
    ),
    **dict.fromkeys(
        (
            "depth-estimation",
            "document-question-answering",
            "image-classification",
            "image-feature-extraction",
            "image-segmentation",
            "image-to-image",
            "image-to-text",
            "mask-generation",
            "object-detection",
            "visual-question-answering",
            "vqa",
            "zero-shot-image-classification",
            "zero-shot-object-detection",
        ),
        _IMAGES,
    ),
    **dict.fromkeys(("audio-classification", "automatic-speech-recognition", "zero-shot-audio-classification"), _AUDIO),
}
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
# How files of audio begin: ffmpeg opens other files that a playlist names.
_AUDIO_FILES = (b"RIFF", b"fLaC", b"OggS", b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")


class _JsonCodec(InputCodec):
    """Values as JSON in elements of BYTES."""

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **kwargs: Any) -> ResponseOutput:
        texts = [json.dumps(each, default=_plain) for each in cls._to_elements(payload)]
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
            return [json.loads(each) for each in tensor.data]
        except ValueError as error:
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
    _kind = _TEXTS

    async def load(self) -> bool:
        parameters = self.settings.parameters
        assert parameters is not None
        extra: Mapping[str, Any] = parameters.extra or {}
        kind = _TASKS.get("translation" if str(extra["task"]).startswith("translation_") else str(extra["task"]))
        if kind is None:
            raise ModelFailed(f"the task '{extra['task']}' is not supported: expected one of {', '.join(_TASKS)}")
        self._kind = kind
        task = str(extra["task"]) + (str(extra.get("task_suffix") or "") if extra["task"] == "translation" else "")
        tokenizer = extra.get("pretrained_tokenizer")
        # Other weights than safetensors are pickles.
        options = {**(extra.get("model_kwargs") or {}), "use_safetensors": True}
        try:
            with TRANSFORMERS_LOADS:
                self._model = importlib.import_module("transformers").pipeline(
                    task,
                    model=str(parameters.uri),
                    tokenizer=self._folder(str(tokenizer)) if tokenizer else None,
                    device=extra.get("device"),
                    batch_size=max(self.settings.max_batch_size, 1),
                    model_kwargs=options,
                    trust_remote_code=False,
                )
        except KeyError as error:
            raise ModelFailed(f"the installed version of transformers does not have the task '{task}'") from error
        return True

    def _folder(self, name: str) -> str:
        """Return the absolute path of a folder beside the settings. Raises ModelFailed if it does not exist."""
        source = self.settings._source
        path = Path(source).parent / name if source is not None else Path(name)
        if not path.is_dir():
            raise ModelFailed(f"'{name}' is not a folder: models are not downloaded; save the model to one")
        return str(path)

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        arguments = {each.name: _value(each) for each in payload.inputs}
        texts = [*_as_list(arguments.pop("array_inputs", [])), *_as_list(arguments.pop("args", []))]
        _check_names(arguments)
        for name in ("generate_kwargs", "tokenizer_kwargs"):
            if not isinstance(options := arguments.get(name, {}), Mapping):
                raise InvalidInput(f"input '{name}': expected an object (content type 'hg_json')")
            _check_names(options, f"'{name}': ")
        if self._kind is not _TEXTS:
            texts = _decode_files("args", texts, self._kind)
            arguments = _decode_files("", arguments, self._kind)
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


def _decode_files(name: str, value: Any, kind: str) -> Any:
    """Return data with the images or audio in it decoded; in an object those of the members for data.

    Raises InvalidInput for text that is neither: pipelines take it for a path or an address.
    """
    if isinstance(value, Mapping):
        _check_names(value)
        return {k: _decode_files(k, v, kind) if k in _DATA else v for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_decode_files(name, each, kind) for each in value]
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        return _decode_files(name, value.tolist(), kind)
    if not isinstance(value, str | bytes):
        return value
    content = value.encode() if isinstance(value, str) else value
    if kind is _IMAGES:
        images = CODECS.input("pillow_image").to_value(Tensor(object_array([content], (1,)), BYTES), f"input '{name}'")
        return images[0]
    if not content.startswith(_AUDIO_FILES):
        try:
            content = b64decode(content, validate=True)
        except ValueError:
            content = b""
    if not content.startswith(_AUDIO_FILES):
        raise InvalidInput(
            f"input '{name}': expected a WAV, FLAC, Ogg or MP3 file as bytes or base64, got {value[:40]!r}"
        )
    return content


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


__all__ = ["HuggingFaceRuntime", "HuggingfaceListJSONCodec", "HuggingfaceSingleJSONCodec"]
