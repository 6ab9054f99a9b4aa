"""Whether an estimator computes each row independently of the others, so that calls can be merged by default."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# Packages whose estimators predict each row independently: they are fitted, and read nothing from other rows.
_PACKAGES = ("sklearn", "xgboost", "lightgbm", "catboost")
# Their estimators that do not: the first three read the whole input to find out of what kind it is. A factorization
# starts from the mean of all rows and stops by the sum of their errors. IterativeImputer fills a row without values by
# means if it is alone, else by its estimators. DummyClassifier may draw labels by the number of a row.
_WHOLE_INPUT = (
    "LabelBinarizer",
    "LabelEncoder",
    "MultiLabelBinarizer",
    "NMF",
    "MiniBatchNMF",
    "IterativeImputer",
    "DummyClassifier",
)


def has_independent_rows(estimator: Any) -> bool:
    """Return whether an estimator and all that it consists of are of known packages and call no function of a user.

    A function, such as that of FunctionTransformer or of a kernel, gets all rows at once and may mix them.
    """
    for part in _parts(estimator):
        kind = type(part)
        if hasattr(part, "get_params"):
            if kind.__module__.partition(".")[0] not in _PACKAGES or kind.__name__ in _WHOLE_INPUT:
                return False
        elif callable(part) and not isinstance(part, (type, np.ufunc)):
            return False
    return True


def _parts(value: Any) -> Iterator[Any]:
    """Yield an estimator and the values of its parameters, with those of the estimators among them."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _parts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _parts(each)
    else:
        yield value
        if hasattr(value, "get_params") and not isinstance(value, type):
            yield from _parts(value.get_params(deep=False))
