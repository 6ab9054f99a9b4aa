"""The repository: models found on disk, and the settings in their files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import InvalidInput
from dragoman.core.spec import ModelSpec
from dragoman.engine.model_files import server_tables
from dragoman.engine.repository import DiskRepository
from dragoman.engine_setup import settings_for


def write(path: Path, text: str | bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def scan_specs(*paths: Path | str, policy: str = "latest", **defaults: Any) -> dict[str, list[ModelSpec]]:
    repository = DiskRepository([str(p) for p in paths], defaults, policy)
    return {name: source.specs() for name, source in repository.scan().items()}


def only_spec(specs: dict[str, list[ModelSpec]]) -> ModelSpec:
    ((spec,),) = specs.values()
    return spec


def test_a_file_is_a_model_with_its_name(tmp_path: Path) -> None:
    file = write(tmp_path / "resnet.onnx")
    spec = only_spec(scan_specs(file))
    assert (spec.name, spec.runtime, spec.uri, spec.version) == ("resnet", "onnx", str(file), "")


def test_a_folder_with_one_model_file_is_that_model(tmp_path: Path) -> None:
    file = write(tmp_path / "iris" / "model.joblib")
    write(tmp_path / "iris" / "README.md")
    spec = only_spec(scan_specs(tmp_path / "iris"))
    assert (spec.name, spec.runtime, spec.uri) == ("iris", "sklearn", str(file))


@pytest.mark.parametrize("path", ["models/model.joblib", "models", "versions"])
def test_model_name_renames_the_only_model(tmp_path: Path, path: str) -> None:
    write(tmp_path / "models" / "model.joblib")
    write(tmp_path / "versions" / "7" / "model.onnx")
    repository = DiskRepository([str(tmp_path / path)], {}, model_name="iris")
    ((name, source),) = repository.scan().items()
    assert (name, [spec.name for spec in source.specs()]) == ("iris", ["iris"])


def test_model_name_needs_exactly_one_model(tmp_path: Path) -> None:
    write(tmp_path / "a.onnx")
    write(tmp_path / "b.onnx")
    with pytest.raises(InvalidInput, match="'model_name': expected one model, found 2: a, b"):
        DiskRepository([str(tmp_path)], {}, model_name="iris").scan()
    function = ModelSpec(name="f", runtime="python", target=max)
    with pytest.raises(InvalidInput, match="expected one model, found 3: iris, a, b"):
        DiskRepository([str(tmp_path)], {}, live=[function], model_name="iris").scan()
    assert [*DiskRepository([], {}, live=[function], model_name="iris").scan()] == ["iris"]
    with pytest.raises(InvalidInput, match="'model_name': '-x' is not allowed"):
        DiskRepository([str(tmp_path)], {}, model_name="-x")


def test_a_folder_of_models_holds_files_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "a.onnx")
    write(tmp_path / "b" / "model.pt2")
    write(tmp_path / "c" / "model.py")
    write(tmp_path / "train.py")
    write(tmp_path / ".hidden" / "x.onnx")
    write(tmp_path / "empty" / "notes.txt")
    specs = scan_specs(tmp_path)
    assert {n: s[0].runtime for n, s in specs.items()} == {"a": "onnx", "b": "torch", "c": "python"}


@pytest.mark.parametrize("other", ["a.onnx", "iris2.onnx", "sub/model.onnx", "model.onnx", "z.pt2"])
def test_a_model_name_does_not_depend_on_other_files(tmp_path: Path, other: str) -> None:
    file = write(tmp_path / "f1" / "iris.onnx")
    assert [*scan_specs(tmp_path / "f1")] == ["iris"]
    write(tmp_path / "f1" / other)
    assert scan_specs(tmp_path / "f1")["iris"][0].uri == str(file)


@pytest.mark.parametrize("other", ["other.onnx", "a.onnx", "sub/model.onnx"])
def test_a_model_file_has_the_name_of_its_folder(tmp_path: Path, other: str) -> None:
    file = write(tmp_path / "f1" / "model.onnx")
    write(tmp_path / "f1" / other)
    assert scan_specs(tmp_path / "f1")["f1"][0].uri == str(file)
    assert scan_specs(tmp_path)["f1"][0].uri == str(file)


def test_a_sub_folder_is_one_model_with_its_name(tmp_path: Path) -> None:
    file = write(tmp_path / "f1" / "iris.onnx")
    write(tmp_path / "f2" / "other.onnx")
    assert scan_specs(tmp_path)["f1"][0].uri == str(file)
    write(tmp_path / "f1" / "deeper" / "model.onnx")
    assert {n: s[0].uri for n, s in scan_specs(tmp_path).items()}["f1"] == str(file)


def test_a_sub_folder_with_several_models_is_an_error_that_names_them(tmp_path: Path) -> None:
    write(tmp_path / "f1" / "iris.onnx")
    write(tmp_path / "f1" / "iris2.onnx")
    write(tmp_path / "good.onnx")
    with pytest.raises(
        InvalidInput, match=r"sub-folder 'f1' holds several models: iris.onnx, iris2.onnx; expected one"
    ):
        scan_specs(tmp_path)
    assert {*scan_specs(tmp_path / "f1")} == {"iris", "iris2"}
    (tmp_path / "f1" / "iris.onnx").rename(tmp_path / "f1" / "model.onnx")
    assert {n: Path(s[0].uri).name for n, s in scan_specs(tmp_path).items()} == {
        "f1": "model.onnx",
        "good": "good.onnx",
    }


def skipped_files(*paths: Path) -> dict[str, str]:
    repository = DiskRepository([str(p) for p in paths], {})
    repository.scan()
    return {each.file: each.reason for each in repository.skipped}


def test_skipped_files_are_listed_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    write(folder / "iris.onnx")
    for name in ("train.py", "__init__.py", "weights.pt", "README.md", "data.csv", "requests.json", "notes.txt"):
        write(folder / name)
    write(folder / "llama" / "model.ggml")
    write(folder / "forest" / "model.joblib")
    write(folder / "forest" / "scaler.pkl")
    write(folder / "forest" / "features.py")
    write(folder / "code" / "model.py")
    write(folder / "code" / "helper.py")
    reasons = skipped_files(folder)
    assert {*reasons} == {
        "models/train.py",
        "models/weights.pt",
        "models/llama/model.ggml",
        "models/forest/scaler.pkl",
        "models/forest/features.py",
    }
    assert "dragoman serve FILE" in reasons["models/train.py"]
    assert "expected a program of TorchScript" in reasons["models/weights.pt"]
    assert "GGML is not supported" in reasons["models/llama/model.ggml"]
    assert "the sub-folder is one model, 'model.joblib'" in reasons["models/forest/scaler.pkl"]


UNSERVED = {
    "net.tflite": "TensorFlow Lite is not supported; write a SavedModel folder or ONNX",
    "net.keras": "Keras files are not supported; write a SavedModel folder by model.export(folder)",
    "weights.h5": "Keras files are not supported",
    "emotion.hdf5": "HDF5 files, such as Keras weights, are not supported",
    "lid.176.ftz": "fastText is not supported; load it in a model.py",
    "weights.safetensors": "weights alone are not a model; expected them beside the config.json",
    "net.pth.tar": "a checkpoint is not a model; export it as ONNX, torch.export or TorchScript",
    "net.ckpt": "a checkpoint is not a model",
    "flax.msgpack": "weights alone are not a model",
    "net.mlmodel": "Core ML runs on Apple's systems only",
    "net.pdmodel": "Paddle is not supported; convert the model to ONNX",
    "net.caffemodel": "Caffe is retired",
    "yolo.weights": "weights of Darknet are not supported",
    "net.rknn": "formats of mobile inference libraries are not supported",
    "clf.skops": "skops files are not supported",
    "net.mar": "an archive of TorchServe is not a model; unpack it",
    "models.tar.gz": "an archive is not a model; unpack it",
    "models.zip": "an archive is not a model; unpack it",
    "net.onnx.gz": "a compressed file is not a model, unless it is a pickle",
    "weights.npz": "arrays alone are not a model",
    "model.mojo": "H2O MOJO is not supported",
    "net.pt": "'net.pt' is not a model: expected a program of TorchScript or torch.export",
    "net.xml": "'net.xml' is not a model: expected an OpenVINO network",
    "survey.sav": "'survey.sav' is not a model: expected a pickle",
    "model.json": "TensorFlow.js is not supported; serve the SavedModel",
    "word2vec.vectors": "no runtime is known for files of this kind; name one as `runtime` in a dragoman.toml",
    "noname": "no runtime is known for files of this kind",
    "nmp.mlpackage/Manifest.json": "Core ML runs on Apple's systems only",
    "en_core/config.cfg": "spaCy pipelines are not supported; load it in a model.py by spacy.load(folder)",
}
_TFJS = '{"modelTopology": {}, "weightsManifest": []}'


@pytest.mark.parametrize("name", UNSERVED)
def test_a_file_that_is_no_model_has_one_reason(tmp_path: Path, name: str) -> None:
    """Alone in the command, in a folder with a model, alone in a folder, and as the uri of a dragoman.toml."""
    path = write(tmp_path / "m" / name, _TFJS if name == "model.json" else "#" * 5000)
    if name.startswith("en_core"):
        write(path.parent / "meta.json")
    path = tmp_path / "m" / Path(name).parts[0]
    with pytest.raises(InvalidInput) as alone:
        scan_specs(path)
    prefix = f"'{path}' is not served: "
    assert alone.value.message.startswith(f"{prefix}{UNSERVED[name]}")
    reason = alone.value.message.removeprefix(prefix)
    with pytest.raises(InvalidInput) as only:
        scan_specs(tmp_path / "m")
    assert only.value.message == f"found no model in '{tmp_path / 'm'}'; m/{path.name}: {reason}"
    write(tmp_path / "m" / "good.onnx")
    assert skipped_files(tmp_path / "m") == {f"m/{path.name}": reason}
    (tmp_path / "m" / "good.onnx").unlink()
    write(tmp_path / "m" / "dragoman.toml", f'[model]\nuri = "{path.name}"\n')
    with pytest.raises(InvalidInput) as configured:
        scan_specs(tmp_path)
    assert configured.value.message == f"model 'm': '{path.name}' is not served: {reason}"


def test_what_accompanies_models_is_not_reported(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write(folder / "a.onnx")
    large = "#" * 10_000
    for name in (
        "README.md",
        "LICENSE",
        "labels.txt",
        "examples.json",
        "photo.png",
        "table.csv",
        "a.onnx.data",
        "done",
    ):
        write(folder / name, "#" * 100 if name in ("LICENSE", "done") else large)
    write(folder / "a.onnx_data", large)
    write(folder / "net.xml", '<?xml version="1.0"?>\n<net name="m" version="11">')
    write(folder / "net.bin", large)
    write(folder / "sub" / "model.onnx")
    write(folder / "sub" / "vocabulary.spm", large)  # belongs to the model of its sub-folder
    assert skipped_files(folder) == {}
    write(folder / "sub" / "model.safetensors", large)  # may be meant as another model
    assert [*skipped_files(folder)] == ["m/sub/model.safetensors"]


def test_a_folder_without_models_has_one_row(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    write(folder / "a.onnx")
    for i in range(30):
        write(folder / "checkpoint" / f"shard-{i % 3}" / f"part-{i}", "#" * 5000)
    write(folder / "docs" / "pages" / "index.html")
    (folder / "empty").mkdir()
    write(folder / "one" / "vectors.kv", "#" * 5000)
    write(folder / "mixed" / "vectors.kv", "#" * 5000)
    write(folder / "mixed" / "net.tflite")
    reasons = skipped_files(folder)
    unknown = (
        "no runtime is known for files of this kind; name one as `runtime` in a dragoman.toml, or load it in a model.py"
    )
    assert reasons == {
        "m/checkpoint": f"the folder holds no model file; shard-0: {reasons['m/checkpoint'].partition('shard-0: ')[2]}",
        "m/docs": "the folder holds no model file",
        "m/one": unknown,
        "m/mixed/net.tflite": UNSERVED["net.tflite"],
        "m/mixed/vectors.kv": unknown,
    }
    assert reasons["m/checkpoint"].endswith(unknown)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("server.py", "f/server.py: a Python file in a folder is not a model by itself; name it in the command"),
        ("model.ggml", "f/model.ggml: GGML is not supported; expected the folder that save_pretrained writes"),
        ("net.safetensors", "f/net.safetensors: weights alone are not a model"),
    ],
)
def test_the_error_for_a_folder_without_models_names_each_file(tmp_path: Path, name: str, reason: str) -> None:
    write(tmp_path / "f" / name)
    with pytest.raises(InvalidInput) as raised:
        scan_specs(tmp_path / "f")
    assert f"found no model in '{tmp_path / 'f'}'; {reason}" in raised.value.message


def test_models_are_found_at_any_depth(tmp_path: Path) -> None:
    write(tmp_path / "team" / "one" / "iris" / "model.ubj")
    assert only_spec(scan_specs(tmp_path)).name == "iris"


@pytest.mark.parametrize(("policy", "versions"), [("latest", ["10"]), ("all", ["1", "2", "10"]), ("1,10", ["1", "10"])])
def test_integer_folders_are_versions(tmp_path: Path, policy: str, versions: list[str]) -> None:
    for version in ("1", "2", "10"):
        write(tmp_path / "m" / version / "model.onnx")
    specs = scan_specs(tmp_path / "m", policy=policy)["m"]
    assert [s.version for s in specs] == versions
    assert all(s.uri == str(tmp_path / "m" / s.version / "model.onnx") for s in specs)


def test_unknown_versions_in_a_policy_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1" / "model.onnx")
    with pytest.raises(InvalidInput, match="expected versions of 1, got 3"):
        scan_specs(tmp_path / "m", policy="1,3")


def test_a_module_and_object_path(tmp_path: Path) -> None:
    spec = only_spec(scan_specs("package.module:Thing"))
    assert (spec.name, spec.runtime, spec.uri) == ("Thing", "python", "package.module:Thing")


def test_model_settings_json(tmp_path: Path) -> None:
    write(tmp_path / "m" / "weights.joblib")
    settings = {
        "name": "renamed",
        "implementation": "mlserver_sklearn.SKLearnModel",
        "max_batch_size": 16,
        "max_batch_time": 0.5,
        "platform": "sklearn",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4], "parameters": {"content_type": "np"}}],
        "parameters": {"uri": "./weights.joblib", "version": "v1", "extra": {"method": "predict"}},
    }
    write(tmp_path / "m" / "model-settings.json", json.dumps(settings))
    spec = only_spec(scan_specs(tmp_path))
    assert (spec.name, spec.version, spec.runtime) == ("renamed", "v1", "mlserver")
    assert Path(spec.uri) == tmp_path / "m" / "weights.joblib"
    assert (spec.max_batch_size, spec.max_batch_wait_s, spec.platform) == (16, 0.5, "sklearn")
    assert spec.inputs == ()  # metadata that the model gives, not enforced
    assert spec.parameters["model_settings"]["inputs"] == settings["inputs"]
    assert (spec.parameters["library"], spec.placement) == ("sklearn", "")


def test_an_implementation_in_the_folder_of_the_model(tmp_path: Path) -> None:
    file = write(tmp_path / "m" / "models.py")
    write(tmp_path / "m" / "model-settings.json", json.dumps({"name": "m", "implementation": "models.Mine"}))
    spec = only_spec(scan_specs(tmp_path))
    assert (spec.runtime, spec.uri) == ("mlserver", f"{file}:Mine")


def test_an_object_of_a_file_in_the_folder_of_the_model(tmp_path: Path) -> None:
    file = write(tmp_path / "m" / "code.py")
    write(tmp_path / "m" / "dragoman.toml", '[model]\nuri = "code.py:Mine"\n')
    assert only_spec(scan_specs(tmp_path)).uri == f"{file}:Mine"


def test_dragoman_toml_for_one_model_and_for_a_repository(tmp_path: Path) -> None:
    write(tmp_path / "a" / "model.onnx")
    write(tmp_path / "a" / "dragoman.toml", '[model]\nreplicas = 2\nplacement = "process"\nmax_queue = 5\n')
    write(tmp_path / "b.onnx")
    write(tmp_path / "dragoman.toml", "[server]\nhttp_port = 9000\n[models.b]\nmax_batch_size = 4\n")
    specs = scan_specs(tmp_path, replicas=1)
    assert (specs["a"][0].replicas, specs["a"][0].placement, specs["a"][0].max_queue) == (2, "process", 5)
    assert specs["b"][0].max_batch_size == 4
    assert settings_for([str(tmp_path)]).http_port == 9000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nreplica = 2", "unknown model setting 'replica'; did you mean 'replicas'"),
        ("[model]\nreplicas = 'two'", "setting 'replicas': expected an integer, got 'two'"),
        ("[model]\nplacement = 'moon'", "setting 'placement': expected one of inline, thread, process, got 'moon'"),
        ("[model]\nallow_pickle = true", "cannot be set in a file beside models; use --allow-pickle"),
        ("[modell]\n", "unknown table 'modell': expected .* did you mean 'model'"),
        ("[model", "cannot be read"),
        ('[model]\ninputs = [{name = "x", datatype = "FP33", shape = [1]}]', "unknown datatype 'FP33'"),
    ],
)
def test_invalid_files_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "m" / "model.onnx")
    write(tmp_path / "m" / "dragoman.toml", text)
    with pytest.raises(InvalidInput, match=message):
        scan_specs(tmp_path)


def test_settings_for_an_unknown_model_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a.onnx")
    write(tmp_path / "b.onnx")
    write(tmp_path / "dragoman.toml", "[models.c]\nreplicas = 2")
    with pytest.raises(InvalidInput, match="unknown model 'c' in this folder"):
        scan_specs(tmp_path)


def test_paths_without_models_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="found no model in"):
        scan_specs(tmp_path)
    with pytest.raises(InvalidInput, match="not found: expected a model file"):
        scan_specs(tmp_path / "nope")
    with pytest.raises(InvalidInput, match=r"x\.csv' is not served: no runtime is known for files of this kind"):
        scan_specs(write(tmp_path / "x.csv"))


def test_two_models_with_the_same_name_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "a" / "m.onnx")
    write(tmp_path / "b" / "m.onnx")
    message = f"two models are called 'm': {tmp_path / 'a' / 'm.onnx'} and {tmp_path / 'b' / 'm.onnx'}; give one"
    with pytest.raises(InvalidInput, match=re.escape(message)):
        scan_specs(tmp_path / "a" / "m.onnx", tmp_path / "b" / "m.onnx")


def test_names_that_cannot_be_in_a_url_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "my model" / "model.onnx")
    with pytest.raises(InvalidInput, match="'my model' is not allowed"):
        scan_specs(tmp_path)


def test_server_settings_from_settings_json(tmp_path: Path) -> None:
    write(tmp_path / "settings.json", json.dumps({"http_port": 9090, "gzip_enabled": False, "debug": True}))
    settings = {k: v for _, table in server_tables(tmp_path) for k, v in table.items()}
    assert settings == {"http_port": 9090, "compress_responses": False}


@pytest.mark.parametrize(
    "name", ["allow_pickle", "control_token", "control_open", "model_folders", "umbridge_shared_memory"]
)
def test_operator_settings_are_not_read_from_folders(tmp_path: Path, name: str) -> None:
    write(tmp_path / "dragoman.toml", f"[server]\n{name} = true")
    with pytest.raises(InvalidInput, match=f"cannot be set in a file beside models; use --{name.replace('_', '-')}"):
        settings_for([str(tmp_path)])


def test_links_to_parent_folders_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "a" / "m.onnx")
    write(tmp_path / "b" / "n.onnx")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(".")
    assert set(scan_specs(tmp_path)) == {"a", "b"}


def test_an_invalid_folder_does_not_affect_others(tmp_path: Path) -> None:
    write(tmp_path / "good" / "model.onnx")
    write(tmp_path / "bad" / "model.onnx")
    write(tmp_path / "bad" / "dragoman.toml", "[model")
    sources = DiskRepository([str(tmp_path)], {}).scan()
    assert [s.name for s in sources["good"].specs()] == ["good"]
    with pytest.raises(InvalidInput, match="cannot be read"):
        sources["bad"].specs()


@pytest.mark.parametrize("policy", ["newest", "", "1,", "1;2", "-1"])
def test_invalid_version_policies_are_rejected(tmp_path: Path, policy: str) -> None:
    write(tmp_path / "m.onnx")
    with pytest.raises(InvalidInput, match="expected latest, all, or a list"):
        scan_specs(tmp_path, policy=policy)


def test_a_python_file_and_object_in_a_folder_with_spaces(tmp_path: Path) -> None:
    file = write(tmp_path / "my dir" / "model one.py")
    spec = only_spec(scan_specs(f"{file}:thing"))
    assert (spec.name, spec.uri) == ("thing", f"{file}:thing")


def test_default_versions_that_are_not_served_are_rejected(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / "m" / name).mkdir(parents=True)
        (tmp_path / "m" / name / "model.onnx").touch()
    (tmp_path / "m" / "dragoman.toml").write_text('[model]\ndefault_version = "1"\n')
    message = "model 'm': default_version '1' is not among the versions that are served: 2"
    with pytest.raises(InvalidInput, match=message):
        DiskRepository([str(tmp_path)], {}).scan()["m"].specs()
    assert len(DiskRepository([str(tmp_path)], {}, "all").scan()["m"].specs()) == 2
