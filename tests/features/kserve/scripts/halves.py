"""A transformer, as KServe's users write them: it halves the rows and calls its predictor."""
# mypy: ignore-errors

import argparse

import kserve
import numpy as np
from kserve.model import PredictorProtocol


class Halves(kserve.Model):
    """Halve the rows of a request."""

    def preprocess(self, payload, headers=None):
        if isinstance(payload, dict) and "fail" in payload:
            return payload
        if isinstance(payload, kserve.InferRequest):
            halves = payload.inputs[0].as_numpy() / 2
        else:
            headers["request-type"] = "v1"
            halves = np.array(payload["instances"]) / 2
        if self.predictor_config.predictor_protocol == PredictorProtocol.REST_V1.value:
            return {"instances": halves.tolist()}
        given = kserve.InferInput(name="x", shape=list(halves.shape), datatype="FP64", data=halves)
        return kserve.InferRequest(model_name=self.name, infer_inputs=[given])

    async def postprocess(self, result, headers=None, response_headers=None):
        result = await super().postprocess(result, headers)
        if headers.get("request-type") == "v1" and not isinstance(result, dict):
            return {"predictions": result.outputs[0].as_numpy().tolist()}
        return result


if __name__ == "__main__":
    args, _ = argparse.ArgumentParser(parents=[kserve.model_server.parser]).parse_known_args()
    transformer = Halves(args.model_name)
    transformer.load()
    kserve.ModelServer().start(models=[transformer])
