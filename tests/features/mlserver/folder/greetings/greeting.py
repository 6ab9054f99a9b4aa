# mypy: ignore-errors
"""Text in and out by annotations, with a file and a parameter of its own."""

from typing import List

import numpy as np
from mlserver import MLModel
from mlserver.codecs import decode_args
from mlserver.utils import get_model_uri


class Greetings(MLModel):
    async def load(self) -> bool:
        with open(await get_model_uri(self.settings)) as file:
            self._word = file.read().strip()
        self._mark = self.settings.parameters.extra["mark"]
        return True

    @decode_args
    async def predict(self, names: List[str], times: np.ndarray) -> List[str]:
        return [" ".join([self._word] * int(n) + [name]) + self._mark for name, n in zip(names, times.ravel())]
