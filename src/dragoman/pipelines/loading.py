"""Load a model of transformers with its tokenizer or processor, and make a pipeline of them."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman.core.errors import ModelFailed
from dragoman.pipelines.tasks import TASKS, PipelineTask, task_by_name

# The class of transformers that loads a part, and the file that it is read from.
_PARTS: Mapping[str, tuple[str, str]] = {
    "tokenizer": ("AutoTokenizer", "tokenizer.json"),
    "image_processor": ("AutoImageProcessor", "preprocessor_config.json"),
    "feature_extractor": ("AutoFeatureExtractor", "preprocessor_config.json"),
    "video_processor": ("AutoVideoProcessor", "video_preprocessor_config.json"),
    "processor": ("AutoProcessor", "processor_config.json"),
}
# Tasks of base models, by the name of their first argument.
_BASE_TASKS: Mapping[str, str] = {"input_ids": "feature-extraction", "pixel_values": "image-feature-extraction"}


# --- which task ----------------------------------------------------------------------------------------------------


def tasks_of_model(transformers: Any, config: Any) -> list[PipelineTask]:
    """Return the tasks of a model by transformers' own tables of its type.

    A call is for the first that fits its inputs. Raises ModelFailed if there are none.
    """
    name = (config.architectures or [""])[0]
    heads = [task for task in TASKS.values() if "AutoModel" not in task.autos or name in task.architectures]
    found = next(
        (task for task in heads if name in task.architectures or _loads(transformers, task, config, name)), None
    )
    if found is not None and found.name == "translation":  # the task of a text-to-text model is not known
        found = TASKS["text2text-generation"]
    if found is not None and found.name == "text-classification" and is_entailment(config):
        return [TASKS["zero-shot-classification"], found]
    if found is not None:
        return [task_by_name(found.name)]
    if name in _class_names(transformers, "AutoModelForTextEncoding", config):
        return [TASKS["feature-extraction"]]
    if name in _class_names(transformers, "AutoModel", config):
        argument = _main_input(transformers, name)
        if argument in _BASE_TASKS:
            return [TASKS[_BASE_TASKS[argument]]]
        raise ModelFailed(
            f"'{name}' is a model without a head that takes '{argument}': expected one with a head for a task, or a "
            "base model of texts or images"
        )
    raise ModelFailed(
        f"the model's config.json names the architecture '{name}', which belongs to no task that is served: expected "
        f"one of {', '.join(TASKS)}; if the weights suit one of them, name it as parameters.task"
    )


def is_entailment(config: Any) -> bool:
    """Return whether a classifier compares a text with a hypothesis, and so can classify without training."""
    labels = getattr(config, "label2id", None) or {}
    return any(str(label).lower().startswith("entail") for label in labels)


def _loads(transformers: Any, task: PipelineTask, config: Any, name: str) -> bool:
    return any(name in _class_names(transformers, auto, config) for auto in task.autos)


def _class_names(transformers: Any, auto: str, config: Any) -> set[str]:
    """Return the names of the classes that a class such as AutoModelForMaskedLM has for a configuration."""
    mapping = getattr(getattr(transformers, auto, None), "_model_mapping", {})
    if type(config) not in mapping:
        return set()
    classes = mapping[type(config)]
    return {each.__name__ for each in (classes if isinstance(classes, tuple) else (classes,))}


def _main_input(transformers: Any, name: str) -> str:
    """Return the name of the first argument of a model; one with both pixels and texts is neither."""
    kind = getattr(transformers, name, None)
    return str(getattr(kind, "main_input_name", "input_ids"))


# --- the model -----------------------------------------------------------------------------------------------------


def load_model(transformers: Any, source: str, task: PipelineTask, config: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the model of a task, on the CPU. Raises ModelFailed if weights are missing, which would be random."""
    name = (config.architectures or [""])[0]
    known = [getattr(transformers, auto) for auto in task.autos if hasattr(transformers, auto)]
    fitting = [auto for auto in known if type(config) in auto._model_mapping]
    fitting.sort(
        key=lambda auto: (
            task.name != "feature-extraction" and name not in _class_names(transformers, auto.__name__, config)
        )
    )
    if not fitting:
        raise ModelFailed(
            f"transformers has no model of the type '{config.model_type}' for the task '{task.name}'"
            if known
            else f"the installed version of transformers does not have the task '{task.name}'"
        )
    factory = fitting[0]
    classes = factory._model_mapping[type(config)]
    if isinstance(classes, tuple):  # such as those of Wav2Vec2 with and without a head
        factory = next((each for each in classes if each.__name__ == name), factory)
    model, info = factory.from_pretrained(source, output_loading_info=True, config=config, **kwargs)
    missing = sorted(info["missing_keys"])
    if missing and not _is_base(task):
        raise ModelFailed(f"the weights lack {', '.join(missing[:3])}: they are not those of a {task.name} model")
    return model.eval()


def _is_base(task: PipelineTask) -> bool:
    """Whether parts of the model may be missing, such as the pooler, as its states alone are used."""
    return task.name in _BASE_TASKS.values()


# --- the pipeline --------------------------------------------------------------------------------------------------


def load_parts(transformers: Any, source: str, task: PipelineTask, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer, the processor and so on of a task. Raises ModelFailed naming the one that is missing."""
    parts: dict[str, Any] = {}
    for part in task.parts:
        name = part.removesuffix("?")
        auto, file = _PARTS[name]
        if not hasattr(transformers, auto):
            continue
        try:
            parts[name] = getattr(transformers, auto).from_pretrained(source, **kwargs)
        except Exception as error:  # transformers promises no class of error
            if not part.endswith("?"):
                raise ModelFailed(
                    f"the task '{task.name}' needs the model's {name.replace('_', ' ')} ({file}), which cannot be "
                    f"loaded: {first_line(error)}"
                ) from error
    if "processor" in parts and isinstance(parts["processor"], getattr(transformers, "PreTrainedTokenizerBase", ())):
        del parts["processor"]  # the folder has no processor, and transformers gives its tokenizer
    return parts


def make_pipeline(
    transformers: Any,
    task: PipelineTask,
    name: str,
    model: Any,
    parts: Mapping[str, Any],
    device: str | int,
    batch_size: int = 1,
) -> Any:
    """Return the pipeline of a task, by `name` if it has several; of our own if transformers has none.

    batch_size: rows that are computed together unless a call says otherwise.
    """
    arguments = {"model": model, "device": device, "batch_size": max(1, batch_size), **parts}
    try:
        own = importlib.import_module("dragoman.pipelines.own").PIPELINES.get(task.name)
        known = transformers.pipelines.PIPELINE_REGISTRY.supported_tasks
        if own is not None and (task.name not in known or task.kind == "video"):
            return own(task=name, **arguments)
        return transformers.pipeline(task.name, trust_remote_code=False, **arguments)
    except ImportError as error:
        raise ModelFailed(
            f"the task '{task.name}' needs a package that is not installed: {first_line(error)}"
        ) from error


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def has_pickled_weights(source: str) -> bool:
    """Return whether the weights of a folder are pickles. Raises ModelFailed for a folder without weights.

    A name on the hub counts as one with others.
    """
    folder = Path(source)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return False
    if not any(folder.glob("*.bin")):
        raise ModelFailed(f"no weights found in '{folder.name}'; expected model.safetensors beside config.json")
    return True
