"""The nodes that come with the house, by the name that a file calls them by."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dragoman.core.errors import InvalidInput
from dragoman.core.vectors import VectorFunction
from dragoman.graphs import builtin_linear as linear
from dragoman.graphs.builtin_base import BuiltInNode
from dragoman.graphs.builtin_elementwise import FUNCTIONS, Elementwise, Product
from dragoman.graphs.builtin_gaussian import Gaussian, likelihood

BUILT_IN: Mapping[str, Callable[..., BuiltInNode]] = {
    "identity": linear.Identity,
    "scale": linear.Scale,
    "linear": linear.Linear,
    "sum": linear.Sum,
    "product": Product,
    "concatenate": linear.Concatenate,
    "split": linear.Split,
    "select": linear.Select,
    "constant": linear.Constant,
    "gaussian_logpdf": Gaussian,
    "gaussian_loglik": likelihood,
    **{name: partial(Elementwise, name) for name in FUNCTIONS},
}


def built_in(name: str, options: Mapping[str, Any]) -> VectorFunction:
    """The node of that name. Raises InvalidInput where there is none, or an option is unknown, missing or wrong."""
    make = BUILT_IN.get(name)
    if make is None:
        raise InvalidInput(f"there is no built-in node '{name}'; there are {', '.join(BUILT_IN)}")
    parameters = inspect.signature(make).parameters
    for option in options:
        if option not in parameters:
            raise InvalidInput(f"'{name}' has no option '{option}'; it has {', '.join(parameters)}")
    for parameter in parameters.values():
        if parameter.default is inspect.Parameter.empty and parameter.name not in options:
            raise InvalidInput(f"'{name}' needs the option '{parameter.name}'")
    return make(**options)
