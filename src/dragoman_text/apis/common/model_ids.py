"""The names under which text models and their adapters are listed."""

from collections.abc import Iterable, Iterator

from dragoman.core.calls import Embed, Generate, ModelDescription


def text_model_ids(models: Iterable[ModelDescription]) -> Iterator[tuple[str, ModelDescription, str | None]]:
    """Yield name, model and parent: of each text model, then of its adapters as `adapter` and as `model:adapter`."""
    for model in models:
        if model.calls & {Generate, Embed}:
            yield model.name, model, None
            for adapter in model.details.get("adapters") or ():
                yield adapter, model, model.name
                yield f"{model.name}:{adapter}", model, model.name
