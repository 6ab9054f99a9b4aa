"""Hugging Face models return exactly what transformers' pipelines return when they are called directly.

The models are small ones with random weights, written by save_pretrained.
"""

import base64
import io
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dragoman.core.binding import bind
from dragoman.core.calls import Embed, Infer
from dragoman.core.datatypes import BYTES
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.scoring import Score
from dragoman.core.signature import TensorSpec
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.huggingface.model import HuggingFaceModel
from dragoman.runtimes.recognise import recognise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["a good film", "ann was seen in paris by the lazy dog", "bad"]
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
# transformers leaves the file to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


def _tokenizer() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, "where is ann quick brown fox"], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save one folder per kind of model, named after the suffix of its architecture."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = _tokenizer()
    ends = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "Model", "LMHeadModel")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="unclosed file", category=ResourceWarning)
        for end in ends:
            labels = {} if end == "ForQuestionAnswering" else {"num_labels": 3}
            config = transformers.BertConfig(vocab_size=200, max_position_embeddings=64, **SMALL, **labels)
            torch.manual_seed(0)
            getattr(transformers, f"Bert{end}")(config).save_pretrained(folder / end)
            tokenizer.save_pretrained(folder / end)
        config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=3, **SMALL)
        transformers.ViTForImageClassification(config).save_pretrained(folder / "ForImageClassification")
        processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
        processor.save_pretrained(folder / "ForImageClassification")
    return folder


def _load(folder: Path, max_batch_size: int = 0, **parameters: Any) -> HuggingFaceModel:
    spec = ModelSpec(name="m", uri=str(folder), parameters=parameters, max_batch_size=max_batch_size)
    model = HuggingFaceModel(spec)
    model.load()
    return model


def _call(model: HuggingFaceModel, inputs: dict[str, Any], *outputs: str, **parameters: Any) -> Any:
    tensors = {name: Tensor.of(array) for name, array in inputs.items()}
    for tensor in tensors.values():
        tensor.data.flags.writeable = False
    outcome = model.infer(bind(Infer(tensors, outputs, parameters), model.signature(), "m"))
    return {name: tensor if name == "output" else tensor.data for name, tensor in outcome.outputs.items()}


def _results(model: HuggingFaceModel, inputs: dict[str, Any], **parameters: Any) -> list[Any]:
    output = _call(model, inputs, **parameters)["output"]
    assert output.datatype is BYTES
    assert output.parameters == {"content_type": "hg_jsonlist"}
    return [json.loads(text) for text in output.data]


def _direct(task: str, folder: Path) -> Any:
    return transformers.pipeline(task, model=str(folder), device="cpu")


def _as_json(results: Any) -> Any:
    return json.loads(json.dumps(results, default=lambda number: number.item()))


def test_text_classification(saved: Path) -> None:
    folder = saved / "ForSequenceClassification"
    model, direct = _load(folder), _direct("text-classification", folder)
    assert model.platform == "huggingface_pytorch"
    assert model.signature().inputs == tuple(TensorSpec(n, BYTES, (-1,), optional=True) for n in ("args", "text_pair"))
    assert model.signature().outputs == (TensorSpec("output", BYTES, (-1,)),)
    assert model.signature().batched
    for name in ("args", "inputs", "text_inputs", "array_inputs"):
        assert _results(model, {name: TEXTS}) == direct(TEXTS)
    assert _results(model, {"args": TEXTS[:1]}, top_k=2) == direct(TEXTS[:1], top_k=2)
    assert _results(model, {"args": TEXTS}, function_to_apply="none") == direct(TEXTS, function_to_apply="none")
    assert _results(model, {"args": np.array([], object)}) == []


def test_texts_are_batched_if_max_batch_size_is_set(saved: Path) -> None:
    folder = saved / "ForSequenceClassification"
    together, alone = (_results(_load(folder, size), {"args": TEXTS}) for size in (2, 0))
    assert [each["label"] for each in together] == [each["label"] for each in alone]
    np.testing.assert_allclose([e["score"] for e in together], [e["score"] for e in alone], rtol=1e-5)


def test_token_classification(saved: Path) -> None:
    folder = saved / "ForTokenClassification"
    model, direct = _load(folder, task="ner"), _direct("token-classification", folder)
    assert _results(model, {"args": TEXTS}) == _as_json(direct(TEXTS))
    assert _results(model, {"args": TEXTS[:1]}) == _as_json(direct(TEXTS[:1]))
    simple = _as_json(direct(TEXTS, aggregation_strategy="simple"))
    assert _results(model, {"args": TEXTS}, aggregation_strategy="simple") == simple


