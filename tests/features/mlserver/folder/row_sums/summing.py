# mypy: ignore-errors
"""Sums of rows, with the caller's own headers echoed and a path of its own, as its users write it."""

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.handlers import custom_handler
from mlserver.types import InferenceRequest, InferenceResponse, Parameters


class RowSums(MLModel):
    @custom_handler(rest_path="/sum-of-list")
    async def sum_of_list(self, payload: list) -> int:
        return sum(payload)

    async def load(self) -> bool:
        self.factor = 1
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = self.decode(payload.inputs[0], default_codec=NumpyCodec)
        total = rows.sum(axis=1, keepdims=True) * self.factor
        response = InferenceResponse(
            id=payload.id,
            model_name=self.name,
            model_version=self.version,
            outputs=[NumpyCodec.encode_output("total", total)],
        )
        if payload.parameters is not None and payload.parameters.headers:
            own = {k: v for k, v in payload.parameters.headers.items() if k.startswith("x-")}
            response.parameters = Parameters(headers=own)
        return response
