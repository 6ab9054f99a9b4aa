"""A model's settings of the LMI protocol: formatters, batching and compatibility."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dragoman import plugins
from dragoman.core.calls import ModelDescription
from dragoman.core.errors import InvalidInput, ModelFailed, error_text
from dragoman.core.spec import ModelSpec

FORMATS = ("json", "jsonlines", "sse")
TEXT_ONLY = "none"
# LMI's formatters of chats and of Bedrock's schema, and the equivalent for other requests.
_CHATS = {"json_chat": "json", "jsonlines_chat": "jsonlines", "3p": "json", "3p_stream": "jsonlines"}
_SETTINGS = (
    "output_formatter",
    "input_formatter",
    "tgi_compat",
    "rolling_batch",
    "enable_streaming",
    "infer_do_sample",
    "bedrock_compat",
    "formatter_folder",
)
_WORDS = {"true": True, "false": False, "1": True, "0": False}


class LmiModel(msgspec.Struct, frozen=True):
    """The LMI settings of a model.

    formatter: the operator's output formatter, "" for none.
    custom: a formatter that is a function of the operator.
    rolling: whether a single text is answered in the rolling-batch schema.
    streams: whether the dynamic-batch schema streams.
    trtllm: whether sampling has the defaults of LMI with TensorRT-LLM.
    """

    name: str
    formatter: str = ""
    custom: Callable[[Any], Any] | None = None
    reads: Callable[[Any], Any] | None = None
    tgi_compat: bool = False
    rolling: bool = True
    streams: bool = False
    infer_do_sample: bool = False
    bedrock: bool = False
    trtllm: bool = False

    def format(self, requested: str, stream: bool) -> str:
        """Return the formatter: that of the request, or of the operator, or the default for streams or complete
        responses."""
        requested = _CHATS.get(requested, requested)
        if requested and requested not in (*FORMATS, TEXT_ONLY):
            raise InvalidInput(
                f"`output_formatter` must be one of {', '.join((*FORMATS, TEXT_ONLY))}; got '{requested[:64]}'"
            )
        if requested != TEXT_ONLY and (requested or self.formatter):
            return requested or self.formatter
        if not stream:
            return "json"
        return "sse" if self.tgi_compat else "jsonlines"


def lmi_model(model: ModelDescription) -> LmiModel:
    """Parse a model's `protocols.lmi`. Raises ModelFailed naming an invalid setting."""
    return _parse(model.name, model.protocols.get("lmi", {}), model.path)


def check(spec: ModelSpec) -> None:
    """Check the settings when the model is loaded, and import the operator's functions. Raises ModelFailed."""
    _parse(spec.name, spec.protocols.get("lmi", {}), spec.uri)


def _parse(name: str, settings: Mapping[str, Any], location: str) -> LmiModel:
    unknown = sorted(settings.keys() - set(_SETTINGS))
    if unknown:
        raise ModelFailed(f"model '{name}': unknown setting '{unknown[0]}', expected one of {', '.join(_SETTINGS)}")
    formatter = str(settings.get("output_formatter") or "")
    custom: Callable[[Any], Any] | None = None
    formatter = _CHATS.get(formatter, formatter)
    folder = _folder(settings, location, name)
    if formatter == TEXT_ONLY:
        custom, formatter = format_text_only, ""
    elif ":" in formatter:
        custom, formatter = _function(formatter, folder, name, "output_formatter"), ""
    elif formatter and formatter not in FORMATS:
        raise ModelFailed(
            f"model '{name}': output_formatter must be one of {', '.join(FORMATS)}, none or file.py:function; "
            f"got '{formatter}'"
        )
    reads = str(settings.get("input_formatter") or "")
    return LmiModel(
        name,
        formatter,
        custom,
        _function(reads, folder, name, "input_formatter") if reads else None,
        tgi_compat=_flag(settings, "tgi_compat", name),
        rolling=str(settings.get("rolling_batch") or "auto") != "disable",
        streams=_flag(settings, "enable_streaming", name),
        infer_do_sample=_flag(settings, "infer_do_sample", name),
        bedrock=_flag(settings, "bedrock_compat", name),
        trtllm=str(settings.get("rolling_batch") or "").strip().lower() == "trtllm",
    )


def format_text_only(value: Any) -> Any:
    """LMI's formatter `none`: only the text."""
    if isinstance(value, list):
        return "\n".join(format_text_only(each) for each in value)
    if "outputs" in value:
        return "".join(value["outputs"])
    return value["token"]["text"] if "token" in value else value.get("generated_text", "")


def _flag(settings: Mapping[str, Any], name: str, model: str) -> bool:
    value = settings.get(name, False)
    flag = value if isinstance(value, bool) else _WORDS.get(str(value).lower())
    if flag is None:
        raise ModelFailed(f"model '{model}': {name} must be true or false; got {value!r}")
    return flag


def _folder(settings: Mapping[str, Any], location: str, model: str) -> Path | None:
    """Return the folder of formatters: that of the model, unless the settings name one."""
    configured = settings.get("formatter_folder")
    if configured is not None and not (isinstance(configured, str) and Path(configured).is_dir()):
        raise ModelFailed(f"model '{model}': formatter_folder must be a folder; got {configured!r}")
    path = Path(configured or location.partition(":")[0]) if configured or location else None
    return path and (path if path.is_dir() else path.parent).resolve()


def _function(name: str, folder: Path | None, model: str, setting: str) -> Callable[[Any], Any]:
    """Import `file.py:name` from the model's folder. Raises ModelFailed."""
    file, _, attribute = name.partition(":")
    path = (folder / file).resolve() if folder else None
    if not folder or not path or not file.endswith(".py") or not attribute or not path.is_relative_to(folder):
        raise ModelFailed(
            f"model '{model}': {setting} must be file.py:function, with a file in the model's folder; got '{name}'"
        )
    if not path.is_file():
        raise ModelFailed(f"model '{model}': {setting} '{name}': file '{file}' not found in '{folder.name}'")
    try:
        function: Any = plugins.resolve(f"{path}:{attribute}")
    except BaseException as error:  # importing user code can raise anything
        message = error.message if isinstance(error, ModelFailed) else f"{type(error).__name__}: {error_text(error)}"
        raise ModelFailed(f"model '{model}': {setting} '{name}' cannot be imported: {message}") from error
    _check_function(function, f"model '{model}': {setting} '{name}'")
    return _guard(function, f"model '{model}': its {setting} failed")


def _check_function(function: Any, subject: str) -> None:
    if not callable(function):
        raise ModelFailed(f"{subject} is not a function: got {type(function).__name__}")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ModelFailed(f"{subject} must be a plain function; got one with async or yield")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions written in C may have no signature
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ModelFailed(f"{subject} must take one argument; it takes {signature}") from error


def _guard(function: Callable[[Any], Any], failed: str) -> Callable[[Any], Any]:
    """Return the function with its exceptions converted to ModelFailed; those of `dragoman.errors` pass unchanged."""

    def call(value: Any) -> Any:
        try:
            return function(value)
        except InvalidInput:
            raise
        except BaseException as error:
            raise ModelFailed(f"{failed}: {type(error).__name__}: {error_text(error)}") from error

    call.__dict__["content_type"] = getattr(function, "content_type", "")
    return call
