"""MLServer's runtimes for libraries of tabular models, as classes from which custom code may derive.

They are imported as from MLServer's packages: `from mlserver_sklearn import SKLearnModel`.
"""

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dragoman.core.calls import Handled
from dragoman.core.datatypes import datatype_of
from dragoman.core.errors import ModelFailed
from dragoman.runtimes.mlflow.scoring import score
from dragoman_mlserver.mlserver.codecs.adapted import NumpyCodec, NumpyRequestCodec, PandasCodec
from dragoman_mlserver.mlserver.codecs.base import RequestCodec, register_request_codec
from dragoman_mlserver.mlserver.codecs.utils import get_decoded_or_raw
from dragoman_mlserver.mlserver.errors import InferenceError
from dragoman_mlserver.mlserver.handlers import PlainRequest, custom_handler
from dragoman_mlserver.mlserver.huggingface import HuggingFaceRuntime
from dragoman_mlserver.mlserver.model import MLModel
from dragoman_mlserver.mlserver.types import (
    InferenceRequest,
    InferenceResponse,
    MetadataTensor,
    Parameters,
    RequestOutput,
    ResponseOutput,
)
from dragoman_mlserver.mlserver.utils import get_model_uri

PREDICT = "predict"
PREDICT_PROBA = "predict_proba"
PREDICT_FN = "predict_fn"


def check_is_file(path: str, filenames: Sequence[str]) -> None:
    """Raise ModelFailed if the path of a model is a folder, which then has none of the well-known files."""
    if os.path.isdir(path):
        expected = ", ".join(f"'{name}'" for name in filenames)
        raise ModelFailed(
            f"no model file in '{path}': expected {expected}, or the path of the file as 'uri' among the 'parameters' "
            "in model-settings.json"
        )


class _LibraryModel(MLModel):
    """A model whose outputs are methods of an object of a library.

    Raises InferenceError, which is a 400, if the library rejects the values of a request.
    """

    known_outputs: ClassVar[Sequence[str]] = (PREDICT,)
    filenames: ClassVar[Sequence[str]] = ()
    # Names of the errors by which the library rejects values, besides ValueError and TypeError.
    value_errors: ClassVar[Sequence[str]] = ()

    _model: Any = None

    async def load(self) -> bool:
        path = await get_model_uri(self._settings, self.filenames)
        check_is_file(path, self.filenames)
        self._model = self._read(path)
        return True

    def _read(self, path: str) -> Any:
        raise NotImplementedError

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        outputs = self._get_model_outputs(self._check_request(payload))
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)

    def _check_request(self, payload: InferenceRequest) -> InferenceRequest:
        """Set the default output if the request names none. Raises InferenceError for an unknown output."""
        payload.outputs = payload.outputs or [RequestOutput(name=self._default_output())]
        for output in payload.outputs:
            if output.name not in self.known_outputs:
                known = ", ".join(f"'{name}'" for name in self.known_outputs)
                raise InferenceError(f"{type(self).__name__}: unknown output '{output.name}': expected one of {known}")
            if not callable(getattr(self._model, output.name, None)):
                raise InferenceError(f"{type(self._model).__name__} does not support '{output.name}'")
        return payload

    def _default_output(self) -> str:
        return PREDICT

    def _get_model_outputs(self, payload: InferenceRequest) -> list[ResponseOutput]:
        value = self.decode_request(payload, default_codec=NumpyRequestCodec)
        outputs: list[ResponseOutput] = []
        for output in payload.outputs or ():
            result = self._call(getattr(self._model, output.name), value)
            if not PandasCodec.can_encode(result):
                outputs += self._encode_result(result, output)
                continue
            if len(payload.outputs or ()) > 1:
                raise InferenceError(f"output '{output.name}' is a data frame: request it alone")
            return PandasCodec.encode_outputs(result)
        return outputs

    def _encode_result(self, result: Any, wanted: RequestOutput) -> list[ResponseOutput]:
        if isinstance(result, list):  # probabilities of a classifier with several outputs
            return [
                self.encode(np.asarray(each), RequestOutput(name=f"{wanted.name}-{at}"), NumpyCodec)
                for at, each in enumerate(result)
            ]
        dense = result.toarray() if hasattr(result, "toarray") else result
        return [self.encode(dense, wanted, default_codec=NumpyCodec)]

    def _call(self, function: Callable[[Any], Any], value: Any) -> Any:
        try:
            return function(value)
        except Exception as error:
            if isinstance(error, ValueError | TypeError) or type(error).__name__ in self.value_errors:
                raise InferenceError(f"{type(self._model).__name__}: {error}") from error
            raise


class SKLearnModel(_LibraryModel):
    """A scikit-learn estimator or pipeline saved by joblib or pickle; `parameters.extra.predict_fn` names the default
    output."""

    known_outputs = (PREDICT, PREDICT_PROBA, "transform")
    filenames = ("model.joblib", "model.pickle", "model.pkl")

    def _read(self, path: str) -> Any:
        return importlib.import_module("joblib").load(path)

    def _default_output(self) -> str:
        parameters = self.settings.parameters
        extra: Mapping[str, Any] = (parameters.extra if parameters is not None else None) or {}
        named = extra.get(PREDICT_FN)
        if named is None and not hasattr(self._model, PREDICT) and hasattr(self._model, "transform"):
            return "transform"
        return str(named or PREDICT)


