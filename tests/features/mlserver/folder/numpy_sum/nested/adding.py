# mypy: ignore-errors
"""The sum of two arrays, with types from the metadata and every access to a request that its users know."""

import numpy as np
from mlserver import types
from mlserver.codecs import NumpyCodec
from mlserver.model import MLModel


class Adding(MLModel):
    async def predict(self, payload: types.InferenceRequest) -> types.InferenceResponse:
        values = {i.name: self.decode(i, default_codec=NumpyCodec) for i in payload.inputs}
        total = np.add(*values.values()) if len(values) > 1 else values["a"].sum(keepdims=True)
        outputs = payload.outputs or [types.RequestOutput(name="sum")]
        return types.InferenceResponse(
            model_name=self.name, outputs=[self.encode(total, o, default_codec=NumpyCodec) for o in outputs]
        )
