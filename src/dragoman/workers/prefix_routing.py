"""Route prompts to the replica that has computed the longest prefix of them, so that its prefix cache is used."""

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from dragoman.core.calls import Generate, Infer
from dragoman.core.datatypes import BYTES
from dragoman.core.text import Chat, InfillPrompt, Prompt
from dragoman.workers.replica import Replica

# Lengths of the first prefix that is compared. Each further one is a quarter longer, or this much if that is more.
_FIRST_CHARACTERS = 64
_FIRST_TOKENS = 16
# Longer prompts are compared by this many characters.
_MAX_CHARACTERS = 1 << 16
# Deeper values of tools, options and messages are not compared.
_MAX_DEPTH = 32
# Maximum number of prefixes stored for each replica.
_MAX_PREFIXES = 10_000
# A replica is not chosen by prefix while it has this many calls more than the fewest busy one, and 1.5 times as many.
_MAX_AHEAD = 4


class PrefixRouter:
    """Chooses the replica of a text model: by the prompt's prefix, then by load."""

    def __init__(self) -> None:
        self._recent: WeakKeyDictionary[Replica, _RecentPrefixes] = WeakKeyDictionary()
        self._turns = itertools.count(1)

    def choose(self, replicas: Sequence[Replica], call: Any) -> Replica:
        """Return the replica for a call, and remember that it has the prompt."""
        try:
            keys = prefix_keys(call)
        except Exception:  # such as an integer of too many digits: the call is routed by load, and checked by the model
            keys = []
        fewest = min(len(replica.held) for replica in replicas)
        limit = fewest + max(_MAX_AHEAD, fewest // 2)

        def rank(replica: Replica) -> tuple[int, int, int]:
            recent = self._recent.setdefault(replica, _RecentPrefixes())
            return -recent.match(keys), len(replica.held), recent.last_turn

        best = min((replica for replica in replicas if len(replica.held) <= limit), key=rank)
        self._recent[best].add(keys, next(self._turns))
        return best


class _RecentPrefixes:
    """The prefixes of the prompts that a replica had, the fewest recent ones excluded. last_turn: its last call."""

    def __init__(self) -> None:
        self.last_turn = 0
        self._keys: OrderedDict[int, None] = OrderedDict()

    def match(self, keys: Sequence[int]) -> int:
        """Return how many prefixes of a prompt the replica had."""
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self._keys), 0)

    def add(self, keys: Sequence[int], turn: int) -> None:
        self.last_turn = turn
        for key in reversed(keys):  # a prefix is forgotten after those that are longer
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > _MAX_PREFIXES:
            self._keys.popitem(last=False)


def prefix_keys(call: Any) -> list[int]:
    """Return a hash of each prefix of a call's first prompt, shortest first; none if the prompt is short or missing."""
    match call:
        case Generate(prompts=[prompt, *_]):
            return _hashes(prompt, call.sampling.adapter)
        case Infer():
            prompts = (tensor for tensor in call.inputs.values() if tensor.datatype is BYTES and tensor.data.size)
            first = next((tensor.data.flat[0] for tensor in prompts), "")
            return _hashes(first if isinstance(first, str) else bytes(first).decode(errors="replace"), "")
    return []


def _hashes(prompt: Prompt, adapter: str) -> list[int]:
    if isinstance(prompt, InfillPrompt):
        prompt = prompt.prefix
    content = _chat_text(prompt) if isinstance(prompt, Chat) else prompt
    step = _FIRST_TOKENS if isinstance(content, tuple) else _FIRST_CHARACTERS
    hashes, start, stop = [], 0, step
    key = hash(adapter)
    while stop <= min(len(content), _MAX_CHARACTERS):
        key = hash((key, content[start:stop]))
        hashes.append(key)
        start, stop = stop, stop + max(step, stop // 4)
    return hashes


def _chat_text(chat: Chat) -> str:
    """Return the texts of a conversation up to `_MAX_CHARACTERS`, in an order in which templates may write them."""
    texts, length = [], 0
    for text in _strings((chat.template, chat.tools, chat.options, chat.messages)):
        texts.append(text)
        length += len(text)
        if length > _MAX_CHARACTERS:
            break
    return "\0".join(texts)


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the texts of nested lists and tables, shortened."""
    if depth > _MAX_DEPTH:
        return
    match value:
        case str():
            yield value[:_MAX_CHARACTERS]
        case Mapping():
            for name, item in value.items():
                yield str(name)
                yield from _strings(item, depth + 1)
        case list() | tuple():
            for item in value:
                yield from _strings(item, depth + 1)
        case _:
            yield str(value)
