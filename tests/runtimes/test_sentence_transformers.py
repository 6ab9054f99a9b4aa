"""Folders of sentence-transformers: every key of their files is obeyed or rejected by its name.

The expected vectors are computed here from the states of the model. `scripts/test-sentence-transformers` compares many
more configurations with the package itself.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.core.calls import Embed, Infer
from dragoman.core.errors import InvalidInput, ModelFailed
from dragoman.core.scoring import Score
from dragoman.core.spec import ModelSpec
from dragoman.core.tensor import Tensor
from dragoman.runtimes.huggingface.model import HuggingFaceModel
from dragoman.runtimes.recognise import recognise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pipeline_models = pytest.importorskip("pipeline_models")

# transformers leaves files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
TEXTS = ("the brown fox", "a", "the quick brown fox jumps over a lazy dog")
LONG = "the quick brown fox jumps over a lazy dog " * 20
MODULES = "sentence_transformers.sentence_transformer.modules"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several are slow on a busy machine
    yield
    torch.set_num_threads(before)


class Encoder:
    """A folder of sentence-transformers around a tiny BERT, and the states that it computes."""

    def __init__(self, folder: Path, name: str = "bert") -> None:
        self.folder = pipeline_models.save_model(folder / "encoder", name)
        self.model = transformers.AutoModel.from_pretrained(self.folder).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
        self._modules: list[dict[str, Any]] = []
        self.add("Transformer", path="")
        self.write("modules.json", self._modules)

    def write(self, name: str, value: Any) -> "Encoder":
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(json.dumps(value))
        return self

    def add(self, kind: str, fields: Any = None, weights: Any = None, path: str | None = None) -> "Encoder":
        number = len(self._modules)
        path = f"{number}_{kind}" if path is None else path
        self._modules.append({"idx": number, "name": str(number), "path": path, "type": f"{MODULES}.{kind}"})
        if fields is not None:
            self.write(f"{path}/config.json", fields)
        if weights is not None:
            safetensors.save_file(weights, str(self.folder / path / "model.safetensors"))
        return self.write("modules.json", self._modules)

    def states(self, text: str, limit: int = 64) -> Any:
        ids = self.tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            return self.model(input_ids=ids).last_hidden_state[0]

    def load(self, **parameters: Any) -> HuggingFaceModel:
        model = HuggingFaceModel(ModelSpec(name="m", uri=str(self.folder), parameters=parameters))
        model.load()
        return model

    def vectors(self, *texts: str, prompt_name: str | None = None, **parameters: Any) -> Any:
        return self.load(**parameters).embed(Embed(texts, prompt_name=prompt_name)).vectors.data


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    return Encoder(tmp_path)


POOLS = {
    "cls": lambda states: states[0],
    "max": lambda states: states.amax(0),
    "mean": lambda states: states.mean(0),
    "mean_sqrt_len_tokens": lambda states: states.sum(0) / math.sqrt(len(states)),
    "weightedmean": lambda states: (
        (states * torch.arange(1, len(states) + 1)[:, None]).sum(0) / torch.arange(1, len(states) + 1).sum()
    ),
    "lasttoken": lambda states: states[-1],
}
FLAGS = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}


@pytest.mark.parametrize("mode", POOLS)
@pytest.mark.parametrize("spelling", ["flags", "name", "list"])
def test_modes_of_pooling(encoder: Encoder, mode: str, spelling: str) -> None:
    flags = {f"pooling_mode_{flag}": name == mode for name, flag in FLAGS.items()}
    named: dict[str, dict[str, Any]] = {"name": {"pooling_mode": mode}, "list": {"pooling_mode": [mode]}}
    fields = named.get(spelling, flags)
    encoder.add("Pooling", {"word_embedding_dimension": 16, **fields})
    expected = [POOLS[mode](encoder.states(text)).numpy() for text in TEXTS]
    np.testing.assert_allclose(encoder.vectors(*TEXTS), expected, atol=1e-6)


def test_vectors_of_several_modes_are_joined(encoder: Encoder) -> None:
    flags = {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    encoder.add("Pooling", flags)
    expected = [torch.cat([POOLS[m](encoder.states(t)) for m in ("cls", "mean", "lasttoken")]).numpy() for t in TEXTS]
    np.testing.assert_allclose(encoder.vectors(*TEXTS), expected, atol=1e-6)
    expected = [torch.cat([POOLS[m](encoder.states(t)) for m in ("max", "cls")]).numpy() for t in TEXTS]
    np.testing.assert_allclose(encoder.vectors(*TEXTS, pooling=["max", "cls"]), expected, atol=1e-6)
    encoder.write("1_Pooling/config.json", {"embedding_dimension": 16})  # no mode: the mean
    np.testing.assert_allclose(encoder.vectors(TEXTS[0]), [encoder.states(TEXTS[0]).mean(0).numpy()], atol=1e-6)


def test_dense_layers_and_normalization(encoder: Encoder) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(8, 16, generator=generator), torch.randn(8, generator=generator)
    dense = {"in_features": 16, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    weights = {"linear.weight": weight, "linear.bias": bias}
    encoder.add("Pooling", {"pooling_mode": "mean"}).add("Dense", {**dense, "bias": True}, weights)
    pooled = torch.stack([encoder.states(text).mean(0) for text in TEXTS])
    expected = torch.tanh(pooled @ weight.T + bias)
    np.testing.assert_allclose(encoder.vectors(*TEXTS), expected.numpy(), atol=1e-6)
    scale, shift = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
    encoder.add("LayerNorm", {"dimension": 8}, {"norm.weight": scale, "norm.bias": shift}).add(
        "Dropout", {"dropout": 0.5}
    )
    expected = torch.nn.functional.layer_norm(expected, (8,), scale, shift)
    np.testing.assert_allclose(encoder.vectors(*TEXTS), expected.numpy(), atol=1e-5)
    residual = {**weights, "residual.weight": torch.randn(8, 16, generator=generator)}
    identity = {**dense, "bias": False, "use_residual": True, "activation_function": "torch.nn.modules.linear.Identity"}
    safetensors.save_file(residual, str(encoder.folder / "2_Dense" / "model.safetensors"))
    encoder.write("2_Dense/config.json", identity).add("Normalize")
    expected = pooled @ (weight + residual["residual.weight"]).T
    expected = torch.nn.functional.layer_norm(expected, (8,), scale, shift)
    expected = torch.nn.functional.normalize(expected, dim=1)
    np.testing.assert_allclose(encoder.vectors(*TEXTS), expected.numpy(), atol=1e-5)
    plain = encoder.vectors(*TEXTS, normalize=False)
    np.testing.assert_allclose(plain / np.linalg.norm(plain, axis=1, keepdims=True), expected.numpy(), atol=1e-5)
    (encoder.folder / "2_Dense" / "model.safetensors").unlink()
    torch.save(residual, encoder.folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ModelFailed, match="--allow-pickle"):
        encoder.load()


def test_the_maximum_length_of_the_files(encoder: Encoder) -> None:
    encoder.add("Pooling", {"pooling_mode": "mean"}).write("sentence_bert_config.json", {"max_seq_length": 16})
    model = encoder.load()
    assert model.details()["max_context"] == 16
    with pytest.raises(InvalidInput, match="input 1 has 182 tokens; the model takes at most 16"):
        model.embed(Embed(("a", LONG)))
    expected = encoder.states(LONG, 16).mean(0).numpy()
    np.testing.assert_allclose(model.embed(Embed((LONG,), 0)).vectors.data[0], expected, atol=1e-6)
    np.testing.assert_allclose(encoder.vectors(LONG, truncate=True)[0], expected, atol=1e-6)
    np.testing.assert_allclose(
        encoder.vectors(LONG, truncate=True, max_seq_length=9)[0], encoder.states(LONG, 9).mean(0).numpy(), atol=1e-6
    )
    found = encoder.load(truncate=True).embed(Embed((LONG,), 5)).vectors.data[0]
    np.testing.assert_allclose(found, encoder.states(LONG, 5).mean(0).numpy(), atol=1e-6)


def test_prompts_of_the_files(encoder: Encoder) -> None:
    prompts = {"query": "what is: ", "document": "", "photo": "a photo of "}
    encoder.add("Pooling", {"pooling_mode": "mean"})
    encoder.write("config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    model = encoder.load()
    assert model.details()["prompts"] == ["document", "photo", "query"]
    for name, prompt in (
        (None, "what is: "),
        ("query", "what is: "),
        ("document", ""),
        ("photo", "a photo of "),
        ("", ""),
    ):
        found = model.embed(Embed((TEXTS[0],), prompt_name=name)).vectors.data[0]
        np.testing.assert_allclose(found, encoder.states(prompt + TEXTS[0]).mean(0).numpy(), atol=1e-6)
    ids = tuple(encoder.tokenizer(TEXTS[0])["input_ids"])  # token ids are taken as they are
    found = model.embed(Embed((ids,))).vectors.data[0]
    np.testing.assert_allclose(found, encoder.states(TEXTS[0]).mean(0).numpy(), atol=1e-6)
    with pytest.raises(InvalidInput, match=r"prompt_name: expected one of document, photo, query; got 'other'"):
        model.embed(Embed((TEXTS[0],), prompt_name="other"))
    changed = encoder.vectors(TEXTS[0], prompts={"query": "about "}, default_prompt_name="photo")[0]
    np.testing.assert_allclose(changed, encoder.states("a photo of " + TEXTS[0]).mean(0).numpy(), atol=1e-6)
    with pytest.raises(ModelFailed, match=r"parameter 'default_prompt_name': expected one of .*, got 'none'"):
        encoder.load(default_prompt_name="none")


@pytest.mark.parametrize("mode", POOLS)
def test_tokens_of_the_prompt_that_are_not_pooled(encoder: Encoder, mode: str) -> None:
    encoder.add("Pooling", {"pooling_mode": mode, "include_prompt": False})
    encoder.write("config_sentence_transformers.json", {"prompts": {"q": "what is "}, "default_prompt_name": "q"})
    for text, found in zip(TEXTS, encoder.vectors(*TEXTS), strict=True):
        states = encoder.states("what is " + text)[3:]  # after [CLS] and two words
        if mode == "weightedmean":  # the weights are those of the whole text
            weights = torch.arange(4, 4 + len(states))[:, None]
            expected = (states * weights).sum(0) / weights.sum()
        else:
            expected = POOLS[mode](states)
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


def test_dimensions_similarity_and_case(encoder: Encoder) -> None:
    encoder.add("Pooling", {"pooling_mode": "cls"})
    encoder.write("config_sentence_transformers.json", {"truncate_dim": 5, "similarity_fn_name": "dot"})
    encoder.write("sentence_bert_config.json", {"do_lower_case": True})
    model = encoder.load()
    assert (model.details()["dimensions"], model.details()["similarity"]) == (5, "dot")
    found = model.embed(Embed(("THE BROWN fox",))).vectors.data
    np.testing.assert_allclose(found[0], encoder.states("the brown fox")[0, :5].numpy(), atol=1e-6)
    assert encoder.vectors("a", truncate_dim=3).shape == (1, 3)


def test_the_transformer_in_a_folder_of_its_own(encoder: Encoder) -> None:
    below = encoder.folder / "0_Transformer"
    below.mkdir()
    for file in list(encoder.folder.glob("*")):
        if file.is_file() and file.name != "modules.json":
            file.rename(below / file.name)
    encoder._modules[0]["path"] = "0_Transformer"
    encoder.add("Pooling", {"pooling_mode": "cls"}).write(
        "0_Transformer/sentence_bert_config.json", {"max_seq_length": 7}
    )
    assert recognise(encoder.folder) == "huggingface"
    assert encoder.load().details()["max_context"] == 7
    np.testing.assert_allclose(encoder.vectors("a")[0], encoder.states("a")[0].numpy(), atol=1e-6)


@pytest.mark.parametrize(("strategy", "activation"), [("max", "relu"), ("sum", "relu"), ("max", "log1p_relu")])
def test_sparse_vectors(tmp_path: Path, strategy: str, activation: str) -> None:
    encoder = Encoder(tmp_path, "mask")
    encoder.add("SpladePooling", {"pooling_strategy": strategy, "activation_function": activation})
    encoder.write("sentence_bert_config.json", {"transformer_task": "fill-mask", "max_seq_length": 32})
    encoder.write("config_sentence_transformers.json", {"model_type": "SparseEncoder"})
    model = transformers.AutoModelForMaskedLM.from_pretrained(encoder.folder).eval()
    for text, found in zip(TEXTS, encoder.vectors(*TEXTS), strict=True):
        ids = encoder.tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            weights = model(input_ids=ids).logits[0].relu().log1p()
        weights = weights.log1p() if activation == "log1p_relu" else weights
        expected = weights.amax(0) if strategy == "max" else weights.sum(0)
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("function", ["torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh", None])
def test_settings_of_cross_encoders(tmp_path: Path, function: str | None) -> None:
    config = transformers.BertConfig(**pipeline_models._SIZES, num_labels=1)
    torch.manual_seed(1)
    plain = transformers.BertForSequenceClassification(config).eval()
    encoder = Encoder(tmp_path, "classes")
    plain.save_pretrained(encoder.folder)
    encoder.write("sentence_bert_config.json", {"transformer_task": "sequence-classification", "max_seq_length": 12})
    fields = {"model_type": "CrossEncoder", "activation_fn": function, "prompts": {"q": "what is "}}
    encoder.write("config_sentence_transformers.json", {**fields, "default_prompt_name": "q"})
    encoded = encoder.tokenizer("what is a", LONG, truncation="longest_first", max_length=12, return_tensors="pt")
    with torch.inference_mode():
        logit = plain(**encoded).logits[0, 0]
    expected = {None: torch.sigmoid, "torch.nn.modules.activation.Tanh": torch.tanh}.get(function, lambda x: x)(logit)
    model = encoder.load(truncate=True)
    assert model.score(Score((("a", LONG),))).scores[0] == pytest.approx(float(expected), abs=1e-6)
    assert model.score(Score((("a", LONG),), raw=True)).scores[0] == pytest.approx(float(logit), abs=1e-6)


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "best"}, "'pooling_mode': expected one of cls, .*got 'best'"),
        ("1_Pooling/config.json", {"pooling": "cls"}, "unknown key 'pooling'"),
        ("1_Pooling/config.json", [], "expected a JSON object"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "'max_seq_length': expected an integer from 1, got 0"),
        ("sentence_bert_config.json", {"query_length": 32}, "'query_length' is not supported"),
        ("sentence_bert_config.json", {"novelty": 1}, "unknown key 'novelty', which may change the vectors"),
        ("sentence_bert_config.json", {"transformer_task": "any-to-any"}, "'transformer_task': expected one of"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}}}, "'modality_config' is supported only with"),
        (
            "sentence_bert_config.json",
            {"processing_kwargs": {"text": {"add_special_tokens": False}}},
            "'processing_kwargs",
        ),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, "'default_prompt_name': expected one of"),
        ("config_sentence_transformers.json", {"prompts": ["q"]}, "'prompts': expected an object"),
        (
            "config_sentence_transformers.json",
            {"similarity_fn_name": "maxsim"},
            "'similarity_fn_name': expected one of",
        ),
        ("config_sentence_transformers.json", {"model_type": "MultiVectorEncoder"}, "'model_type': expected"),
        ("config_sentence_transformers.json", {"truncate_dim": "8"}, "'truncate_dim': expected an integer from 1"),
        ("modules.json", [{"type": "custom_st.Transformer", "path": ""}], "code of the model's own"),
        ("modules.json", [{"type": f"{MODULES}.Transformer", "path": "../.."}], "a folder in the model's folder"),
        ("modules.json", [{"type": f"{MODULES}.StaticEmbedding", "path": ""}], "module 'StaticEmbedding'"),
        ("modules.json", [{"type": f"{MODULES}.Transformer"}], "expected modules with 'type' and 'path'"),
    ],
)
def test_keys_that_are_not_obeyed_are_named(encoder: Encoder, file: str, value: Any, message: str) -> None:
    encoder.add("Pooling", {"pooling_mode": "cls"}).write(file, value)
    with pytest.raises(ModelFailed, match=message):
        encoder.load()


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("WordWeights", {"vocab": []}, "module 'WordWeights' of sentence-transformers is not supported"),
        ("LSTM", {}, "module 'LSTM' of sentence-transformers is not supported"),
        ("Dense", {"in_features": 16, "novelty": 1}, "unknown key 'novelty'"),
        ("Dense", {"in_features": 16, "out_features": 8, "bias": False}, "no weights found in '1_Dense'"),
        ("Normalize", {}, "make no vector"),
    ],
)
def test_modules_that_are_not_supported_are_named(encoder: Encoder, kind: str, fields: Any, message: str) -> None:
    encoder.add(kind, fields)
    with pytest.raises(ModelFailed, match=message):
        encoder.load()
    assert recognise(encoder.folder) == "huggingface"


def test_activation_functions_are_classes_of_torch(encoder: Encoder) -> None:
    fields = {"in_features": 16, "out_features": 8, "bias": False}
    encoder.add("Pooling", {"pooling_mode": "cls"}).add("Dense", fields, {"linear.weight": torch.zeros(8, 16)})
    for name, message in (("os.system", "expected a class of torch.nn"), ("torch.nn.Linear", "needs arguments")):
        encoder.write("2_Dense/config.json", {**fields, "activation_function": name})
        with pytest.raises(ModelFailed, match=message):
            encoder.load()


def test_vectors_as_an_output_of_inference(encoder: Encoder) -> None:
    encoder.add("Pooling", {"pooling_mode": "mean"})
    encoder.write("config_sentence_transformers.json", {"prompts": {"q": "what is "}, "default_prompt_name": "q"})
    model = encoder.load()
    call = Infer({"args": Tensor.of(list(TEXTS))}, ("embeddings",))
    found = model.infer(call).outputs["embeddings"].data
    np.testing.assert_array_equal(found, model.embed(Embed(TEXTS)).vectors.data)


def test_an_empty_text_of_a_pair_is_a_text(tmp_path: Path) -> None:
    encoder = Encoder(tmp_path, "classes")
    plain = transformers.BertForSequenceClassification(transformers.BertConfig(**pipeline_models._SIZES, num_labels=1))
    plain.eval().save_pretrained(encoder.folder)
    encoder.write("config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    encoder.write("sentence_bert_config.json", {"transformer_task": "sequence-classification"})
    encoded = encoder.tokenizer(["a"], [""], return_tensors="pt")
    assert encoded["input_ids"].tolist() == [[2, 11, 3, 3]]
    with torch.inference_mode():
        logit = float(plain(**encoded).logits[0, 0])
    scored = encoder.load().score(Score((("a", ""),), raw=True))
    assert (scored.tokens, scored.scores[0]) == (4, pytest.approx(logit, abs=1e-6))


# --- limits ---------------------------------------------------------------------------------------------------------

_OFFSET = {"max_position_embeddings": 66, "pad_token_id": 0}


def _save(folder: Path, kind: str, head: str, **values: Any) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**pipeline_models._SIZES, **values})
    getattr(transformers, f"{kind}{head}")(config).save_pretrained(folder)
    pipeline_models.make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "values", "limit"),
    [
        ("Roberta", {**_OFFSET, "pad_token_id": 1}, 64),  # positions begin at padding + 1
        ("XLMRoberta", {**_OFFSET, "pad_token_id": 1}, 64),
        ("Camembert", _OFFSET, 65),
        ("MPNet", {**_OFFSET, "pad_token_id": 1}, 64),
        ("Bert", {"max_position_embeddings": 48}, 48),
        ("Electra", {"max_position_embeddings": 48, "embedding_size": 16}, 48),
    ],
)
def test_the_limit_of_a_model_is_found_by_trying(tmp_path: Path, kind: str, values: Any, limit: int) -> None:
    folder = _save(tmp_path, kind, "Model", **values)
    model = HuggingFaceModel(ModelSpec(name="m", uri=str(folder)))
    model.load()
    assert model.details()["max_context"] == limit
    with pytest.raises(InvalidInput, match=f"input 1 has {limit + 1} tokens; the model takes at most {limit}"):
        model.embed(Embed(("a", " ".join(["a"] * (limit - 1)))))
    longest = " ".join(["a"] * (limit - 2))
    assert model.embed(Embed((longest,))).tokens == limit
    for truncate in (0, limit, 1000):
        assert model.embed(Embed((LONG,), truncate)).tokens == limit
    call = Infer({"args": Tensor.of(["a", LONG])}, ("attention_mask",), {"truncation": True})
    assert model.infer(call).outputs["attention_mask"].data.sum() == 3 + limit
    with pytest.raises(InvalidInput, match=f"text 1 has 182 tokens and the model takes {limit}; .*truncation=true"):
        model.infer(Infer({"args": Tensor.of(["a", LONG])}))


def test_long_texts_of_a_classifier_whose_tokenizer_has_no_limit(tmp_path: Path) -> None:
    folder = _save(tmp_path, "Roberta", "ForSequenceClassification", **{**_OFFSET, "pad_token_id": 1, "num_labels": 1})
    model = HuggingFaceModel(ModelSpec(name="m", uri=str(folder)))
    model.load()
    call = Infer({"args": Tensor.of([LONG])}, (), {"truncation": True})
    assert json.loads(model.infer(call).outputs["output"].data[0])["label"] == "LABEL_0"
    with pytest.raises(InvalidInput, match="text 0 has 182 tokens and the model takes 64"):
        model.infer(Infer({"args": Tensor.of([LONG])}))
    assert model.score(Score((("a", LONG),), truncate=0)).tokens == 64
