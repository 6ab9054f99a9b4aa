"""Metrics under the names of Triton, as values; which backend runs a model."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from dragoman.core.metrics import Family, Kind, Sample
from dragoman_triton.backends import find_backend, is_model_folder, is_version_folder, unsupported_reason
from dragoman_triton.metric_names import families


def family(name: str, kind: Kind, *samples: tuple[str, float, Mapping[str, str]]) -> Family:
    place = {"model": "m", "version": "1"}
    return Family(
        f"dragoman_{name}",
        kind,
        "Text.",
        tuple(Sample(f"dragoman_{name}{suffix}", {**place, **labels}, value) for suffix, value, labels in samples),
    )


def call(call: str, outcome: str = "ok", **more: str) -> dict[str, str]:
    return {"call": call, "outcome": outcome, **more}


OTHER = {"model": "other", "version": ""}
OURS = [
    family(
        "calls_total",
        "counter",
        ("", 10, call("Infer")),
        ("", 4, call("Infer", replica="1")),
        ("", 3, call("Infer", **OTHER)),
        ("", 50, call("Generate")),
        ("", 1, call("Infer", "Cancelled")),
        ("", 2, call("Infer", "Overloaded")),
        ("", 3, call("Infer", "InvalidInput")),
        ("", 4, call("Infer", "NotReady")),
        ("", 5, call("Infer", "ModelFailed")),
        ("", 6, call("Infer", "WorkerLost")),
        ("", 7, call("Generate", "ModelFailed")),
    ),
    family(
        "executions_total",
        "counter",
        ("", 4, {"call": "Infer"}),
        ("", 1, {"call": "Infer", "replica": "1"}),
        ("", 3, {"call": "Infer", **OTHER}),
        ("", 44, {"call": "Generate"}),
    ),
    family("rows_total", "counter", ("", 33, {"call": "Infer"}), ("", 44, {"call": "Generate"})),
    family("response_cache_hits_total", "counter", ("", 5, {"call": "Infer"}), ("", 7, {"call": "Score"})),
    family("response_cache_misses_total", "counter", ("", 8, {"call": "Infer"}), ("", 9, {"call": "Score"})),
    family(
        "call_duration_seconds",
        "histogram",
        ("_sum", 0.5, call("Infer")),
        ("_count", 14, call("Infer")),
        ("_sum", 0.25, call("Infer", "ModelFailed")),
        ("_sum", 9, call("Generate")),
    ),
    family("queue_seconds", "histogram", ("_sum", 0.125, {"call": "Infer"}), ("_count", 3, {"call": "Infer"})),
    family("compute_seconds", "histogram", ("_sum", 0.25, {"call": "Infer"}), ("_sum", 8, {"call": "Generate"})),
    family("queued_calls", "gauge", ("", 2, {}), ("", 1, {"replica": "1"})),
    family("model_ready", "gauge", ("", 1, {}), ("", 0, OTHER)),
]
CACHE = family("response_cache_bytes", "gauge", ("", 100, {}))


def values(ours: list[Family]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for each in families(ours):
        assert each.help.endswith(".")
        assert each.kind == ("gauge" if each.name == "nv_inference_pending_request_count" else "untyped")
        assert {sample.name for sample in each.samples} <= {each.name}
        found[each.name] = {"/".join(sample.labels.values()): sample.value for sample in each.samples}
    return found


def test_values_of_the_metrics() -> None:
    expected = {
        "nv_inference_request_success": {"m/1": 14, "other/": 3},
        "nv_inference_request_failure": {
            "m/1/CANCELED": 1,
            "m/1/REJECTED": 2,
            "m/1/OTHER": 7,
            "m/1/BACKEND": 11,
        },
        "nv_inference_count": {"m/1": 33},
        "nv_inference_exec_count": {"m/1": 5, "other/": 3},
        "nv_inference_pending_request_count": {"m/1": 3, "other/": 0},
        "nv_inference_request_duration_us": {"m/1": 500_000, "other/": 0},
        "nv_inference_queue_duration_us": {"m/1": 125_000, "other/": 0},
        "nv_inference_compute_infer_duration_us": {"m/1": 250_000, "other/": 0},
    }
    assert values(OURS) == expected
    cached = {"nv_cache_num_hits_per_model": {"m/1": 5}, "nv_cache_num_misses_per_model": {"m/1": 8}}
    assert values([*OURS, CACHE]) == {**expected, **cached}
    (failures,) = [each for each in families(OURS) if each.name == "nv_inference_request_failure"]
    assert failures.samples[0].labels == {"model": "m", "version": "1", "reason": "CANCELED"}
    (success, *_) = families(OURS)
    assert success.samples[0].labels == {"model": "m", "version": "1"}


def test_metrics_without_any_call() -> None:
    found = values([family("model_ready", "gauge", ("", 1, {}))])
    zeros = {name for name, each in found.items() if each == {"m/1": 0}}
    assert zeros == {
        "nv_inference_pending_request_count",
        "nv_inference_request_duration_us",
        "nv_inference_queue_duration_us",
        "nv_inference_compute_infer_duration_us",
    }
    assert all(found[name] == {} for name in found.keys() - zeros)


@pytest.mark.parametrize(
    ("backend", "platform", "model", "files", "expected"),
    [
        ("onnxruntime", "", "m", (), ("onnx", "model.onnx", "onnxruntime_onnx")),
        ("", "onnxruntime_onnx", "m", (), ("onnx", "model.onnx", "onnxruntime_onnx")),
        ("", "", "m.onnxruntime", (), ("onnx", "model.onnx", "onnxruntime_onnx")),
        ("", "", "m", ("model.onnx",), ("onnx", "model.onnx", "onnxruntime_onnx")),
        ("pytorch", "", "m", (), ("torch", "model.pt", "pytorch_libtorch")),
        ("pytorch", "libtorch", "m", (), ("torch", "model.pt", "pytorch_libtorch")),
        ("", "libtorch", "m", (), ("torch", "model.pt", "libtorch")),
        ("tensorflow", "tensorflow_graphdef", "m", (), ("tensorflow", "model.graphdef", "tensorflow_graphdef")),
        ("tensorflow", "", "m", ("model.graphdef",), ("tensorflow", "model.graphdef", "tensorflow_graphdef")),
        ("tensorflow", "", "m", (), ("tensorflow", "model.savedmodel", "tensorflow_savedmodel")),
        ("openvino", "", "m", (), ("openvino", "model.xml", "openvino_ir")),
        ("tensorrt", "", "m", (), ("tensorrt", "model.plan", "tensorrt_plan")),
        ("python", "", "m", (), ("python", "model.py", "")),
        ("", "", "m", ("model.py",), ("python", "model.py", "")),
        ("", "ensemble", "m", (), ("ensemble", "", "ensemble")),
        ("", "", "m", (), None),
        ("", "other", "m", ("model.onnx",), None),
        ("other", "", "m", ("model.onnx",), None),
        ("other", "onnxruntime_onnx", "m", (), None),
    ],
)
def test_the_backend_of_a_model(
    tmp_path: Path, backend: str, platform: str, model: str, files: tuple[str, ...], expected: tuple[str, ...] | None
) -> None:
    for name in files:
        (tmp_path / name).touch()
    found = find_backend(backend, platform, model, tmp_path)
    assert (None if found is None else (found.runtime, found.file, found.platform)) == expected
    assert not files or find_backend(backend, platform, model, None) != found or expected is None


def test_folders_of_models(tmp_path: Path) -> None:
    version = tmp_path / "1"
    version.mkdir()
    assert (is_model_folder(tmp_path), is_version_folder(version)) == (False, False)
    (version / "model.py").write_text("class Model: ...")
    assert (is_model_folder(tmp_path), is_version_folder(version)) == (False, False)
    (version / "model.py").write_text("class TritonPythonModel: ...")
    assert (is_model_folder(tmp_path), is_version_folder(version)) == (True, True)
    (version / "model.py").unlink()
    (tmp_path / "config.pbtxt").touch()
    (tmp_path / "a").mkdir()
    assert (is_model_folder(tmp_path), is_version_folder(version), is_version_folder(tmp_path / "a")) == (
        True,
        True,
        False,
    )
    assert not is_model_folder(tmp_path / "missing")


def test_why_a_backend_is_not_supported() -> None:
    known = "expected one of onnxruntime, pytorch, tensorflow, openvino, tensorrt, python"
    assert unsupported_reason("", "") == f"{known}, or a version folder with a file such as model.onnx or model.py"
    assert unsupported_reason("mine", "").startswith(f"{known}; if it is a shared library, rewrite it as a Triton")
    assert unsupported_reason("", "mine") == unsupported_reason("mine", "")
    for names, reason, way_out in (
        ("mxnet mxnet_mxnet", "MXNet is retired upstream", "with mxnet.onnx.export_model (MXNet 1.9)"),
        ("caffe2 caffe2_netdef", "Caffe2 is retired upstream", "with caffe2.python.onnx of PyTorch before 2.0"),
        ("torch_aoti", "packages of AOTInductor are not supported: ", "write the program with torch.export.save"),
        ("fil", "the FIL backend is not supported: ", "the file of XGBoost, LightGBM or scikit-learn itself"),
        ("vllm", "the vLLM backend is not supported: ", 'the model with runtime = "vllm" in dragoman.toml'),
        ("tensorrtllm", "TensorRT-LLM is not supported: ", "the folder that save_pretrained writes, by llm or vllm"),
        ("dali", "DALI pipelines are not supported: rewrite it", "serve the model's file by one of our runtimes"),
    ):
        for name in names.split():
            found = unsupported_reason(name, "")
            assert (found.startswith(reason), found.endswith(way_out)) == (True, True), found
            assert unsupported_reason("", name) == found == unsupported_reason(name, "other")
