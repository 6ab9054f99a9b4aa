"""Several ways to the same function as one: each ability is taken from the first that has it."""

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.core.vectors import ABILITIES, Ability, Config, VectorFunction


class FirstOf(VectorFunction):
    """Sizes and names are those of the first; `sources` tells whose each ability is."""

    def __init__(self, first: VectorFunction, *others: VectorFunction) -> None:
        self._parts = (first, *others)
        self.input_names, self.output_names = first.input_names, first.output_names
        self._sources: dict[Ability, str] = {}
        for ability in ABILITIES:
            part = next((p for p in self._parts if ability in p.sources()), None)
            if part is not None:
                self._sources[ability] = part.sources()[ability]
                # The methods of an instance: a call goes straight to who answers it.
                setattr(self, ability, getattr(part, ability))
                if ability == "evaluate":
                    self.vectorised = part.vectorised

    def input_sizes(self, config: Config) -> Sequence[int]:
        return self._parts[0].input_sizes(config)

    def output_sizes(self, config: Config) -> Sequence[int]:
        return self._parts[0].output_sizes(config)

    def sources(self) -> Mapping[Ability, str]:
        return self._sources

    def notes(self) -> Mapping[str, Any]:
        used = {*self._sources.values()}
        return {k: v for part in self._parts if used & {*part.sources().values()} for k, v in part.notes().items()}

    def close(self) -> None:
        for part in self._parts:
            part.close()
