"""Tasks of MLServer's runtime for Hugging Face: answers are those of the pipelines of transformers.

The models are small ones with random weights.
"""

import io
import json
import shutil
import socket
import struct
import warnings
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import dragoman
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.spec import ModelSpec
from dragoman.pipelines.tasks import TASKS as PIPELINES
from dragoman.pipelines.tasks import task_by_name
from dragoman.system.threads import PYTORCH_LOADS
from dragoman_mlserver.files import PIPELINE_TASKS, model_table
from dragoman_mlserver.mlserver import huggingface
from dragoman_mlserver.mlserver.errors import InferenceError
from dragoman_mlserver.mlserver.huggingface import HuggingFaceRuntime
from dragoman_mlserver.mlserver.settings import ModelParameters, ModelSettings
from dragoman_mlserver.mlserver.types import InferenceRequest, RequestInput
from dragoman_mlserver.model import load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

# transformers leaves files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
TEXT = "the brown fox"
TASKS = {"text-generation": "gpt2", "fill-mask": "bert", "zero-shot-classification": "classes"}


def _tokenizer() -> Any:
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the quick brown fox jumps over a lazy dog is this about".split()  # noqa: SIM905
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers")
    bert = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes = {"vocab_size": 20, "max_position_embeddings": 64, **bert}
    labels = {"id2label": {0: "contradiction", 1: "entailment"}, "label2id": {"contradiction": 0, "entailment": 1}}
    gpt = transformers.GPT2Config(
        vocab_size=20, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=2, eos_token_id=3
    )
    torch.manual_seed(0)
    saved = {
        "gpt2": transformers.GPT2LMHeadModel(gpt),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**sizes)),
        "classes": transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **labels)),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="unclosed file", category=ResourceWarning)
        for name, model in saved.items():
            model.save_pretrained(folder / "weights" / name)
            _tokenizer().save_pretrained(folder / "weights" / name)
    for task, name in TASKS.items():
        place = folder / "models" / task
        place.mkdir(parents=True)
        extra = {"task": task, "pretrained_model": str(folder / "weights" / name)}
        settings = {"name": task, "implementation": "mlserver_huggingface.HuggingFaceRuntime"}
        (place / "model-settings.json").write_text(json.dumps({**settings, "parameters": {"extra": extra}}))
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(dragoman.asgi(str(folder / "models"))) as client:
        yield client


def _tensor(name: str, data: list[Any], datatype: str = "BYTES", **parameters: str) -> dict[str, Any]:
    return {"name": name, "shape": [len(data)], "datatype": datatype, "data": data, "parameters": parameters}


