"""A script of a custom KServe model, as its users write them."""
# mypy: ignore-errors

import argparse
import asyncio

from kserve import Model, ModelServer, logging, model_server
from kserve.errors import InferenceError, InvalidInput, ModelNotReady
from kserve.model_server import app
from kserve.utils.utils import get_predict_input, get_predict_response

ERRORS = {
    "invalid": InvalidInput("no rows"),
    "inference": InferenceError("broken"),
    "not ready": ModelNotReady("rows"),
    "not implemented": NotImplementedError("not offered"),
    "value": ValueError("odd"),
}


class Scaled(Model):
    """Multiply numbers, repeat text."""

    def __init__(self, name, factor):
        super().__init__(name, return_response_headers=True)
        self.factor = factor
        self.ready = False

    def load(self):
        self.ready = True
        return self.ready

    async def preprocess(self, payload, headers=None):
        if isinstance(payload, dict) and "fail" in payload:
            raise ERRORS[payload["fail"]]
        return payload

    def predict(self, payload, headers=None, response_headers=None):
        response_headers.update({"x-factor": str(self.factor), "Date": "never"})
        if isinstance(payload, bytes):
            return b"<" + payload + b">"
        if isinstance(payload, dict) and "chunks" in payload:
            return self.chunks(payload["chunks"], payload.get("fail_at"))
        if payload == "continue":
            self.is_released.set()
            return "done"
        if payload == "wait until closed":
            return self.closed()
        rows = get_predict_input(payload)
        if isinstance(rows, list):
            return get_predict_response(payload, [row * self.factor for row in rows], self.name)
        rows *= self.factor  # arrays are writable
        return get_predict_response(payload, rows, self.name)

    async def chunks(self, count, fail_at):
        self.is_released, self.is_closed = asyncio.Event(), asyncio.Event()
        try:
            for i in range(count):
                if i == fail_at:
                    raise InferenceError("broken")
                if i == 1:
                    await self.is_released.wait()
                yield f"{i};" if count < 9 else count
        finally:
            self.is_closed.set()

    async def closed(self):
        await self.is_closed.wait()
        yield "closed"

    async def explain(self, payload, headers=None):
        return {"explanations": [headers["content-type"] for _ in payload["instances"]]}

    def get_input_types(self):
        return [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]

    async def get_output_types(self):
        return [{"name": "output-0", "datatype": "FP32", "shape": [-1, 2]}]


parser = argparse.ArgumentParser(parents=[model_server.parser])
parser.add_argument("--factor", type=int, default=2)
args, _ = parser.parse_known_args()

if __name__ == "__main__":
    if args.configure_logging:
        logging.configure_logging(args.log_config_file)
    app.add_middleware(argparse.ArgumentParser, allow_origins=["*"])
    model = Scaled(args.model_name, args.factor)
    model.load()
    ModelServer(workers=1).start([model])
