"""TensorFlow SavedModels."""

import os
from collections.abc import Mapping
from typing import Any

from dragoman.core.calls import Infer
from dragoman.core.datatypes import BF16, BYTES, DATATYPES, Array, Datatype
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.model import Model
from dragoman.core.runtime import Runtime
from dragoman.core.signature import Signature, TensorSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.files import model_path

# Datatypes by TensorFlow's names.
_DATATYPES: Mapping[str, Datatype] = {
    "bool": DATATYPES["BOOL"],
    "half": DATATYPES["FP16"],
    "float16": DATATYPES["FP16"],
    "bfloat16": BF16,
    "float32": DATATYPES["FP32"],
    "float64": DATATYPES["FP64"],
    "string": BYTES,
    **{f"int{bits}": DATATYPES[f"INT{bits}"] for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": DATATYPES[f"UINT{bits}"] for bits in (8, 16, 32, 64)},
}


class TensorFlowModel(Model):
    """One signature of a SavedModel: `parameters.signature_name`, `serving_default` by default."""

    platform = "tensorflow_savedmodel"

    def load(self) -> None:
        path = model_path(self.spec)
        if not (path / "saved_model.pb").is_file():
            raise ModelFailed(f"'{path.name}' is no SavedModel; expected a folder that holds saved_model.pb")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        self._tensorflow = RUNTIME.require("tensorflow")
        # The functions hold their variables only weakly: the loaded object has to live as long as the model.
        self._loaded = self._tensorflow.saved_model.load(str(path))
        wanted = self.spec.parameters.get("signature_name", "serving_default")
        if wanted not in self._loaded.signatures:
            raise ModelFailed(
                f"'{path.name}' has no signature '{wanted}', but {', '.join(self._loaded.signatures) or 'none'}; "
                "name one as parameters.signature_name"
            )
        self._function = self._loaded.signatures[wanted]
        self._inputs: Mapping[str, Any] = self._function.structured_input_signature[1]
        self._signature = _signature(self._inputs, self._function.structured_outputs)

    def signature(self) -> Signature:
        return self._signature

    def infer(self, call: Infer) -> Mapping[str, Array]:
        feed = {name: self._to_tensorflow(name, tensor) for name, tensor in call.inputs.items()}
        results = self._function(**feed)
        return {name: results[name].numpy() for name in call.outputs or results}

    def _to_tensorflow(self, name: str, tensor: Tensor) -> Any:
        try:
            return self._tensorflow.constant(tensor.data, dtype=self._inputs[name].dtype)
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"input '{name}': TensorFlow takes no such {tensor.datatype} here: {error}") from error


def _signature(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Signature:
    shapes = [spec.shape for spec in (*inputs.values(), *outputs.values())]
    return Signature(
        inputs=tuple(_spec(name, spec) for name, spec in inputs.items()),
        outputs=tuple(_spec(name, spec) for name, spec in outputs.items()),
        batched=all(shape.rank is not None and shape.rank > 0 and shape[0] is None for shape in shapes),
    )


def _spec(name: str, spec: Any) -> TensorSpec:
    shape = None if spec.shape.rank is None else tuple(-1 if n is None else int(n) for n in spec.shape)
    return TensorSpec(name, _DATATYPES.get(spec.dtype.name), shape)


RUNTIME = Runtime(
    load=TensorFlowModel,
    packages=("tensorflow",),
    extra="tensorflow",
    folder_files=("saved_model.pb",),
    priority=30,
    placement="thread",
)
