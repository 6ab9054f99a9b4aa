# mypy: ignore-errors
"""Text as a stream of words, and whole for those who do not ask for a stream."""

from collections.abc import AsyncIterator

from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Words(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        return self._answer(StringCodec.decode_input(payload.inputs[0])[0].upper())

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        payload = [_ async for _ in payloads][0]
        for word in StringCodec.decode_input(payload.inputs[0])[0].split():
            yield self._answer(word)

    def _answer(self, text: str) -> InferenceResponse:
        output = ResponseOutput(name="output", shape=[1], datatype="BYTES", data=[text])
        return InferenceResponse(model_name=self.name, outputs=[output])
