"""Pipelines that transformers 5 no longer has, though it has their models, or that take other inputs than ours.

The rules are those of transformers 4.57.
"""

from collections.abc import Mapping
from typing import Any

from transformers.pipelines import Pipeline

from dragoman.core.errors import InvalidInput

# Defaults of generation that neither a request nor the model sets.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "text": {"max_new_tokens": 256, "num_beams": 4},
    "image": {"max_new_tokens": 256},
}
_DEFAULT_LENGTH = 20  # of a configuration that sets none


class GeneratingPipeline(Pipeline):  # type: ignore[misc]
    """A pipeline whose model generates text.

    `task_specific_params` of the model's configuration has values for the task, such as T5's prefix "summarize: ".
    """

    _load_processor = None
    _load_image_processor = None
    _load_feature_extractor = False
    _load_tokenizer = True
    output = "generated_text"
    kind = "text"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # These apply to every call.
        every: dict[str, Any] = getattr(self.model.config, "task_specific_params", None) or {}
        self._of_task = dict(every.get(self.task) or {})
        self.text_before = self._of_task.pop("prefix", None) or getattr(self.model.config, "prefix", None) or ""

    def generate(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Return the token ids of the texts of one row.

        Raises InvalidInput for more tokens than the model has positions.
        """
        positions = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 30
        for name in ("max_new_tokens", "max_length"):
            if options.get(name, 0) > positions:
                raise InvalidInput(f"parameter '{name}': expected at most {positions}, got {options[name]}")
        saved = self.model.generation_config.to_diff_dict()
        arguments = {**_DEFAULTS[self.kind], **self._of_task}
        arguments = {k: v for k, v in arguments.items() if k in self._of_task or k not in saved} | dict(options)
        if "max_new_tokens" not in {*options, *self._of_task}:
            arguments["max_new_tokens"] = min(_DEFAULTS[self.kind]["max_new_tokens"], positions)
            if self._sets_length(saved, arguments):
                del arguments["max_new_tokens"]
        return self.model.generate(**inputs, **arguments)

    @staticmethod
    def _sets_length(saved: Mapping[str, Any], arguments: Mapping[str, Any]) -> bool:
        return (
            "max_length" in arguments
            or "max_new_tokens" in saved
            or saved.get("max_length", _DEFAULT_LENGTH) not in (None, _DEFAULT_LENGTH)
        )

    def postprocess(self, ids: Any) -> Any:
        texts = [{self.output: self.tokenizer.decode(each, skip_special_tokens=True)} for each in ids]
        return texts[0] if len(texts) == 1 else texts


class TextToTextPipeline(GeneratingPipeline):
    """Texts to texts, by an encoder-decoder."""

    def _sanitize_parameters(
        self, truncation: Any = None, src_lang: str | None = None, tgt_lang: str | None = None, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        given = {"truncation": truncation, "src_lang": src_lang, "tgt_lang": tgt_lang}
        return {name: value for name, value in given.items() if value is not None}, options, {}

    def preprocess(self, text: str, truncation: Any = False, **languages: str) -> Any:
        inputs = self.tokenizer(self.text_before + text, truncation=truncation, return_tensors="pt")
        inputs.pop("token_type_ids", None)  # `generate` does not take them
        return inputs

    def _forward(self, inputs: Any, **options: Any) -> Any:
        return self.generate(inputs, options)


class SummarizationPipeline(TextToTextPipeline):
    output = "summary_text"


class TranslationPipeline(TextToTextPipeline):
    """Translates between the languages of the options, else of a task such as "translation_en_to_fr"."""

    output = "translation_text"

    def preprocess(self, text: str, truncation: Any = False, **languages: str) -> Any:
        words = self.task.split("_")
        if not languages and len(words) == 4:  # translation, XX, to, YY
            languages = {"src_lang": words[1], "tgt_lang": words[3]}
        build = getattr(self.tokenizer, "_build_translation_inputs", None)  # multilingual models mark the languages
        if build is None:
            return super().preprocess(text, truncation)
        named = {"src_lang": languages.get("src_lang"), "tgt_lang": languages.get("tgt_lang")}
        try:
            return build(text, return_tensors="pt", truncation=truncation, **named)
        except (ValueError, KeyError) as error:
            raise InvalidInput(f"parameters 'src_lang' and 'tgt_lang': {error}") from error


class ImageToTextPipeline(GeneratingPipeline):
    """Images to texts, optionally with a text that the answer begins with or that asks for it."""

    kind = "image"

    def __call__(self, inputs: Any = None, *, images: Any = None, text: str | None = None, **options: Any) -> Any:
        rows = images if inputs is None else inputs
        if text is not None:
            rows = (
                [{"image": each, "text": text} for each in rows]
                if isinstance(rows, list)
                else {"image": rows, "text": text}
            )
        return super().__call__(rows, **options)

    def _sanitize_parameters(
        self, generate_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {}, {**options, **(generate_kwargs or {})}, {}

    def preprocess(self, row: Any) -> Any:
        image, text = (row.get("image"), row.get("text")) if isinstance(row, Mapping) else (row, None)
        if text is None:
            return self.image_processor(images=image, return_tensors="pt").to(self.model.dtype)
        if self.processor is not None:
            return self.processor(images=image, text=text, return_tensors="pt").to(self.model.dtype)
        inputs = self.image_processor(images=image, return_tensors="pt").to(self.model.dtype)
        inputs.update(self.tokenizer(text, return_tensors="pt"))
        return inputs

    def _forward(self, inputs: Any, **options: Any) -> Any:
        return self.generate(inputs, options)


class VisualQuestionAnsweringPipeline(GeneratingPipeline):
    """Questions about images, answered by a label or by a text."""

    kind = "image"

    def __call__(self, image: Any, question: Any = None, **options: Any) -> Any:
        """Answer rows {image, question}, or every question about every image."""
        rows = image
        if question is not None:
            images, questions = (each if isinstance(each, list) else [each] for each in (image, question))
            rows = [{"image": each, "question": asked} for asked in questions for each in images]
            rows = rows if isinstance(image, list) or isinstance(question, list) else rows[0]
        return super().__call__(rows, **options)

    def _sanitize_parameters(
        self, top_k: int | None = None, **options: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {}, options, {} if top_k is None else {"top_k": top_k}

    def preprocess(self, row: Mapping[str, Any]) -> Any:
        inputs = self.tokenizer(row["question"], return_tensors="pt")
        inputs.update(self.image_processor(images=row["image"], return_tensors="pt").to(self.model.dtype))
        return inputs

    def _forward(self, inputs: Any, **options: Any) -> Any:
        return {"ids": self.generate(inputs, options)} if self.model.can_generate() else self.model(**inputs)

    def postprocess(self, outputs: Any, top_k: int = 5) -> Any:
        if "ids" in outputs:
            return [
                {"answer": self.tokenizer.decode(each, skip_special_tokens=True).strip()} for each in outputs["ids"]
            ]
        scores, ids = outputs.logits.sigmoid()[0].topk(min(top_k, self.model.config.num_labels))
        labels = self.model.config.id2label
        return [{"score": s, "answer": labels[i]} for s, i in zip(scores.tolist(), ids.tolist(), strict=True)]


class FramesPipeline(Pipeline):  # type: ignore[misc]
    """Classes of videos, given as frames [frames, height, width, 3]: the pipeline of transformers opens files."""

    _load_processor = False
    _load_image_processor = None
    _load_video_processor = None
    _load_feature_extractor = False
    _load_tokenizer = False

    def _sanitize_parameters(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {}, {}, options

    def preprocess(self, frames: Any) -> Any:
        processor = getattr(self, "video_processor", None)
        if processor is None:
            return self.image_processor(list(frames), return_tensors="pt").to(self.model.dtype)
        return processor(frames, do_sample_frames=False, return_tensors="pt").to(self.model.dtype)

    def _forward(self, inputs: Any) -> Any:
        return self.model(**inputs)

    def postprocess(self, outputs: Any, top_k: int = 5, function_to_apply: str | None = None) -> Any:
        config, logits = self.model.config, outputs.logits[0]
        by_problem = {"regression": "none", "multi_label_classification": "sigmoid"}
        function = function_to_apply or by_problem.get(config.problem_type, "softmax")
        values = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "none": logits}[function]
        scores, ids = values.topk(min(top_k, config.num_labels))
        return [{"score": s, "label": config.id2label[i]} for s, i in zip(scores.tolist(), ids.tolist(), strict=True)]


PIPELINES: Mapping[str, type[Pipeline]] = {
    "text2text-generation": TextToTextPipeline,
    "summarization": SummarizationPipeline,
    "translation": TranslationPipeline,
    "image-to-text": ImageToTextPipeline,
    "visual-question-answering": VisualQuestionAnsweringPipeline,
    "video-classification": FramesPipeline,
}