def test_features_as_json_and_as_an_array(saved: Path) -> None:
    model, direct = _load(saved / "Model"), _direct("feature-extraction", saved / "Model")
    assert not model.signature().batched
    expected = direct(TEXTS)
    assert _results(model, {"args": TEXTS}) == expected
    result = _call(model, {"args": TEXTS}, "features", "attention_mask")
    assert sorted(result) == ["attention_mask", "features"]
    assert result["features"].shape == (3, max(len(vectors[0]) for vectors in expected), 16)
    for features, mask, vectors in zip(result["features"], result["attention_mask"], expected, strict=True):
        np.testing.assert_array_equal(features[mask == 1], np.array(vectors[0], np.float32))
        assert not features[mask == 0].any()
    assert _call(model, {"args": np.array([], object)}, "features")["features"].shape == (0, 0, 0)


def test_question_answering(saved: Path) -> None:
    folder = saved / "ForQuestionAnswering"
    model = _load(folder)
    assert [spec.name for spec in model.signature().inputs] == ["question", "context"]
    question, context = "where is ann", TEXTS[1]
    (best,) = _results(model, {"question": [question], "context": [context]}, align_to_words=False)
    # The rule, applied to the model's logits.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    encoded = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
    offsets = encoded.pop("offset_mapping")[0].tolist()
    with torch.inference_mode():
        output = network(**encoded)
    inside = [i for i, part in enumerate(encoded.sequence_ids(0)) if part == 1]
    candidates = [0, *inside]  # [CLS] means no answer
    begin, end = (
        torch.zeros(len(offsets)).index_put((torch.tensor(candidates),), logits[0][candidates].softmax(-1))
        for logits in (output.start_logits, output.end_logits)
    )
    score, first, last = max((float(begin[a] * end[b]), a, b) for a in inside for b in inside if a <= b)
    assert best["score"] == pytest.approx(score, rel=1e-5)
    assert (best["start"], best["end"]) == (offsets[first][0], offsets[last][1])
    assert best["answer"] == context[best["start"] : best["end"]]


def test_options_of_question_answering(saved: Path) -> None:
    model = _load(saved / "ForQuestionAnswering")
    long = {"question": ["where is ann", "who"], "context": [" ".join([TEXTS[1]] * 30), TEXTS[0]]}
    for context, results in zip(long["context"], _results(model, long, top_k=3, max_answer_len=2), strict=True):
        scores = [result["score"] for result in results]
        assert scores == sorted(scores, reverse=True)
        assert len({(result["start"], result["end"]) for result in results}) == 3
        for result in results:
            assert result["answer"] == context[result["start"] : result["end"]]
            assert len(result["answer"].split()) <= 2
    (with_none,) = _results(model, {"question": ["who"], "context": ["bad"]}, handle_impossible_answer=True, top_k=9)
    assert {"start": 0, "end": 0, "answer": ""}.items() <= min(with_none, key=lambda a: len(a["answer"])).items()
    assert sum(result["score"] for result in with_none) <= 1.0
    with pytest.raises(InvalidInput, match="input 'context': expected some text"):
        _results(model, {"question": ["who"], "context": ["  "]})
    with pytest.raises(InvalidInput, match="leave no room for the context"):
        _results(model, {"question": ["ann " * 80], "context": ["bad"]})
    with pytest.raises(InvalidInput, match="same number of rows"):
        _results(model, {"question": ["who", "who"], "context": ["bad"]})


def _png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_image_classification(saved: Path) -> None:
    folder = saved / "ForImageClassification"
    model, direct = _load(folder), _direct("image-classification", folder)
    assert [spec.name for spec in model.signature().inputs] == ["inputs", "pixels"]
    pixels = np.random.default_rng(0).integers(0, 255, (2, 20, 24, 3)).astype(np.uint8)
    expected = direct([Image.fromarray(each) for each in pixels])
    files = [_png(each) for each in pixels]
    coded = [base64.b64encode(files[0]), b"data:image/png;base64," + base64.b64encode(files[1])]
    assert _results(model, {"pixels": pixels}) == expected
    assert _results(model, {"inputs": files}) == expected
    assert _results(model, {"array_inputs": coded}) == expected
    assert _results(model, {"inputs": files[:1]}, top_k=1) == direct([Image.fromarray(pixels[0])], top_k=1)
    grey = np.zeros((9, 9), np.uint8)
    assert _results(model, {"inputs": [_png(grey)]}) == direct([Image.fromarray(grey)])
    for wrong in (b"https://example.com/a.png", str(folder / "config.json").encode(), files[0][:60], b""):
        with pytest.raises(InvalidInput, match="expected an image"):
            _results(model, {"inputs": [wrong]})
    with pytest.raises(InvalidInput, match="expected one input, 'inputs' or 'pixels'; got inputs, pixels"):
        _results(model, {"inputs": files, "pixels": pixels})


