"""Helpers of the tests of the text engine: models, references in transformers, prompts."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dragoman.core.calls import Generate
from dragoman.core.spec import ModelSpec
from dragoman.core.text import Generation, Prompt, Sampling, Text, merge_chunks
from dragoman_text.generation.grammar import GrammarService
from dragoman_text.generation.grammar_compiler import GrammarLimits
from dragoman_text.runtimes.llm.model import LanguageModel

README = Path(__file__).parents[4] / "README.md"


def load_model(folder: Path, **parameters: Any) -> LanguageModel:
    """Load a model with one thread."""
    options = {"threads": 1, "dtype": "float32", "cache_memory": 0.05, **parameters}
    model = LanguageModel(ModelSpec(name=folder.name, uri=str(folder), parameters=options))
    model.load()
    return model


def text_engine(model: LanguageModel) -> Any:
    """Return the engine of a loaded model: `engine`, `intake`, `service`."""
    return model.text_engine


def engine_metrics(model: LanguageModel) -> dict[tuple[str, ...], float]:
    """Return the engine's metrics by name, without the prefix, and label values; histogram buckets are left out."""
    samples = [sample for family in model.measurements() for sample in family.samples]
    return {
        (sample.name.removeprefix("dragoman_text_"), *sample.labels.values()): sample.value
        for sample in samples
        if "le" not in sample.labels
    }


def engine_load(model: LanguageModel) -> tuple[float, float]:
    """Return the numbers of queued prompts and of sequences in the batch."""
    metrics = engine_metrics(model)
    return metrics[("queue_size",)], metrics[("batch_size",)]


@contextmanager
def grammar_service(model: LanguageModel, **limits: Any) -> Iterator[GrammarService]:
    """Create a grammar service for the vocabulary of a model; the end token is 1."""
    vocabulary = text_engine(model).intake.vocabulary
    service = GrammarService(vocabulary.tokenizer, vocabulary.size, [1], GrammarLimits(**limits))
    try:
        yield service
    finally:
        service.close()


async def generate_chunks(model: LanguageModel, prompt: Prompt, **sampling: Any) -> list[Generation]:
    call = Generate(prompts=(prompt,), sampling=Sampling(**sampling), stream=True)
    return [chunk async for chunk in model.generate(call)]


async def generation(model: LanguageModel, prompt: Prompt, **sampling: Any) -> Generation:
    return merge_chunks(await generate_chunks(model, prompt, **sampling))


async def text(model: LanguageModel, prompt: Prompt, **sampling: Any) -> Text:
    return (await generation(model, prompt, **sampling)).texts[0]


def ids(text: Text) -> list[int]:
    return [token.id for token in text.tokens]


def prompts(count: int, max_words: int = 60, seed: int = 1) -> list[str]:
    """Return sequences of words of the README; every fourth begins with the same 30 words."""
    words = [word for word in README.read_text().split() if len(word) < 20]  # paths and links are many tokens
    rng = random.Random(seed)
    common = " ".join(words[:30])
    sentences = [" ".join(rng.sample(words, rng.randint(1, max_words))) for _ in range(count)]
    return [f"{common} {each}" if i % 4 == 0 else each for i, each in enumerate(sentences)]


class Reference:
    """A model folder loaded by transformers."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        self.torch: Any = torch
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(self, prompt: str, count: int, **options: Any) -> tuple[list[list[int]], Any]:
        """Return the tokens of each sequence and the logits of each step."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        threads = self.torch.get_num_threads()
        self.torch.set_num_threads(1)
        output = self.model.generate(
            **inputs,
            max_new_tokens=count,
            pad_token_id=2,
            return_dict_in_generate=True,
            output_logits=True,
            **{"do_sample": False, **options},
        )
        self.torch.set_num_threads(threads)
        start = inputs.input_ids.shape[1]
        rows = [[token for token in row[start:].tolist() if token != 2] for row in output.sequences]
        return rows, output.logits

    def logprobs(self, tokens: list[int]) -> Any:
        """Return log-probabilities of the next token after each token, [tokens, vocabulary]."""
        with self.torch.no_grad():
            return self.torch.log_softmax(self.model(self.torch.tensor([tokens])).logits[0], -1)
