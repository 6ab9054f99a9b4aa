"""Vectors and scores are those of the package sentence-transformers, also of a real model.

`scripts/test-sentence-transformers` runs this with the package and the weights of all-MiniLM-L6-v2.
"""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.core.calls import Embed
from dragoman.core.scoring import Score
from dragoman.core.spec import ModelSpec
from dragoman.runtimes.huggingface.model import HuggingFaceModel

package = pytest.importorskip("sentence_transformers")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pipeline_models = pytest.importorskip("pipeline_models")
base: Any = pytest.importorskip("sentence_transformers.base.modules")
modules: Any = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
sparse: Any = pytest.importorskip("sentence_transformers.sparse_encoder.modules")

TEXTS = ("the brown fox", "what is a dog", "", "the quick brown fox jumps over a lazy dog " * 12)
MODES = (
    "cls",
    "max",
    "mean",
    "mean_sqrt_len_tokens",
    "weightedmean",
    "lasttoken",
    ("cls", "mean"),
    ("max", "lasttoken"),
)
EXTRAS = ("none", "normalize", "dense", "residual", "layer norm", "prompt", "prompt without pooling")
_SIZES = pipeline_models._SIZES
_OFFSET = {**_SIZES, "max_position_embeddings": 66, "pad_token_id": 1}
_T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "pad_token_id": 0}
_SPECIAL = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("BertConfig", _SIZES),
    "RobertaModel": ("RobertaConfig", _OFFSET),
    "MPNetModel": ("MPNetConfig", _OFFSET),
    "T5EncoderModel": ("T5Config", _T5),
    "LlamaModel": ("LlamaConfig", {**_SIZES, "num_key_value_heads": 1, "pad_token_id": 0}),
    "ModernBertModel": ("ModernBertConfig", {**_SIZES, **_SPECIAL}),
}


def _save(folder: Path, name: str, config: str, values: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    getattr(transformers, name)(getattr(transformers, config)(**values)).save_pretrained(folder)
    pipeline_models.make_tokenizer().save_pretrained(folder)
    return folder


def _load(folder: Path) -> HuggingFaceModel:
    model = HuggingFaceModel(ModelSpec(name="m", uri=str(folder), parameters={"truncate": True}))
    model.load()
    return model


def _modules(folder: Path, number: int, mode: Any, extra: str) -> list[Any]:
    # Without a limit the package takes 66 positions for RoBERTa, which has 64, and fails.
    has_offset = any(name in (folder / "config.json").read_text() for name in ("Roberta", "MPNet"))
    limit = 64 if has_offset else None
    width = 16 * (1 if isinstance(mode, str) else len(mode))
    pooling = modules.Pooling(16, mode, include_prompt=extra != "prompt without pooling")
    layers = [base.Transformer(str(folder), max_seq_length=16 if number % 2 else limit), pooling]
    activation = (torch.nn.Identity(), torch.nn.Tanh(), torch.nn.GELU())[number % 3]
    match extra:
        case "normalize":
            layers += [modules.Dropout(0.3), base.Normalize()]
        case "dense":
            layers.append(base.Dense(width, 8, bias=number % 2 == 0, activation_function=activation))
        case "residual":
            layers += [base.Dense(width, 8, use_residual=True), base.Normalize()]
        case "layer norm":
            norm = modules.LayerNorm(width)
            torch.nn.init.normal_(norm.norm.weight)
            layers.append(norm)
    return layers


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_vectors(tmp_path: Path, name: str, extra: str) -> None:
    folder = _save(tmp_path / "plain", name, *KINDS[name])
    for number, mode in enumerate(MODES):
        torch.manual_seed(number)
        prompts = {"prompts": {"q": "what is ", "d": "the "}, "default_prompt_name": ("q", None)[number % 2]}
        chosen = prompts if "prompt" in extra else {}
        layers = _modules(folder, number, mode, extra)
        saved = tmp_path / str(number)
        made = package.SentenceTransformer(
            modules=layers, device="cpu", truncate_dim=(None, 6)[number % 5 == 0], **chosen
        )
        made.save_pretrained(str(saved))
        prompt_name = "d" if chosen and number % 3 == 0 else None
        expected = package.SentenceTransformer(str(saved), device="cpu").encode(list(TEXTS), prompt_name=prompt_name)
        found = _load(saved).embed(Embed(TEXTS, prompt_name=prompt_name)).vectors.data
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_sparse_vectors(tmp_path: Path, strategy: str, activation: str) -> None:
    plain = pipeline_models.save_model(tmp_path / "plain", "mask")
    layers = [base.Transformer(str(plain), transformer_task="fill-mask"), sparse.SpladePooling(strategy, activation)]
    package.SparseEncoder(modules=layers, device="cpu").save_pretrained(str(tmp_path / "saved"))
    expected = package.SparseEncoder(str(tmp_path / "saved"), device="cpu").encode(list(TEXTS)).to_dense().numpy()
    found = _load(tmp_path / "saved").embed(Embed(TEXTS)).vectors.data
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", [None, torch.nn.Identity(), torch.nn.Tanh()])
@pytest.mark.parametrize("prompt", [None, "what is "])
def test_scores(tmp_path: Path, function: Any, prompt: str | None) -> None:
    plain = _save(tmp_path / "plain", "BertForSequenceClassification", "BertConfig", {**_SIZES, "num_labels": 1})
    chosen = {"prompts": {"q": prompt}, "default_prompt_name": "q"} if prompt else {}
    made = package.CrossEncoder(str(plain), activation_fn=function, device="cpu", max_length=20, **chosen)
    made.save_pretrained(str(tmp_path / "saved"))
    pairs = [(one, other) for one in TEXTS[:2] for other in TEXTS]
    expected = package.CrossEncoder(str(tmp_path / "saved"), device="cpu").predict(pairs)
    np.testing.assert_allclose(_load(tmp_path / "saved").score(Score(tuple(pairs))).scores, expected, atol=1e-6)


def test_a_real_model(tmp_path: Path) -> None:
    weights = pytest.importorskip("all_minilm_l6_v2")
    with zipfile.ZipFile(Path(weights.__file__).with_name("model.zip")) as archive:
        archive.extractall(tmp_path)
    folder = next(tmp_path.rglob("modules.json")).parent
    texts = ["A man is eating food.", "The sky is blue.", "", "中文 текст ✓", "lorem ipsum " * 300]
    expected = package.SentenceTransformer(str(folder), device="cpu").encode(texts)
    model = _load(folder)
    assert model.details()["max_context"] == 256
    np.testing.assert_allclose(model.embed(Embed(tuple(texts))).vectors.data, expected, atol=1e-6)