def test_invalid_calls_are_rejected(saved: Path) -> None:
    model = _load(saved / "ForSequenceClassification")
    for inputs, parameters, message in (
        ({"text": ["a"]}, {}, "unexpected inference input 'text'; expected 'args'"),
        ({}, {}, "expected one input, 'args'; got none"),
        ({"inputs": np.zeros(2)}, {}, "input 'inputs': expected datatype BYTES, got FP64"),
        ({"args": [b"\xff"]}, {}, "input 'args': expected UTF-8 text"),
        ({"args": ["a"]}, {"top_k": 0}, "parameter 'top_k': expected an integer from 1, got 0"),
        ({"args": ["a"]}, {"top_k": True}, "parameter 'top_k': expected an integer from 1, got True"),
        ({"args": ["a"]}, {"function_to_apply": "x"}, "parameter 'function_to_apply': expected one of sigmoid"),
    ):
        with pytest.raises(InvalidInput, match=message):
            _results(model, inputs, **parameters)


def test_texts_that_are_too_long(saved: Path) -> None:
    for name in ("ForSequenceClassification", "Model"):
        model = _load(saved / name)
        with pytest.raises(InvalidInput, match="text 1 has 102 tokens and the model takes 64"):
            _results(model, {"args": ["a", "a " * 100]})
        assert len(_results(model, {"args": ["a", "a " * 100]}, truncation=True)) == 2


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"task": "text-generation"}, "task 'text-generation' is not served .* runtime = \"llm\""),
        ({"task": "any-to-any"}, "task 'any-to-any' is not served .* runtime = \"llm\""),
        ({"task": "translation_en_to_fr"}, "has no model of the type 'bert' for the task 'translation'"),
        ({"task": "counting"}, "task 'counting' is not served .*: expected one of text-classification"),
        ({"truncate": "yes"}, "parameter 'truncate': expected true or false, got 'yes'"),
        ({"optimum_model": True}, "optimum_model is not supported"),
        ({"framework": "tf"}, "framework 'tf' is not supported"),
        ({"pretrained_model": "bert-base-uncased"}, "folder 'bert-base-uncased' not found; nothing is downloaded"),
        ({"pretrained_tokenizer": "../no"}, r"folder '../no' not found; nothing is downloaded"),
        ({"task": "text-classification"}, "the weights lack classifier.bias, classifier.weight"),
        ({"task": "image-classification"}, "has no model of the type 'bert' for the task 'image-classification'"),
    ],
)
def test_invalid_parameters_are_rejected(saved: Path, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFailed, match=message):
        _load(saved / "Model", **parameters)


def test_a_model_and_a_tokenizer_in_other_folders(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "ForSequenceClassification", tmp_path / "net")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "net" / name).unlink()
    model = _load(tmp_path, pretrained_model="net", pretrained_tokenizer=str(saved / "Model"), device=-1)
    expected = _direct("text-classification", saved / "ForSequenceClassification")(TEXTS)
    assert _results(model, {"args": TEXTS}) == expected


def test_generating_models_and_pickles_are_rejected(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFailed, match='text generation has a runtime of its own, runtime = "llm"'):
        _load(saved / "LMHeadModel")
    shutil.copytree(saved / "Model", tmp_path / "pickled")
    weights = transformers.AutoModel.from_pretrained(saved / "Model").state_dict()
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(ModelFailed, match="--allow-pickle"):
        _load(tmp_path / "pickled")
    model = HuggingFaceModel(ModelSpec(name="m", uri=str(tmp_path / "pickled"), allow_pickle=True))
    model.load()
    assert _results(model, {"args": TEXTS}) == _direct("feature-extraction", saved / "Model")(TEXTS)


def test_pickles_beside_safetensors_are_not_read(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "Model", tmp_path / "both")
    (tmp_path / "both" / "pytorch_model.bin").write_bytes(b"never read")
    assert _results(_load(tmp_path / "both"), {"args": TEXTS}) == _direct("feature-extraction", saved / "Model")(TEXTS)


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_labels"])
def test_more_modules_than_weights_are_rejected_before_they_are_built(saved: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved / "ForSequenceClassification", folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, name: 10**9}))
    with pytest.raises(
        ModelFailed, match=rf"config.json in 'model' has {name} 1000000000, but the weights have \d+ te"
    ):
        _load(folder)


