"""Helpers of the tests of the text engine: models, their references in transformers, prompts."""

import random
from pathlib import Path
from typing import Any

from dragoman.core.calls import Generate
from dragoman.core.spec import ModelSpec
from dragoman.core.text import Generation, Prompt, Sampling, Text, merge_chunks
from dragoman.runtimes.llm.model import LanguageModel

README = Path(__file__).parents[2] / "README.md"


def load_model(folder: Path, **parameters: Any) -> LanguageModel:
    """Load a model with one thread."""
    given = {"threads": 1, "dtype": "float32", "cache_memory": 0.05, **parameters}
    model = LanguageModel(ModelSpec(name=folder.name, uri=str(folder), parameters=given))
    model.load()
    return model


async def generate_chunks(model: LanguageModel, prompt: Prompt, **sampling: Any) -> list[Generation]:
    call = Generate(prompts=(prompt,), sampling=Sampling(**sampling), stream=True)
    return [piece async for piece in model.generate(call)]


async def generation(model: LanguageModel, prompt: Prompt, **sampling: Any) -> Generation:
    return merge_chunks(await generate_chunks(model, prompt, **sampling))


async def text(model: LanguageModel, prompt: Prompt, **sampling: Any) -> Text:
    return (await generation(model, prompt, **sampling)).texts[0]


def ids(text: Text) -> list[int]:
    return [token.id for token in text.tokens]


def prompts(count: int, longest: int = 60, seed: int = 1) -> list[str]:
    """Sentences of words out of the README; some begin alike, so that beginnings are found again."""
    words = [word for word in README.read_text().split() if len(word) < 20]  # paths and links are many tokens
    draw = random.Random(seed)
    common = " ".join(words[:30])
    made = [" ".join(draw.sample(words, draw.randint(1, longest))) for _ in range(count)]
    return [f"{common} {each}" if i % 4 == 0 else each for i, each in enumerate(made)]


class Reference:
    """The same folder in transformers."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        self.torch: Any = torch
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(self, prompt: str, count: int, **options: Any) -> tuple[list[list[int]], Any]:
        """The tokens of each text, and the logits of the steps."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        threads = self.torch.get_num_threads()
        self.torch.set_num_threads(1)
        found = self.model.generate(
            **inputs,
            max_new_tokens=count,
            pad_token_id=2,
            return_dict_in_generate=True,
            output_logits=True,
            **{"do_sample": False, **options},
        )
        self.torch.set_num_threads(threads)
        start = inputs.input_ids.shape[1]
        rows = [[token for token in row[start:].tolist() if token != 2] for row in found.sequences]
        return rows, found.logits

    def logprobs(self, tokens: list[int]) -> Any:
        """log p(token i + 1 | tokens up to i), for every i, of all tokens of the vocabulary."""
        with self.torch.no_grad():
            return self.torch.log_softmax(self.model(self.torch.tensor([tokens])).logits[0], -1)
