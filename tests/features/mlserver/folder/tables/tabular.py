# mypy: ignore-errors
"""A table in and out: the request's codec from the metadata, or as the request says."""

import pandas as pd
from mlserver import MLModel
from mlserver.codecs import PandasCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Tables(MLModel):
    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        table = self.decode_request(payload, default_codec=PandasCodec)
        older = pd.DataFrame({"name": table["First Name"].astype(object), "age": table["Age"] + 1})
        return self.encode_response(older, default_codec=PandasCodec)
