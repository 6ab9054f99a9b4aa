"""Returns any inputs and parameters."""

from dragoman import Infer, Inference, Model


class Echo(Model):
    placement = "inline"

    def infer(self, call: Infer) -> Inference:
        return Inference(call.inputs, call.parameters)