class XGBoostModel(_LibraryModel):
    """An XGBoost model, by the class of XGBoost's scikit-learn interface that saved it; XGBRegressor for a booster."""

    known_outputs = (PREDICT, PREDICT_PROBA)
    filenames = ("model.bst", "model.json", "model.ubj")

    def _read(self, path: str) -> Any:
        xgboost = importlib.import_module("xgboost")
        for kind in (xgboost.XGBRegressor, xgboost.XGBClassifier, xgboost.XGBRanker):
            model = kind()
            try:
                model.load_model(path)
            except TypeError:  # saved by another class
                continue
            return model
        raise ModelFailed(f"'{Path(path).name}' was saved by a class of XGBoost that is not supported")


class LightGBMModel(_LibraryModel):
    """A LightGBM booster."""

    filenames = ("model.bst",)
    value_errors = ("LightGBMError",)

    def _read(self, path: str) -> Any:
        return importlib.import_module("lightgbm").Booster(model_file=path)


class CatboostModel(_LibraryModel):
    """A CatBoost classifier, whose output is the label, or a CatBoost regressor or ranker."""

    filenames = ("model.cbm", "model.bin")
    value_errors = ("CatBoostError",)

    def _read(self, path: str) -> Any:
        catboost = importlib.import_module("catboost")
        model = catboost.CatBoostClassifier()
        model.load_model(path)
        if len(model.classes_):
            return model
        model = catboost.CatBoost()
        model.load_model(path)
        return model


# --- MLflow ------------------------------------------------------------------------------------------------------


@register_request_codec
class TensorDictCodec(RequestCodec):
    """A dict of arrays by the names of the tensors."""

    ContentType = "dict"
    TypeHint = dict[str, np.ndarray]

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return isinstance(payload, dict) and all(isinstance(each, np.ndarray) for each in payload.values())

    @classmethod
    def encode_response(
        cls, model_name: str, payload: Any, model_version: str | None = None, **kwargs: Any
    ) -> InferenceResponse:
        return InferenceResponse(
            model_name=model_name,
            model_version=model_version,
            outputs=[NumpyCodec.encode_output(name, np.asarray(each), **kwargs) for name, each in payload.items()],
            parameters=Parameters(content_type=cls.ContentType),
        )

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        return {each.name: NumpyCodec.decode_output(each) for each in response.outputs}

    @classmethod
    def encode_request(cls, payload: Any, **kwargs: Any) -> InferenceRequest:
        inputs = [NumpyCodec.encode_input(name, each, **kwargs) for name, each in payload.items()]
        return InferenceRequest(inputs=inputs, parameters=Parameters(content_type=cls.ContentType))

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        return {each.name: get_decoded_or_raw(each) for each in request.inputs}


# Datatype and content type of each type of MLflow's columns.
_MLFLOW_COLUMNS: Mapping[str, tuple[str, str]] = {
    "boolean": ("BOOL", "np"),
    "integer": ("INT32", "np"),
    "long": ("INT64", "np"),
    "float": ("FP32", "np"),
    "double": ("FP64", "np"),
    "string": ("BYTES", "str"),
    "binary": ("BYTES", "base64"),
    "datetime": ("BYTES", "datetime"),
}


class MLflowRuntime(MLModel):
    """An MLflow model of any flavor, whose signature gives the metadata and the content types."""

    _model: Any = None

    async def load(self) -> bool:
        path = os.path.abspath(await get_model_uri(self._settings))  # noqa: ASYNC240 - loading blocks anyway
        self._model = importlib.import_module("mlflow.pyfunc").load_model(path)
        self._error: Any = importlib.import_module("mlflow.exceptions").MlflowException
        self._set_metadata(self._model.metadata.signature)
        return True

    def _set_metadata(self, signature: Any) -> None:
        if signature is None:
            return
        parameters = self._settings.parameters
        if signature.inputs is not None:
            self.inputs = _mlflow_tensors(signature.inputs, "input-")
            if parameters is not None:
                parameters.content_type = _mlflow_content_type(signature.inputs)
        if signature.outputs is not None:
            self.outputs = _mlflow_tensors(signature.outputs, "output-")

    @custom_handler(rest_path="/invocations")
    async def invocations(self, request: PlainRequest) -> Handled:
        """Answer a request of MLflow's scoring protocol."""
        return score(self._model, await request.body(), str(request.headers["content-type"]))

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        value = self.decode_request(payload, default_codec=PandasCodec)
        given = payload.parameters
        try:
            result = self._model.predict(value, params=(given.model_extra if given is not None else None) or None)
        except self._error as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            # MLflow checks the data against the signature itself; its message begins with all of the data.
            raise InferenceError(f"MLflow rejects the inputs: {str(error).rpartition('Error: ')[2]}") from error
        return self.encode_response(result, default_codec=TensorDictCodec)


def _mlflow_tensors(schema: Any, prefix: str) -> list[MetadataTensor]:
    return [_mlflow_tensor(item, f"{prefix}{at}") for at, item in enumerate(schema.inputs)]


def _mlflow_tensor(item: Any, name: str) -> MetadataTensor:
    if hasattr(item, "shape"):
        datatype, content_type, shape = datatype_of(item.type).name, "np", list(map(int, item.shape))
    else:  # lists and objects are JSON
        shape = [-1, 1]
        datatype, content_type = _MLFLOW_COLUMNS.get(getattr(item.type, "name", ""), ("BYTES", "pd_json"))
    parameters = Parameters(content_type=content_type)
    return MetadataTensor(name=item.name or name, datatype=datatype, shape=shape, parameters=parameters)


def _mlflow_content_type(schema: Any) -> str:
    if not schema.is_tensor_spec():
        return "pd"
    return TensorDictCodec.ContentType if schema.has_input_names() else "np"


__all__ = [
    "CatboostModel",
    "HuggingFaceRuntime",
    "LightGBMModel",
    "MLflowRuntime",
    "SKLearnModel",
    "TensorDictCodec",
    "XGBoostModel",
]
