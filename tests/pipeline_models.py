"""Tiny models of transformers with random weights, one for each task of its pipelines."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

TEXTS = ["the brown fox", "a lazy dog"]
BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
VISION = {"image_size": 32, "patch_size": 8, **BERT}
_SIZES = {"vocab_size": 40, "max_position_embeddings": 64, **BERT}
_WORDS = (
    "[PAD] [UNK] [CLS] [SEP] [MASK] the quick brown fox jumps over a lazy dog is this about example photo of sound "
    "what how many . , cat house | e t o n i"
)


def make_tokenizer(**names: Any) -> Any:
    """Return a tokenizer of words that puts texts between [CLS] and [SEP]."""
    words = {word: i for i, word in enumerate(_WORDS.split())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**special, **names})


def _bert(head: str, **values: Any) -> list[Any]:
    """Return a model with this head, and a tokenizer that tells the texts of a pair apart."""
    model = getattr(transformers, f"BertFor{head}")(transformers.BertConfig(**_SIZES, **values))
    return [model, make_tokenizer(model_input_names=["input_ids", "token_type_ids", "attention_mask"])]


def _labels(*names: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def _image_processor(kind: str = "ViTImageProcessor", size: int = 32, **values: Any) -> Any:
    return getattr(transformers, kind)(size={"height": size, "width": size}, **values)


def _detector() -> list[Any]:
    config = transformers.YolosConfig(**{**VISION, "image_size": [32, 32]}, num_detection_tokens=5, num_labels=3)
    return [
        transformers.YolosForObjectDetection(config),
        transformers.YolosImageProcessor(size={"height": 32, "width": 32}),
    ]


def _segmenter() -> list[Any]:
    config = transformers.SegformerConfig(
        num_labels=3, hidden_sizes=[8, 8], depths=[1, 1], sr_ratios=[1, 1], strides=[4, 2], patch_sizes=[7, 3],
        num_attention_heads=[1, 1], mlp_ratios=[2, 2], decoder_hidden_size=8, num_encoder_blocks=2,
    )  # fmt: skip
    return [transformers.SegformerForSemanticSegmentation(config), _image_processor("SegformerImageProcessor")]


def _depth() -> list[Any]:
    config = transformers.GLPNConfig(
        hidden_sizes=[8, 8, 8, 8], depths=[1] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=8, sr_ratios=[1] * 4
    )
    return [transformers.GLPNForDepthEstimation(config), transformers.GLPNImageProcessor()]


def _clip() -> list[Any]:
    text = {**_SIZES, "projection_dim": 8, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    config = transformers.CLIPConfig(text_config=text, vision_config={**VISION, "projection_dim": 8}, projection_dim=8)
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return [transformers.CLIPModel(config), processor, make_tokenizer()]


def _owl() -> list[Any]:
    text = {**_SIZES, "max_position_embeddings": 16, "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    config = transformers.OwlViTConfig(text_config=text, vision_config=dict(VISION), projection_dim=16)
    return [transformers.OwlViTForObjectDetection(config), _image_processor("OwlViTImageProcessor"), make_tokenizer()]


def _vilt() -> list[Any]:
    config = transformers.ViltConfig(**_SIZES, image_size=32, patch_size=8, **_labels("yes", "no", "two"))
    processor = transformers.ViltImageProcessor(size={"shortest_edge": 32}, size_divisor=8)
    return [transformers.ViltForQuestionAnswering(config), processor, make_tokenizer()]


def _layoutlm() -> list[Any]:
    config = transformers.LayoutLMConfig(**_SIZES, max_2d_position_embeddings=1024)
    return [transformers.LayoutLMForQuestionAnswering(config), make_tokenizer(model_max_length=64)]


def _captioner() -> list[Any]:
    vision = transformers.ViTConfig(**VISION)
    text = transformers.GPT2Config(
        vocab_size=40, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=2, eos_token_id=3,
        is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 0, 3
    model = transformers.VisionEncoderDecoderModel(config=config)
    model.generation_config.update(decoder_start_token_id=2, pad_token_id=0, eos_token_id=3, max_new_tokens=6)
    return [model, _image_processor(), make_tokenizer()]


def _sam() -> list[Any]:
    config = transformers.SamConfig(
        vision_config={
            "hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32,
            "patch_size": 8, "mlp_dim": 16, "global_attn_indexes": [0], "window_size": 2, "num_pos_feats": 4,
        },
        prompt_encoder_config={"hidden_size": 8, "image_size": 32, "patch_size": 8, "image_embedding_size": 4},
        mask_decoder_config={
            "hidden_size": 8, "mlp_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "iou_head_hidden_dim": 8,
            "attention_downsample_rate": 1,
        },
    )  # fmt: skip
    processor = transformers.SamImageProcessor(size={"longest_edge": 32}, pad_size={"height": 32, "width": 32})
    return [transformers.SamModel(config), processor]


def _matcher() -> list[Any]:
    config = transformers.SuperGlueConfig(
        keypoint_detector_config={
            "encoder_hidden_sizes": [16, 16, 16, 16], "decoder_hidden_size": 16, "keypoint_decoder_dim": 65,
            "descriptor_decoder_dim": 16, "keypoint_threshold": 0.0, "max_keypoints": 8, "model_type": "superpoint",
        },
        hidden_size=16, keypoint_encoder_sizes=[8, 16], gnn_layers_types=["self", "cross"], num_attention_heads=2,
        sinkhorn_iterations=5, matching_threshold=0.0,
    )  # fmt: skip
    return [transformers.SuperGlueForKeypointMatching(config), _image_processor("SuperGlueImageProcessor", 64)]


def _video() -> list[Any]:
    config = transformers.VideoMAEConfig(**VISION, num_frames=4, tubelet_size=2, num_labels=3)
    processor = transformers.VideoMAEImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return [transformers.VideoMAEForVideoClassification(config), processor]


_CONV = {
    "conv_dim": [8, 8], "conv_kernel": [10, 8], "conv_stride": [5, 4], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip


def _hearer() -> list[Any]:
    config = transformers.Wav2Vec2Config(**BERT, **_CONV, classifier_proj_size=8, num_labels=3)
    return [transformers.Wav2Vec2ForSequenceClassification(config), transformers.Wav2Vec2FeatureExtractor()]


def _speech() -> list[Any]:
    config = transformers.Wav2Vec2Config(**BERT, **_CONV, vocab_size=40, pad_token_id=0)
    return [transformers.Wav2Vec2ForCTC(config), transformers.Wav2Vec2FeatureExtractor(), _ctc_tokenizer()]


def _ctc_tokenizer() -> Any:
    import json
    import tempfile

    file = Path(tempfile.mkdtemp()) / "vocab.json"
    file.write_text(json.dumps({word: i for i, word in enumerate(_WORDS.split())}))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "word_delimiter_token": "|", "bos_token": "[CLS]"}
    return transformers.Wav2Vec2CTCTokenizer(str(file), eos_token="[SEP]", **names)


def _whisper() -> list[Any]:
    config = transformers.WhisperConfig(
        vocab_size=60, num_mel_bins=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, d_model=16, max_source_positions=1500,
        max_target_positions=32, pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.update(max_new_tokens=6, decoder_start_token_id=2, pad_token_id=0, eos_token_id=3)
    tokenizer = transformers.WhisperTokenizer(vocab={chr(33 + i): i for i in range(60)}, merges=[])
    return [model, transformers.WhisperFeatureExtractor(feature_size=8), tokenizer]


def _clap() -> list[Any]:
    audio = {
        "hidden_size": 16, "num_mel_bins": 16, "spec_size": 64, "patch_size": 4, "patch_stride": [4, 4],
        "window_size": 4, "depths": [1, 1], "num_attention_heads": [2, 2], "patch_embeds_hidden_size": 8,
        "projection_dim": 8, "num_hidden_layers": 2, "enable_fusion": False, "enable_patch_fusion": False,
    }  # fmt: skip
    config = transformers.ClapConfig(text_config={**_SIZES, "projection_dim": 8}, audio_config=audio, projection_dim=8)
    extractor = transformers.ClapFeatureExtractor(
        feature_size=16, sampling_rate=16000, max_length_s=1, truncation="rand_trunc", padding="repeatpad"
    )
    return [transformers.ClapModel(config), extractor, make_tokenizer()]


def _speaker() -> list[Any]:
    config = transformers.VitsConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, flow_size=16,
        spectrogram_bins=9, upsample_initial_channel=16, upsample_rates=[4, 4], upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3], resblock_dilation_sizes=[[1, 3]], prior_encoder_num_flows=1,
        posterior_encoder_num_wavenet_layers=1, prior_encoder_num_wavenet_layers=1, duration_predictor_num_flows=1,
        use_stochastic_duration_prediction=False, noise_scale=0.0, sampling_rate=8000,
    )  # fmt: skip
    return [transformers.VitsModel(config), make_tokenizer()]


def _tapas() -> list[Any]:
    config = transformers.TapasConfig(**_SIZES, type_vocab_sizes=[3, 64, 64, 2, 8, 8, 4], select_one_column=True)
    return [transformers.TapasForQuestionAnswering(config), None]


def _t5() -> list[Any]:
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=3,
        decoder_start_token_id=0,
    )  # fmt: skip
    return [transformers.T5ForConditionalGeneration(config), make_tokenizer()]


def _bart() -> list[Any]:
    config = transformers.BartConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, decoder_start_token_id=2, forced_eos_token_id=3,
    )  # fmt: skip
    return [transformers.BartForConditionalGeneration(config), make_tokenizer()]


def _marian() -> list[Any]:
    config = transformers.MarianConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, pad_token_id=0,
        eos_token_id=3, decoder_start_token_id=0, forced_eos_token_id=3,
    )  # fmt: skip
    return [transformers.MarianMTModel(config), make_tokenizer()]


def _pegasus() -> list[Any]:
    config = transformers.PegasusConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, pad_token_id=0,
        eos_token_id=3, decoder_start_token_id=0, forced_eos_token_id=3,
    )  # fmt: skip
    return [transformers.PegasusForConditionalGeneration(config), make_tokenizer()]


def _gpt2_classes() -> list[Any]:
    config = transformers.GPT2Config(vocab_size=40, n_positions=64, n_embd=16, n_layer=1, n_head=2, num_labels=3)
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A $B")
    config.pad_token_id = 0
    return [transformers.GPT2ForSequenceClassification(config), tokenizer]


# The parts of each model, by name.
MODELS: dict[str, Callable[[], list[Any]]] = {
    "classes": lambda: _bert("SequenceClassification", num_labels=3),
    "nli": lambda: _bert("SequenceClassification", **_labels("contradiction", "neutral", "entailment")),
    "gpt2-classes": _gpt2_classes,
    "tags": lambda: _bert("TokenClassification", num_labels=3),
    "answers": lambda: _bert("QuestionAnswering"),
    "mask": lambda: _bert("MaskedLM"),
    "bert": lambda: [transformers.BertModel(transformers.BertConfig(**_SIZES)), make_tokenizer()],
    "t5-encoder": lambda: [transformers.T5EncoderModel(_t5()[0].config), make_tokenizer()],
    "t5": _t5,
    "bart": _bart,
    "marian": _marian,
    "pegasus": _pegasus,
    "tapas": _tapas,
    "vit": lambda: [transformers.ViTModel(transformers.ViTConfig(**VISION)), _image_processor()],
    "vit-classes": lambda: [
        transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=3)),
        _image_processor(),
    ],
    "detector": _detector,
    "segmenter": _segmenter,
    "depth": _depth,
    "clip": _clip,
    "owl": _owl,
    "vilt": _vilt,
    "layoutlm": _layoutlm,
    "captioner": _captioner,
    "sam": _sam,
    "matcher": _matcher,
    "video": _video,
    "hearer": _hearer,
    "speech": _speech,
    "whisper": _whisper,
    "clap": _clap,
    "speaker": _speaker,
}


def save_model(folder: Path, name: str) -> Path:
    """Save the model of this name and its parts in the folder, which is returned."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        for part in MODELS[name]():
            if part is not None:
                part.save_pretrained(folder)
    if name == "tapas":
        (folder / "vocab.txt").write_text("\n".join([*_WORDS.split(), "[EMPTY]"]))
        transformers.TapasTokenizer(str(folder / "vocab.txt"), empty_token="[EMPTY]").save_pretrained(folder)
    return folder
