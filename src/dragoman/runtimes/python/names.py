"""Names that models of the `umbridge` package give themselves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dragoman import plugins
from dragoman.runtimes.python.model import candidates
from dragoman.runtimes.vector_model import is_umbridge, takes_name


def umbridge_models(file: str, attribute: str = "") -> dict[str, Any]:
    """Describe the models of the `umbridge` package in a Python file, or the one that is its `attribute`.

    served: the attributes of the models that serving the file serves, by the models' own names; empty where the file
        also holds other models, where two models have one name, or where the loader will reject the file.
    instances: the own name of each model that is a module's attribute.
    classes: the attributes that are classes whose own name shows in an instance only.
    """
    if attribute:
        return {"served": _named({attribute: plugins.resolve(f"{file}:{attribute}")}), "instances": {}, "classes": []}
    module = plugins.import_file(Path(file))
    there = {name: value for name, value in vars(module).items() if is_umbridge(value)}
    instances = {name: _own_name(value) for name, value in there.items() if not isinstance(value, type)}
    return {
        "served": _named(candidates(module)),
        "instances": {name: own for name, own in instances.items() if own},
        "classes": [name for name, value in there.items() if isinstance(value, type) and not takes_name(value)],
    }


def _named(found: Mapping[str, Any]) -> dict[str, str]:
    """The attributes of models by the models' own names; empty where not each has one that is its alone."""
    if not all(map(is_umbridge, found.values())):
        return {}
    if len(found) > 1 and any(isinstance(target, type) for target in found.values()):
        return {}
    named = {_own_name(target): attribute for attribute, target in found.items()}
    return {} if "" in named or len(named) < len(found) else named


def _own_name(target: Any) -> str:
    """The name of a model, or of an instance of a class; "" where it has none, or is given one by its loader."""
    if isinstance(target, type):
        target = None if takes_name(target) else target()
    name = getattr(target, "name", "")
    return name if isinstance(name, str) else ""