@pytest.mark.parametrize(
    ("task", "inputs", "arguments"),
    [
        (
            "text-generation",
            [_tensor("args", [TEXT]), _tensor("max_new_tokens", [4], "INT64"), _tensor("do_sample", [False], "BOOL")],
            {"text_inputs": TEXT, "max_new_tokens": 4, "do_sample": False},
        ),
        ("fill-mask", [_tensor("args", ["the [MASK] fox"])], {"inputs": "the [MASK] fox"}),
        (
            "fill-mask",
            [_tensor("array_inputs", ["the [MASK] fox", "a [MASK]"], content_type="str")],
            {"inputs": ["the [MASK] fox", "a [MASK]"]},
        ),
        (
            "zero-shot-classification",
            [
                _tensor("args", [TEXT]),
                _tensor("candidate_labels", ["fox", "dog"]),
                _tensor("hypothesis_template", ["this is about {}"], content_type="raw"),
            ],
            {"sequences": TEXT, "candidate_labels": ["fox", "dog"], "hypothesis_template": "this is about {}"},
        ),
    ],
)
def test_tasks(
    client: TestClient, folder: Path, task: str, inputs: list[dict[str, Any]], arguments: dict[str, Any]
) -> None:
    response = client.post(f"/v2/models/{task}/infer", json={"inputs": inputs})
    assert response.status_code == 200, response.text
    (output,) = response.json()["outputs"]
    (direct, *rest) = arguments.values()
    pipeline = transformers.pipeline(task, model=str(folder / "weights" / TASKS[task]), device="cpu")
    expected = pipeline(direct, **dict(list(arguments.items())[1:])) if rest else pipeline(direct)
    expected = expected if isinstance(expected, list) else [expected]
    assert output["name"] == "output"
    assert output["parameters"] == {"content_type": "hg_jsonlist"}
    assert output["shape"] == [len(expected), 1]
    assert [json.loads(each) for each in output["data"]] == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    ("task", "inputs", "message"),
    [
        ("fill-mask", [_tensor("args", ["no mask"])], "mask"),
        ("fill-mask", [], "missing"),
        ("text-generation", [_tensor("args", ["{"], content_type="hg_json")], "expected JSON in each element"),
        ("fill-mask", [_tensor("args", ["[MASK]"]), _tensor("num_workers", [2], "INT64")], "input 'num_workers': not"),
        (
            "text-generation",
            [_tensor("args", [TEXT]), _tensor("custom_generate", ["folder"], content_type="raw")],
            "input 'custom_generate': not an argument that requests may set",
        ),
        (
            "text-generation",
            [
                _tensor("args", [TEXT]),
                _tensor("generate_kwargs", ['{"trust_remote_code": true}'], content_type="hg_json"),
            ],
            "'generate_kwargs': input 'trust_remote_code': not",
        ),
    ],
)
def test_invalid_requests_are_400(client: TestClient, task: str, inputs: list[Any], message: str) -> None:
    response = client.post(f"/v2/models/{task}/infer", json={"inputs": inputs})
    assert response.status_code == 400
    assert message in response.json()["error"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a model of `pipeline_models`."""
    models = pytest.importorskip("pipeline_models")
    folder = tmp_path_factory.mktemp("tiny")
    return lambda name: folder / name if (folder / name).is_dir() else models.save_model(folder / name, name)


async def _runtime(folder: Path, task: str, **extra: Any) -> HuggingFaceRuntime:
    parameters = ModelParameters(uri=str(folder), extra={"task": task, **extra})
    runtime = HuggingFaceRuntime(ModelSettings(name="m", implementation=HuggingFaceRuntime, parameters=parameters))
    await runtime.load()
    return runtime


async def _predict(runtime: HuggingFaceRuntime, *inputs: dict[str, Any]) -> list[Any]:
    response = await runtime.predict(InferenceRequest(inputs=[RequestInput(**each) for each in inputs]))
    (output,) = response.outputs
    return [json.loads(text) for text in output.data or ()]


@pytest.mark.parametrize(("model", "task"), [("detector", "object-detection"), ("hearer", "audio-classification")])
async def test_addresses_and_paths_are_not_opened(tiny: Callable[[str], Path], model: str, task: str) -> None:
    runtime = await _runtime(tiny(model), task)
    runtime._model = SimpleNamespace(feature_extractor=runtime._model.feature_extractor)  # which nothing may call
    for name in ("args", "array_inputs", "inputs", "image", "audio"):
        for value in ("http://127.0.0.1:1/x", __file__, "I0VYVE0zVQo="):
            nested = json.dumps({"image": value, "raw": value})
            for each in (_tensor(name, [value], content_type="str"), _tensor("args", [nested], content_type="hg_json")):
                with pytest.raises(InvalidInput, match=r"expected (an image|a WAV, FLAC)"):
                    await _predict(runtime, each)


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("model", "task", "key"), [("segmenter", "image-segmentation", "mask"), ("depth", "depth-estimation", "depth")]
)
async def test_images_in_results_are_urls_of_their_data(
    tiny: Callable[[str], Path], model: str, task: str, key: str
) -> None:
    image = pytest.importorskip("PIL.Image").effect_noise((48, 40), 60).convert("RGB")
    pipeline = transformers.pipeline(task, model=str(tiny(model)), device="cpu")
    direct = pipeline(image)
    expected = direct if isinstance(direct, list) else [direct]
    runtime = await _runtime(tiny(model), task)
    for element in (b64encode(_png(image)).decode(), _png(image)):
        found = await _predict(runtime, _tensor("args", [element]))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            prefix, _, data = one[key].partition(",")
            assert prefix == "data:image/png;base64"
            assert b64decode(data) == _png(other[key])


async def test_sound_is_decoded(tiny: Callable[[str], Path]) -> None:
    samples = np.sin(np.arange(8000) / 9).astype(np.float32)
    form = struct.pack("<HHIIHH", 3, 1, 16000, 64000, 4, 32)
    chunks = b"fmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", samples.nbytes) + samples.tobytes()
    content = b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks
    for model, task in (("hearer", "audio-classification"), ("speech", "automatic-speech-recognition")):
        expected = transformers.pipeline(task, model=str(tiny(model)), device="cpu")(samples)
        runtime = await _runtime(tiny(model), task)
        found = await _predict(runtime, _tensor("args", [b64encode(content).decode()]))
        assert found == json.loads(json.dumps(expected if isinstance(expected, list) else [expected]))


async def test_tasks_that_transformers_no_longer_has(tiny: Callable[[str], Path]) -> None:
    runtime = await _runtime(tiny("t5"), "translation_en_to_fr")
    (found,) = await _predict(runtime, _tensor("args", [TEXT]), _tensor("max_new_tokens", [3], "INT64"))
    assert list(found) == ["translation_text"]
    image = b64encode(_png(pytest.importorskip("PIL.Image").new("RGB", (40, 40)))).decode()
    runtime = await _runtime(tiny("vilt"), "visual-question-answering")
    inputs = (_tensor("image", [image], content_type="raw"), _tensor("question", ["what"], content_type="raw"))
    assert {each["answer"] for each in await _predict(runtime, *inputs)} == {"yes", "no", "two"}
    runtime = await _runtime(tiny("captioner"), "image-to-text")
    found = await _predict(runtime, _tensor("args", [image]), _tensor("max_new_tokens", [3], "INT64"))
    assert [list(each) for each in found] == [["generated_text"]]


async def test_tasks_without_a_content_type_are_not_supported(tmp_path: Path) -> None:
    known = ", ".join(each.name for each in PIPELINES.values() if each.kind not in ("video", "json", "image pair"))
    for task, named in (("video-classification", "video-classification"), ("translation", "translation-x")):
        with pytest.raises(ModelFailed, match=f"^the task '{named}' is not supported: expected one of {known}$"):
            await _runtime(tmp_path, task, task_suffix="-x")


def test_codecs_of_json() -> None:
    values = [{"a": 1}, {"b": [None, "\u00e9"]}]
    output = huggingface.HuggingfaceListJSONCodec.encode_output("o", values)
    assert (output.name, output.datatype, output.shape) == ("o", "BYTES", [2, 1])
    assert output.parameters is not None
    assert output.parameters.content_type == "hg_jsonlist"
    assert [json.loads(each) for each in output.data or ()] == values
    single = huggingface.HuggingfaceSingleJSONCodec.encode_input("i", values[0])
    assert isinstance(single, RequestInput)
    assert (single.name, single.datatype, single.shape) == ("i", "BYTES", [1])
    assert single.parameters is not None
    assert single.parameters.content_type == "hg_json"
    assert huggingface.HuggingfaceSingleJSONCodec.decode_input(single) == values[0]
    assert huggingface.HuggingfaceListJSONCodec.decode_output(output) == values
    given: list[tuple[Any, bool, bool]] = [
        (values, True, False),
        ([], False, False),
        ([{}, 1], False, False),
        ({}, False, True),
        ("a", False, False),
    ]
    for value, is_list, is_single in given:
        assert huggingface.HuggingfaceListJSONCodec.can_encode(value) is is_list
        assert huggingface.HuggingfaceSingleJSONCodec.can_encode(value) is is_single
    for element in (b"{", None, 5):
        tensor = SimpleNamespace(name="t", data=[element])
        with pytest.raises(InferenceError, match=r"^input 't': expected JSON in each element: "):
            huggingface.HuggingfaceListJSONCodec.decode_input(tensor)  # type: ignore[arg-type]


async def test_arguments_of_pipelines() -> None:
    """What a pipeline is called with, by the inputs of a request."""
    runtime = HuggingFaceRuntime(
        ModelSettings(name="m", implementation=HuggingFaceRuntime, parameters={"version": "2"})
    )
    called: list[Any] = []

    def pipeline(*values: Any, **names: Any) -> Any:
        called.append((values, names))
        return {"x": 1}

    runtime._model = pipeline
    inputs: list[tuple[list[dict[str, Any]], Any]] = [
        ([], ((), {})),
        ([_tensor("args", ["a"])], (("a",), {})),
        ([_tensor("args", ["a", "b"])], ((["a", "b"],), {})),
        ([_tensor("args", ["b"]), _tensor("array_inputs", ["a"], content_type="str")], ((["a", "b"],), {})),
        ([_tensor("args", ["a"]), _tensor("top_k", [1], "INT64")], (("a",), {"top_k": 1})),
        ([_tensor("args", ["a"]), _tensor("top_k", [1, 2], "INT64")], (("a",), {"top_k": [1, 2]})),
        ([_tensor("text", ["a"])], ((), {"text": ["a"]})),
        ([_tensor("text", ["a"], content_type="raw")], ((), {"text": "a"})),
        (
            [_tensor("generate_kwargs", ['{"top_p": 0.5}'], content_type="hg_json")],
            ((), {"generate_kwargs": {"top_p": 0.5}}),
        ),
    ]
    for given, expected in inputs:
        response = await runtime.predict(InferenceRequest(inputs=[RequestInput(**each) for each in given]))
        assert called.pop() == expected
        assert (response.model_name, response.model_version) == ("m", "2")
        assert [(each.name, [*(each.data or ())]) for each in response.outputs] == [("output", ['{"x": 1}'])]
    for name in ("generate_kwargs", "tokenizer_kwargs"):
        with pytest.raises(InvalidInput, match=rf"^input '{name}': expected an object \(content type 'hg_json'\)$"):
            await _predict(runtime, _tensor(name, ["a"]))
        with pytest.raises(InvalidInput, match=f"^'{name}': input 'y{'z' * 63}': not an argument that requests may"):
            await _predict(runtime, _tensor(name, [json.dumps({"y" + "z" * 64: 1})], content_type="hg_json"))
    for error, expected_error in ((ValueError("v"), InferenceError), (OSError("o"), OSError)):
        runtime._model = Raises(error)
        with pytest.raises(expected_error, match=r"^(Raises: v|o)$"):
            await _predict(runtime, _tensor("args", ["a"]))


class Raises:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self, *_: Any) -> Any:
        raise self._error


def test_models_are_not_downloaded(tmp_path: Path) -> None:
    fields = {"name": "m", "implementation": "mlserver_huggingface.HuggingFaceRuntime"}
    settings = {**fields, "parameters": {"extra": {"task": "text-generation", "pretrained_model": "distilgpt2"}}}
    table = model_table(settings, tmp_path / "model-settings.json")
    with pytest.raises(ModelFailed, match="'distilgpt2' is not a folder: models are not downloaded"):
        load(ModelSpec(name="m", runtime="mlserver", uri=table["uri"], parameters=table["parameters"]))


async def test_models_of_derived_classes_are_not_downloaded_either(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []

    def look_up(host: str, *_: Any, **__: Any) -> Any:
        looked_up.append(host)
        raise OSError(host)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ModelFailed, match="'distilgpt2' is not a folder: models are not downloaded"):
        await _runtime(Path("distilgpt2"), "text-generation")
    assert looked_up == []


async def test_code_in_the_folder_of_a_model_is_not_run(folder: Path, tmp_path: Path) -> None:
    own, ran = tmp_path / "own", tmp_path / "ran"
    shutil.copytree(folder / "weights" / "bert", own)
    (own / "code.py").write_text(
        f"open({str(ran)!r}, 'w').close()\nfrom transformers import BertConfig, BertForMaskedLM\n"
        "class OwnConfig(BertConfig):\n    model_type = 'own'\nclass OwnModel(BertForMaskedLM): ...\n"
    )
    config = json.loads((own / "config.json").read_text())
    names = {"AutoModelForMaskedLM": "code.OwnModel"}
    (own / "config.json").write_text(json.dumps({**config, "auto_map": names}))
    await _runtime(own, "fill-mask", model_kwargs={"trust_remote_code": True})  # with the class of the library
    names["AutoConfig"] = "code.OwnConfig"
    (own / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": names}))
    with pytest.raises(ValueError, match="trust_remote_code"):
        await _runtime(own, "fill-mask")
    assert not ran.exists()


def test_the_tasks_of_our_own_runtime() -> None:
    for task in PIPELINE_TASKS[1:]:
        assert task_by_name(task).name in PIPELINES


async def test_models_are_loaded_one_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While transformers loads a model it changes PyTorch for the whole process."""
    locked: list[bool] = []
    monkeypatch.setattr(huggingface, "make_pipeline", lambda *_: locked.append(PYTORCH_LOADS.locked()))
    await _runtime(folder / "weights" / "bert", "fill-mask")
    assert locked == [True]


@pytest.mark.parametrize(
    ("extra", "max_batch_size", "name", "device"),
    [
        ({"task": "fill-mask"}, 0, "fill-mask", -1),
        ({"task": "fill-mask", "device": None, "task_suffix": "-x"}, 1, "fill-mask", -1),
        ({"task": "fill-mask", "device": 0, "model_kwargs": {"use_safetensors": False, "own": 1}}, 4, "fill-mask", 0),
        ({"task": "fill-mask", "device": "cpu", "pretrained_tokenizer": "other"}, 4, "fill-mask", "cpu"),
        ({"task": "translation", "task_suffix": "_en_to_fr"}, 0, "translation_en_to_fr", -1),
    ],
)
async def test_parts_of_a_pipeline(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    max_batch_size: int,
    name: str,
    device: Any,
) -> None:
    """What is loaded from which folder, with which options, beside the settings."""
    shutil.copytree(folder / "weights" / "bert", tmp_path / "m")
    (tmp_path / "other").mkdir()
    seen: list[Any] = []

    def load_model(_: Any, source: str, task: Any, config: Any, options: Any) -> str:
        seen.append((source, task.name, type(config).__name__, options))
        return "model"

    def load_parts(_: Any, source: str, task: Any, options: Any) -> dict[str, Any]:
        seen.append((source, task.name, options))
        return {"part": 1}

    def make_pipeline(_: Any, task: Any, *rest: Any) -> str:
        seen.append((task.name, *rest))
        return "pipeline"

    for each in (load_model, load_parts, make_pipeline):
        monkeypatch.setattr(huggingface, each.__name__, each)
    parameters = {"uri": "m", "extra": extra}
    settings = ModelSettings(name="m", max_batch_size=max_batch_size, parameters=parameters)
    settings._source = str(tmp_path / "model-settings.json")
    runtime = HuggingFaceRuntime(settings)
    assert await runtime.load() is True
    local, task = {"trust_remote_code": False, "local_files_only": True}, name.partition("_")[0]
    own = {each: value for each, value in extra.get("model_kwargs", {}).items() if each == "own"}
    assert seen == [
        (str(tmp_path / "m"), task, "BertConfig", {**own, **local, "use_safetensors": True}),
        (str(tmp_path / extra.get("pretrained_tokenizer", "m")), task, local),
        (task, name, "model", {"part": 1}, device, max_batch_size),
    ]
    assert (runtime._model, runtime._kind) == ("pipeline", "text")