def test_an_architecture_without_a_task_needs_the_setting(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "Model", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "architectures": ["BertForPreTraining"]}))
    with pytest.raises(ModelFailed, match=r"'BertForPreTraining', which belongs to no task .*parameters\.task"):
        _load(tmp_path / "m")
    assert len(_results(_load(tmp_path / "m", task="feature-extraction"), {"args": TEXTS})) == 3


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last"])
def test_pooling_of_sentence_transformers(saved: Path, tmp_path: Path, pooling: str) -> None:
    folder = tmp_path / "encoder"
    shutil.copytree(saved / "Model", folder)
    keys = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens", "last": "lasttoken"}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{keys[pooling]}": True}))
    model = _load(folder)
    result = model.embed(Embed((*TEXTS, (2, 5, 6, 3))))
    plain = transformers.AutoModel.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = [*(tokenizer(text)["input_ids"] for text in TEXTS), [2, 5, 6, 3]]
    for row, vector in zip(rows, result.vectors.data, strict=True):
        with torch.inference_mode():
            states = plain(input_ids=torch.tensor([row])).last_hidden_state[0]
        expected = {"mean": states.mean(0), "cls": states[0], "max": states.amax(0), "last": states[-1]}[pooling]
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)
    assert result.tokens == sum(map(len, rows))


def _save_decoder(folder: Path, **special: str) -> Any:
    """Save a tiny Llama; return it without its head."""
    config = transformers.LlamaConfig(vocab_size=200, max_position_embeddings=64, num_key_value_heads=1, **SMALL)
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = _tokenizer()
    tokenizer.padding_side = special.pop("padding_side", "right")
    tokenizer.pad_token = special.pop("pad_token", None)
    tokenizer.save_pretrained(folder)
    return transformers.AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("tokenizer", [{}, {"pad_token": "[PAD]"}, {"pad_token": "[SEP]", "padding_side": "left"}])
@pytest.mark.parametrize("pooling", [None, "LAST", "mean", "cls", "max"])
def test_embeddings_of_decoders(tmp_path: Path, pooling: str | None, tokenizer: dict[str, str]) -> None:
    plain = _save_decoder(tmp_path, **tokenizer)
    chosen: dict[str, Any] = {"task": "feature-extraction"} if pooling is None else {"pooling": pooling}
    model = _load(tmp_path, normalize=False, **chosen)
    rows: list[tuple[int, ...]] = [(2, 5, 6, 3), (7,), (9, 8, 7, 6, 5, 4)]
    result = model.embed(Embed((*rows, TEXTS[1])))
    rows.append(tuple(transformers.AutoTokenizer.from_pretrained(tmp_path)(TEXTS[1])["input_ids"]))
    for row, vector in zip(rows, result.vectors.data, strict=True):
        with torch.inference_mode():
            states = plain(input_ids=torch.tensor([row])).last_hidden_state[0]
        pools = {"mean": states.mean(0), "cls": states[0], "max": states.amax(0), "last": states[-1]}
        np.testing.assert_allclose(vector, pools[(pooling or "last").lower()].numpy(), atol=1e-5)
        np.testing.assert_allclose(vector, model.embed(Embed((row,))).vectors.data[0], atol=1e-5)
    assert result.tokens == sum(map(len, rows))


def test_a_decoder_of_sentence_transformers_computes_embeddings(saved: Path, tmp_path: Path) -> None:
    _save_decoder(tmp_path)
    assert recognise(tmp_path) == "llm"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    assert recognise(tmp_path) == "huggingface"
    options: list[dict[str, Any]] = [{}, {"pooling": "last"}]
    mean, last = (_load(tmp_path, **chosen).embed(Embed((TEXTS[0],))) for chosen in options)
    assert np.linalg.norm(mean.vectors.data) != pytest.approx(1.0, abs=1e-3)  # modules.json has no Normalize
    assert np.abs(mean.vectors.data - last.vectors.data).max() > 1e-2
    with pytest.raises(ModelFailed, match=r"parameter 'pooling': expected last, mean, cls, max, .*got 'best'"):
        _load(tmp_path, pooling="best")
    with pytest.raises(ModelFailed, match="parameter 'normalize': expected true or false, got 1"):
        _load(tmp_path, normalize=1)


