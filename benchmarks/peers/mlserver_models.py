"""MLServer's identity, as its users write one: numbers to an array and back."""

import asyncio
from typing import Any

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Identity(MLModel):  # type: ignore[misc]
    async def predict(self, payload: Any) -> Any:
        array = self.decode(payload.inputs[0], default_codec=NumpyCodec)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("OUTPUT0", array)])


class Slow(Identity):
    async def predict(self, payload: Any) -> Any:
        await asyncio.sleep(0.05)  # a model that computes here would stop all others
        return await super().predict(payload)
