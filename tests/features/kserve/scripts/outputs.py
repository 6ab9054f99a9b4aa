"""Two models, whose names are in the source, and whose responses are what a request asks for."""
# mypy: ignore-errors

from kserve import InferOutput, InferResponse, Model, ModelServer


class Outputs(Model):
    """Return an output with the fields of the request's parameters."""

    async def predict(self, payload, headers=None):
        kind = payload.parameters["kind"]
        if kind == "grpc":
            output = {"name": "y", "datatype": "FP32", "shape": [2], "contents": {"fp32_contents": [1.5, 2.5]}}
            return {"id": "1", "model_name": self.name, "outputs": [output]}
        if kind == "inexact":
            return self.response(InferOutput("y", [1], "INT32", data=[1.5]))
        if kind == "twice":
            return self.response(InferOutput("y", [1], "INT32", data=[1]), InferOutput("y", [1], "INT32", data=[2]))
        if kind == "echo":
            return self.response(*(InferOutput(i.name, i.shape, i.datatype, i.data) for i in payload.inputs))
        if kind == "from_grpc":
            return self.response(InferOutput("y", [1], "BOOL", data=[payload.from_grpc]))
        return {"predictions": []}

    def response(self, *outputs):
        return InferResponse("1", self.name, list(outputs), parameters={"n": len(outputs)})


if __name__ == "__main__":
    models = [Outputs("first"), Outputs("second")]
    for each in models:
        each.load()
    ModelServer().start(models)
