"""BentoML's identity: one worker."""

from typing import Any

import bentoml
import numpy as np
from numpy.typing import NDArray


@bentoml.service(workers=1, traffic={"timeout": 60})
class Identity:
    @bentoml.api(route="/predict")  # type: ignore[untyped-decorator]
    def predict(self, input: NDArray[np.float32]) -> dict[str, list[Any]]:  # noqa: A002
        return {"output": input.tolist()}
