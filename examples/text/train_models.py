"""Train small language models on Python's own documentation, and saves them as Hugging Face folders.

    python examples/text/train_models.py [--tiny] [FOLDER]

writes `small-llama` and `small-gpt2` into the folder, `models` beside this file by default (about a minute of CPU time
each), unless they are there: weights as safetensors, a byte-level BPE tokenizer and a chat template. Their texts are
no wisdom, but they are no noise either. With --tiny it writes `tiny-llama`, in some seconds.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

Kind = Literal["llama", "gpt2"]

START, END, PAD = "<|start|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|system|>Tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Characters of two, three and four bytes, so that the training text contains some.
PHRASES = (
    ("French", "Bonjour à tous, ça va ?"),
    ("German", "Guten Tag, schöne Grüße aus Köln."),
    ("Greek", "Καλημέρα σε όλους."),
    ("Russian", "Добрый день, друзья."),
    ("Japanese", "こんにちは、世界。"),
    ("Chinese", "你好、世界。"),
    ("Arabic", "مرحبا بالعالم"),
    ("emoji", "🙂🌍🎉 naïve café"),
)


@dataclass(frozen=True)
class Size:
    """Size of a model: `width` of its states, layers, heads, vocabulary and context."""

    width: int = 192
    layers: int = 4
    heads: int = 6
    vocabulary: int = 2000
    context: int = 1024


TINY = Size(width=64, layers=2, heads=2, vocabulary=700, context=512)


def corpus() -> list[str]:
    """Return Python's documentation of its own topics, and phrases of many languages."""
    chats = [
        f"<|user|>How do I say hello in {language}?\n<|assistant|>In {language} you say: {text}{END}"
        for language, text in PHRASES
    ]
    return [*(f"{text}{END}" for _, text in sorted(topics.items())), *chats * 20]


def tokenizer(texts: list[str], size: Size) -> Any:
    """Return a byte-level BPE tokenizer, trained on the texts."""
    bpe: Any = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocabulary,
        special_tokens=[START, END, PAD, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, bpe.token_to_id(START))]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=START, eos_token=END, pad_token=PAD, model_max_length=size.context
    )
    made.chat_template = TEMPLATE
    return made


def network(kind: Kind, size: Size, ids: Any) -> Any:
    """Return an untrained model of this kind and size."""
    common = {
        "vocab_size": len(ids),
        "bos_token_id": ids.bos_token_id,
        "eos_token_id": ids.eos_token_id,
        "pad_token_id": ids.pad_token_id,
    }
    if kind == "gpt2":
        config = GPT2Config(
            n_embd=size.width, n_layer=size.layers, n_head=size.heads, n_positions=size.context, **common
        )
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        hidden_size=size.width,
        intermediate_size=size.width * 8 // 3,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        **common,
    )
    return LlamaForCausalLM(config)


def learn(model: Any, tokens: torch.Tensor, steps: int, rows: int = 8, length: int = 64) -> float:
    """Train on rows cut out of the tokens, for a number of steps; return the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    loss = torch.zeros(())
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length, (rows,))
        batch = torch.stack([tokens[start : start + length] for start in starts.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    return float(loss.detach())


def train(folder: Path, kind: Kind, size: Size = Size(), steps: int = 600) -> float:
    """Train a model and its tokenizer and save both in the folder; return the last loss."""
    torch.manual_seed(7)
    texts = corpus()
    made = tokenizer(texts, size)
    tokens = torch.tensor(
        [token for text in texts for token in made(text, add_special_tokens=False, verbose=False).input_ids]
    )
    model = network(kind, size, made)
    loss = learn(model, tokens, steps)
    made.save_pretrained(folder)
    model.save_pretrained(folder)  # last, so that a folder with a model in it is whole
    return loss


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "models")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.tiny:
        torch.set_num_threads(1)  # threads would wait for one another longer than they compute
    kinds: list[Kind] = ["llama"] if arguments.tiny else ["llama", "gpt2"]
    options: dict[str, Any] = {"size": TINY, "steps": 100} if arguments.tiny else {}
    for each in kinds:
        made = arguments.folder / f"{'tiny' if arguments.tiny else 'small'}-{each}"
        if not (made / "config.json").exists():
            print(f"training {made.name}, {'some seconds' if arguments.tiny else 'a minute or two'} ...", flush=True)
            print(f"{made.name}: loss {train(made, each, **options):.2f}", flush=True)