@pytest.mark.parametrize("labels", [1, 2])
def test_scores_of_cross_encoders(saved: Path, tmp_path: Path, labels: int) -> None:
    folder = tmp_path / "reranker"
    shutil.copytree(saved / "Model", folder)
    torch.manual_seed(labels)
    config = transformers.BertConfig(vocab_size=200, max_position_embeddings=64, **SMALL, num_labels=labels)
    plain = transformers.BertForSequenceClassification(config).eval()
    plain.save_pretrained(folder)
    model, tokenizer = _load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    pairs = tuple((TEXTS[0], text) for text in (*TEXTS, "where is ann"))
    logits = []
    for pair in pairs:
        with torch.inference_mode():
            logits.append(plain(**tokenizer(*pair, return_tensors="pt")).logits[0])
    rows = torch.stack(logits)
    expected = torch.sigmoid(rows[:, 0]) if labels == 1 else torch.softmax(rows, 1)[:, 1]
    result = model.score(Score(pairs))
    np.testing.assert_allclose(result.scores, expected.numpy(), atol=1e-6)
    assert result.tokens == sum(len(tokenizer(*pair)["input_ids"]) for pair in pairs)
    np.testing.assert_allclose(model.score(Score(pairs, raw=True)).scores, rows[:, -1].numpy(), atol=1e-6)
    long = ("good", " ".join(["bad"] * 100))
    with pytest.raises(InvalidInput, match=r"pair 1 has \d+ tokens; the model takes at most 64"):
        model.score(Score((pairs[0], long)))
    short = tokenizer(*long, truncation="longest_first", max_length=10, return_tensors="pt")
    truncated = model.score(Score((long,), raw=True, truncate=10))
    assert truncated.tokens == 10
    with torch.inference_mode():
        assert truncated.scores[0] == pytest.approx(float(plain(**short).logits[0, -1]), abs=1e-6)
    assert model.score(Score((long,), truncate=0)).tokens == 64
    with pytest.raises(InvalidInput, match="truncate: expected at least 4, as special tokens count too; got 2"):
        model.score(Score((long,), truncate=2))
    sides = [model.score(Score((pair,), truncate=6, truncation_side="left")) for pair in (("a", "bad good where"),)]
    kept = model.score(Score((("a", "good where"),)))
    assert (sides[0].scores, sides[0].tokens) == (kept.scores, kept.tokens)


@pytest.mark.parametrize(
    "setting",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_the_activation_function_of_a_cross_encoder(saved: Path, tmp_path: Path, setting: Any) -> None:
    folder = tmp_path / "reranker"
    shutil.copytree(saved / "Model", folder)
    config = transformers.BertConfig(vocab_size=200, max_position_embeddings=64, **SMALL, num_labels=1, **setting)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    model, pair = _load(folder), (TEXTS[0], TEXTS[1])
    assert model.score(Score((pair,))).scores == model.score(Score((pair,), raw=True)).scores
    assert "score" not in vars(_load(saved / "ForSequenceClassification"))


def test_embeddings_have_length_one_and_inputs_are_checked(saved: Path) -> None:
    model = _load(saved / "Model")
    result = model.embed(Embed(tuple(TEXTS)))
    np.testing.assert_allclose(np.linalg.norm(result.vectors.data, axis=1), 1.0, atol=1e-6)
    with pytest.raises(InvalidInput, match="input 1 has 152 tokens; the model takes at most 64"):
        model.embed(Embed(("good", " ".join(["good"] * 150))))
    with pytest.raises(InvalidInput, match="expected token ids below 200, got 999"):
        model.embed(Embed(((999,),)))
    assert "embed" not in vars(_load(saved / "ForSequenceClassification"))


def test_inputs_of_embeddings_are_truncated_on_either_side(saved: Path) -> None:
    model = _load(saved / "Model")
    whole, ids = "good bad where is", (2, 5, 6, 7, 3)
    for side, text, kept in (("", "good bad", ids[:4]), ("right", "good bad", ids[:4]), ("left", "where is", ids[-4:])):
        result = model.embed(Embed((whole, ids), 4, side))
        expected = model.embed(Embed((text, kept)))
        np.testing.assert_allclose(result.vectors.data, expected.vectors.data, atol=1e-6)
        assert result.tokens == expected.tokens == 8
    assert model.embed(Embed((" ".join(["good"] * 150), (5,) * 150), 0)).tokens == 128
    np.testing.assert_array_equal(
        model.embed(Embed((whole,), 40)).vectors.data, model.embed(Embed((whole,))).vectors.data
    )
    with pytest.raises(InvalidInput, match="truncate: expected at least 3, as special tokens count too; got 2"):
        model.embed(Embed((whole,), 2))
