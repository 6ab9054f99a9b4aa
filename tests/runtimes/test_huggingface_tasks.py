"""Every task of transformers' pipelines is served from the folder alone, with the values of its pipeline.

The models are tiny ones with random weights.
"""

import base64
import io
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.core.binding import bind
from dragoman.core.calls import Infer
from dragoman.core.errors import InvalidInput, ModelFailed, NotSupported
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.pipelines.audio import read_audio, resample
from dragoman.pipelines.results import to_json
from dragoman.pipelines.tasks import TASK_ALIASES, TASKS
from dragoman.runtimes.huggingface.model import HuggingFaceModel
from dragoman.runtimes.recognise import recognise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
pipeline_models = pytest.importorskip("pipeline_models")

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # which transformers leaves to the collector
    pytest.mark.filterwarnings("ignore:At least one mel filter"),  # of a model with few of them
]
TEXTS = ["the brown fox", "a lazy dog jumps"]
PIXELS = np.random.default_rng(0).integers(0, 255, (2, 40, 48, 3)).astype(np.uint8)
SAMPLES = (np.random.default_rng(1).standard_normal((2, 8000)) * 0.1).astype(np.float32)
IMAGES = [Image.fromarray(pixels) for pixels in PIXELS]
TABLE = {"what": ["the", "fox"], "how many": ["cat", "dog"]}
WORDS = [["the", [0, 0, 100, 100]], ["fox", [100, 0, 200, 100]], ["dog", [200, 0, 300, 100]]]
LABELS = ["cat", "dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several are slow on a busy machine
    yield
    torch.set_num_threads(before)


def _saved(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_dir() else pipeline_models.save_model(folder / name, name)


def _load(folder: Path, **parameters: Any) -> HuggingFaceModel:
    model = HuggingFaceModel(ModelSpec(name="m", uri=str(folder), parameters=parameters))
    model.load()
    return model


def _call(model: HuggingFaceModel, inputs: dict[str, Any], *outputs: str, **parameters: Any) -> dict[str, Any]:
    tensors = {name: Tensor.of(array) for name, array in inputs.items()}
    inference = model.infer(bind(Infer(tensors, outputs, parameters), model.signature(), "m"))
    return {name: tensor.data for name, tensor in inference.outputs.items()}


def _results(model: HuggingFaceModel, inputs: dict[str, Any], **parameters: Any) -> list[Any]:
    return [json.loads(text) for text in _call(model, inputs, **parameters)["output"]]


def assert_equal(found: Any, expected: Any) -> None:
    """Compare JSON values; numbers may differ by rounding."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for name in found:
            assert_equal(found[name], expected[name])
    elif isinstance(found, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    else:
        assert found == expected


# The model, its task, the inputs and parameters of a request, and the call of the pipeline.
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any], Callable[[Any], Any]]] = [
    ("classes", "text-classification", {"args": TEXTS}, {}, lambda run: run(TEXTS)),
    (
        "classes",
        "text-classification",
        {"args": TEXTS, "text_pair": ["a cat", "the house"]},
        {"top_k": 2},
        lambda run: run(
            [{"text": a, "text_pair": b} for a, b in zip(TEXTS, ["a cat", "the house"], strict=True)], top_k=2
        ),
    ),
    (
        "tags",
        "token-classification",
        {"args": TEXTS},
        {"aggregation_strategy": "simple"},
        lambda run: run(TEXTS, aggregation_strategy="simple"),
    ),
    (
        "mask",
        "fill-mask",
        {"args": ["the [MASK] fox", "a [MASK] [MASK]"]},
        {"top_k": 3},
        lambda run: run(["the [MASK] fox", "a [MASK] [MASK]"], top_k=3),
    ),
    (
        "mask",
        "fill-mask",
        {"args": ["the [MASK] fox"], "targets": LABELS},
        {},
        lambda run: [run("the [MASK] fox", targets=LABELS)],
    ),
    (
        "nli",
        "zero-shot-classification",
        {"args": TEXTS, "candidate_labels": LABELS},
        {},
        lambda run: run(TEXTS, candidate_labels=LABELS),
    ),
    (
        "nli",
        "zero-shot-classification",
        {"args": TEXTS, "candidate_labels": LABELS},
        {"multi_label": True, "hypothesis_template": "is {}"},
        lambda run: run(TEXTS, candidate_labels=LABELS, multi_label=True, hypothesis_template="is {}"),
    ),
    ("nli", "text-classification", {"args": TEXTS}, {}, lambda run: run(TEXTS)),
    (
        "tapas",
        "table-question-answering",
        {"query": ["how many fox", "what"], "table": [json.dumps(TABLE)]},
        {},
        lambda run: [run(table=TABLE, query=query) for query in ("how many fox", "what")],
    ),
    ("vit", "image-feature-extraction", {"pixels": PIXELS}, {}, lambda run: run(IMAGES)),
    ("detector", "object-detection", {"pixels": PIXELS}, {"threshold": 0.1}, lambda run: run(IMAGES, threshold=0.1)),
    (
        "segmenter",
        "image-segmentation",
        {"pixels": PIXELS},
        {"subtask": "semantic"},
        lambda run: run(IMAGES, subtask="semantic"),
    ),
    ("depth", "depth-estimation", {"pixels": PIXELS}, {}, lambda run: run(IMAGES)),
    (
        "matcher",
        "keypoint-matching",
        {"pixels": np.stack([PIXELS, PIXELS[::-1]])},
        {"threshold": 0.1},
        lambda run: [run(pair, threshold=0.1) for pair in (IMAGES, IMAGES[::-1])],
    ),
    (
        "clip",
        "zero-shot-image-classification",
        {"pixels": PIXELS, "candidate_labels": LABELS},
        {"hypothesis_template": "a {}"},
        lambda run: run(IMAGES, candidate_labels=LABELS, hypothesis_template="a {}"),
    ),
    (
        "owl",
        "zero-shot-object-detection",
        {"pixels": PIXELS, "candidate_labels": LABELS},
        {"threshold": 0.01, "top_k": 4},
        lambda run: [run(image, candidate_labels=LABELS, threshold=0.01, top_k=4) for image in IMAGES],
    ),
    (
        "layoutlm",
        "document-question-answering",
        {"pixels": PIXELS, "question": ["what"], "word_boxes": [json.dumps(WORDS)]},
        {},
        lambda run: [run(image=image, question="what", word_boxes=WORDS) for image in IMAGES],
    ),
    ("hearer", "audio-classification", {"samples": SAMPLES}, {"top_k": 2}, lambda run: run(list(SAMPLES), top_k=2)),
    (
        "speech",
        "automatic-speech-recognition",
        {"samples": SAMPLES},
        {"return_timestamps": "word"},
        lambda run: run(list(SAMPLES), return_timestamps="word"),
    ),
    ("whisper", "automatic-speech-recognition", {"samples": SAMPLES}, {}, lambda run: run(list(SAMPLES))),
    (
        "clap",
        "zero-shot-audio-classification",
        {"samples": SAMPLES, "candidate_labels": LABELS},
        {},
        lambda run: run(list(SAMPLES), candidate_labels=LABELS),
    ),
    ("speaker", "text-to-audio", {"args": TEXTS}, {}, lambda run: run(TEXTS)),
]


@pytest.mark.parametrize(
    ("name", "task", "inputs", "parameters", "direct"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_the_folder_alone_gives_the_values_of_the_pipeline(
    folder: Path, name: str, task: str, inputs: Any, parameters: Any, direct: Callable[[Any], Any]
) -> None:
    saved = _saved(folder, name)
    assert recognise(saved) == "huggingface"
    model = _load(saved)
    assert task in model.details()["tasks"]
    expected = direct(transformers.pipeline(task, model=str(saved), device="cpu"))
    assert_equal(_results(model, inputs, **parameters), json.loads(to_json(expected)))


# --- tasks that transformers 5 has no pipelines for -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "task", "key"),
    [
        ("t5", "text2text-generation", "generated_text"),
        ("bart", "summarization", "summary_text"),
        ("marian", "translation", "translation_text"),
        ("pegasus", "summarization", "summary_text"),
        ("t5", "translation_en_to_fr", "translation_text"),
    ],
)
def test_encoder_decoders_generate_texts(folder: Path, name: str, task: str, key: str) -> None:
    saved = _saved(folder, name)
    assert recognise(saved) == "llm"
    model = _load(saved, task=task)
    own = transformers.AutoModelForSeq2SeqLM.from_pretrained(saved).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    for options in (
        {"max_new_tokens": 6, "num_beams": 1},
        {"max_length": 9, "num_beams": 3, "num_return_sequences": 2},
    ):
        expected = []
        for text in TEXTS:
            inputs = tokenizer(text, return_tensors="pt")
            ids = own.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
            texts = [{key: tokenizer.decode(each, skip_special_tokens=True)} for each in ids]
            expected.append(texts[0] if len(texts) == 1 else texts)
        assert _results(model, {"args": TEXTS}, **options) == expected
    if name != "t5":  # which has no table of positions
        with pytest.raises(InvalidInput, match="parameter 'max_new_tokens': expected at most 64, got 65"):
            _results(model, {"args": TEXTS}, max_new_tokens=65)


def test_parameters_of_a_task_in_the_configuration(folder: Path, tmp_path: Path) -> None:
    saved = pipeline_models.save_model(tmp_path / "t5", "t5")
    config = json.loads((saved / "config.json").read_text())
    params = {"summarization": {"max_length": 7, "num_beams": 1, "prefix": "the house "}}
    (saved / "config.json").write_text(json.dumps({**config, "task_specific_params": params}))
    (with_prefix,) = _results(_load(saved, task="summarization"), {"args": TEXTS[:1]})
    options = {"max_length": 7, "num_beams": 1}
    plain = _load(_saved(folder, "t5"), task="summarization")
    assert _results(plain, {"args": ["the house " + TEXTS[0]]}, **options) == [with_prefix]


def test_questions_about_images(folder: Path) -> None:
    saved = _saved(folder, "vilt")
    model = _load(saved)
    answers = _results(model, {"pixels": PIXELS, "question": ["what is this"]}, top_k=2)
    processor = transformers.ViltImageProcessor.from_pretrained(saved)
    own = transformers.ViltForQuestionAnswering.from_pretrained(saved).eval()
    ids = transformers.AutoTokenizer.from_pretrained(saved)("what is this", return_tensors="pt")
    for image, found in zip(IMAGES, answers, strict=True):
        with torch.inference_mode():
            logits = own(**{**ids, **processor(image, return_tensors="pt")}).logits[0].sigmoid()
        best = logits.argsort(descending=True)[:2].tolist()
        assert [each["answer"] for each in found] == [own.config.id2label[i] for i in best]
        np.testing.assert_allclose([each["score"] for each in found], logits[best].numpy(), rtol=1e-5)


def test_captions_of_images(folder: Path) -> None:
    saved = _saved(folder, "captioner")
    model = _load(saved)
    assert model.details()["tasks"] == ["image-to-text"]
    processor = transformers.ViTImageProcessor.from_pretrained(saved)
    own = transformers.VisionEncoderDecoderModel.from_pretrained(saved).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    ids = own.generate(processor(IMAGES, return_tensors="pt")["pixel_values"], max_new_tokens=4)
    expected = [{"generated_text": tokenizer.decode(each, skip_special_tokens=True)} for each in ids]
    assert _results(model, {"pixels": PIXELS}, max_new_tokens=4) == expected


def test_classes_of_videos(folder: Path) -> None:
    saved = _saved(folder, "video")
    frames = np.stack([np.stack([pixels] * 4) for pixels in PIXELS])
    frames[:, 1] = 255 - frames[:, 1]
    processor = transformers.VideoMAEImageProcessor.from_pretrained(saved)
    own = transformers.VideoMAEForVideoClassification.from_pretrained(saved).eval()
    for video, found in zip(frames, _results(_load(saved), {"frames": frames}, top_k=3), strict=True):
        with torch.inference_mode():
            scores = own(**processor(list(video), return_tensors="pt")).logits[0].softmax(-1)
        assert {each["label"]: pytest.approx(each["score"], rel=1e-5) for each in found} == {
            label: float(scores[i]) for i, label in own.config.id2label.items()
        }


# --- arrays ---------------------------------------------------------------------------------------------------------


def test_arrays_on_request(folder: Path) -> None:
    images = _load(_saved(folder, "vit"))
    expected = np.concatenate([np.array(each, np.float32) for each in _results(images, {"pixels": PIXELS})])
    np.testing.assert_allclose(_call(images, {"pixels": PIXELS}, "features")["features"], expected, rtol=1e-6)
    depth = _load(_saved(folder, "depth"))
    (first, second) = _results(depth, {"pixels": PIXELS})
    found = _call(depth, {"pixels": PIXELS}, "predicted_depth")["predicted_depth"]
    assert found.shape == (2, 40, 48)
    np.testing.assert_allclose(found, [first["predicted_depth"], second["predicted_depth"]], rtol=1e-6)
    with pytest.raises(NotSupported, match="expected images of one size"):
        _call(depth, {"inputs": [_file(IMAGES[0]), _file(IMAGES[1].resize((64, 64)))]}, "predicted_depth")
    speaker = _load(_saved(folder, "speaker"))
    spoken = _results(speaker, {"args": TEXTS})
    sound = _call(speaker, {"args": TEXTS}, "audio", "lengths", "sampling_rate")
    assert sound["sampling_rate"].tolist() == [8000, 8000]
    for row, length, result in zip(sound["audio"], sound["lengths"], spoken, strict=True):
        np.testing.assert_allclose(row[:length], np.array(result["audio"], np.float32), rtol=1e-5, atol=1e-7)
        assert not row[length:].any()


def test_images_in_results_are_files(folder: Path) -> None:
    (result,) = _results(_load(_saved(folder, "depth")), {"pixels": PIXELS[:1]})
    prefix, _, data = result["depth"].partition(",")
    assert prefix == "data:image/png;base64"
    decoded = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))
    depth = np.array(result["predicted_depth"], np.float32)
    scaled = (depth - depth.min()) / (depth.max() - depth.min()) * 255
    assert decoded.shape == (40, 48)
    assert np.abs(decoded - scaled).max() <= 1


def test_values_without_a_form_in_json_are_errors() -> None:
    mode_f = Image.fromarray(np.zeros((2, 2), np.float32))
    assert to_json({"a": np.float32(1), "b": {3, 1}, "c": torch.zeros(1)}) == '{"a": 1.0, "b": [1, 3], "c": [0.0]}'
    assert to_json(mode_f).startswith('"data:image/tiff;base64,')
    with pytest.raises(ModelFailed, match="a value of the type object, which has no form in JSON"):
        to_json([object()])


# --- files of images and sound --------------------------------------------------------------------------------------


def _file(image: Any, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


DEEP = Image.fromarray(np.full((8, 8), 40_000, np.uint16))  # which Pillow converts to 255


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM", "GIF", "WEBP", "JPEG"])
def test_images_as_files_and_as_base64(folder: Path, form: str) -> None:
    model = _load(_saved(folder, "vit-classes"))
    content = _file(IMAGES[0], form)
    text = base64.b64encode(content)
    lines = base64.encodebytes(content)
    expected = _results(model, {"inputs": [content]})
    for element in (text, lines, b"\n" + lines, base64.urlsafe_b64encode(content), text.rstrip(b"=")):
        assert _results(model, {"inputs": [element]}) == expected
    assert _results(model, {"inputs": [b"data:image/x;base64," + lines]}) == expected


def _wav(samples: Any, rate: int, bits: int, channels: int = 1, kind: int = 1) -> bytes:
    """Return a WAV file (Multimedia Programming Interface and Data Specifications 1.0) of samples from -1 to 1."""
    frames = np.repeat(np.asarray(samples)[:, None], channels, 1)
    if kind == 3:
        data = frames.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        data = np.round(frames * 127 + 128).astype(np.uint8).tobytes()
    else:
        whole = np.round(frames * (2 ** (bits - 1) - 1)).astype("<i4")
        data = b"".join(int(each).to_bytes(bits // 8, "little", signed=True) for each in whole.reshape(-1))
    width = bits // 8 * channels
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * width, width, bits)
    chunks = b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", len(form)) + form
    chunks += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks


@pytest.mark.parametrize(
    ("bits", "channels", "kind"), [(8, 1, 1), (16, 1, 1), (16, 2, 1), (24, 1, 1), (32, 1, 1), (32, 2, 3), (64, 1, 3)]
)
def test_wav_files_need_no_ffmpeg(folder: Path, bits: int, channels: int, kind: int) -> None:
    content = _wav(SAMPLES[0], 16000, bits, channels, kind)
    samples = read_audio(content, 16000, "input 'a'")
    np.testing.assert_allclose(samples, SAMPLES[0], atol=1.1 / 2 ** min(bits - 1, 23))
    model = _load(_saved(folder, "hearer"))
    expected = _results(model, {"samples": samples[None]})
    assert _results(model, {"inputs": [content]}) == expected
    assert _results(model, {"inputs": [base64.encodebytes(content)]}) == expected


def test_sound_is_resampled(folder: Path) -> None:
    model = _load(_saved(folder, "hearer"))
    time = np.arange(11025) / 11025
    tone = np.sin(2 * np.pi * 440 * time).astype(np.float32)
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    found = resample(tone, 11025, 16000, "a")
    assert found.shape == (16000,)
    np.testing.assert_allclose(found[200:-200], expected[200:-200], atol=2e-3)
    assert _results(model, {"inputs": [_wav(tone, 11025, 32, kind=3)]}) == _results(
        model, {"samples": tone[None]}, sampling_rate=11025
    )
    half = resample(np.sin(2 * np.pi * 7000 * np.arange(16000) / 16000), 16000, 8000, "a")
    assert np.abs(half[200:-200]).max() < 0.02  # above half of the rate nothing is left


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"https://example.com/a.wav", InvalidInput, "expected a WAV, FLAC, Ogg or MP3 file"),
        (b"RIFF\0\0\0\0WAVEdata\0\0\0\0", InvalidInput, "expected a WAV file: no 'fmt ' and 'data' chunks found"),
        (_wav([0.0], 16000, 16)[:40], InvalidInput, "expected a WAV file"),
        (_wav([0.0], 16000, 16, kind=2), InvalidInput, "expected PCM of 8, 16, 24 or 32 bits or floats"),
        (_wav([0.0], 1, 16), InvalidInput, "expected a sampling rate from 1000 to 384000 Hz, got 1"),
        (_wav([np.inf], 16000, 32, kind=3), InvalidInput, "expected finite samples"),
        (b"fLaC\0\0\0\0", NotSupported, "need the program ffmpeg on the server; send a WAV file"),
    ],
)
def test_invalid_sound_is_rejected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, error: type[Exception], message: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(error, match=message):
        _results(_load(_saved(folder, "hearer")), {"inputs": [content]})


# --- invalid requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inputs", "parameters", "message"),
    [
        ("mask", {"args": ["no mask"]}, {}, "fill-mask: .*mask"),
        (
            "mask",
            {"args": ["[MASK]"], "targets": np.array([], object)},
            {},
            "input 'targets': expected non-empty texts",
        ),
        (
            "nli",
            {"args": TEXTS, "candidate_labels": ["a", ""]},
            {},
            "input 'candidate_labels': expected non-empty texts",
        ),
        (
            "nli",
            {"args": TEXTS, "candidate_labels": LABELS},
            {"hypothesis_template": "{0.__class__}{}"},
            "parameter 'hypothesis_template'",
        ),
        (
            "nli",
            {"args": TEXTS, "candidate_labels": LABELS},
            {"hypothesis_template": "none"},
            "parameter 'hypothesis_template'",
        ),
        ("clip", {"pixels": PIXELS}, {}, "missing required input.*candidate_labels"),
        (
            "clip",
            {"pixels": PIXELS, "candidate_labels": ["a " * 80]},
            {},
            "label 0 has 82 tokens and the model takes 64",
        ),
        (
            "layoutlm",
            {"pixels": PIXELS, "question": ["a"], "word_boxes": ['[["a", [0, 0, 1, 2000]]]']},
            {},
            "input 'word_boxes': expected pairs",
        ),
        (
            "layoutlm",
            {"pixels": PIXELS, "question": ["a"] * 3},
            {},
            "input 'question': expected the same number of rows",
        ),
        (
            "tapas",
            {"query": ["a"], "table": ['{"a": ["1"], "b": []}']},
            {},
            "input 'table': expected an object of columns",
        ),
        ("tapas", {"query": ["a"], "table": ["{"]}, {}, "input 'table': expected JSON at element 0"),
        ("tapas", {"query": [""], "table": [json.dumps(TABLE)]}, {}, "input 'query': expected a question at element 0"),
        ("gpt2-classes", {"args": ["the fox", ""]}, {}, "text 1: expected at least one token, got ''"),
        ("hearer", {"samples": SAMPLES}, {"sampling_rate": "8000"}, "parameter 'sampling_rate': expected an integer"),
        ("hearer", {"samples": np.full((1, 8), np.nan, np.float32)}, {}, "expected finite samples"),
        ("detector", {"pixels": PIXELS}, {"threshold": "a"}, "parameter 'threshold': expected a number"),
        ("vit", {"inputs": [b"/etc/passwd"]}, {}, "expected an image"),
        ("vit", {"inputs": [_file(DEEP)]}, {}, "expected 8 bits for each channel, got an image of mode I;16"),
    ],
)
def test_invalid_requests_name_the_input(folder: Path, name: str, inputs: Any, parameters: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        _results(_load(_saved(folder, name)), inputs, **parameters)


# --- what is not served ---------------------------------------------------------------------------------------------


def _config(tmp_path: Path, kind: str, architecture: str, **values: Any) -> Path:
    config = getattr(transformers, f"{kind}Config")(**values)
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "architecture", "message"),
    [
        ("Wav2Vec2", "Wav2Vec2Model", "a model without a head that takes 'input_values'"),
        ("Bert", "BertForNextSentencePrediction", "'BertForNextSentencePrediction', which belongs to no task"),
        ("GPT2", "GPT2LMHeadModel", 'text generation has a runtime of its own, runtime = "llm"'),
        ("ViT", "ViTForImageClassification", "no weights found in .*; expected model.safetensors"),
    ],
)
def test_reasons_for_models_that_are_not_served(tmp_path: Path, kind: str, architecture: str, message: str) -> None:
    with pytest.raises(ModelFailed, match=message):
        _load(_config(tmp_path, kind, architecture))


def test_a_package_that_a_pipeline_needs_is_named_when_the_model_is_loaded(folder: Path) -> None:
    if transformers.utils.is_torchvision_available():
        assert len(_results(_load(_saved(folder, "sam")), {"pixels": PIXELS}, points_per_batch=16)) == 2
        return
    with pytest.raises(
        ModelFailed, match=r"the task .mask-generation' needs a package that is not installed: .*Torchvision"
    ):
        _load(_saved(folder, "sam"))


def test_every_task_of_transformers_is_in_the_table_or_named() -> None:
    known = set(transformers.pipelines.SUPPORTED_TASKS) | set(transformers.pipelines.TASK_ALIASES)
    served = {name for name, task in TASKS.items() if not task.elsewhere}
    assert known - served - set(TASK_ALIASES) == {"text-generation", "any-to-any"}
