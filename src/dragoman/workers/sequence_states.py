"""States of the sequences of a stateful model, in the process or thread that has the model."""

from typing import Any

from msgspec import structs

from dragoman.core import error_texts
from dragoman.core.calls import Infer
from dragoman.core.errors import SequenceLost
from dragoman.core.sequences import SequenceStep


class SequenceStates:
    """The states of one replica by slot, each with the number of its sequence."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._states: dict[int, tuple[int, dict[str, Any]]] = {}

    def attach(self, call: Infer) -> Infer:
        """Return the call with the state of each of its sequences.

        Requests that the server sends by itself, for warm-up, are a sequence of their own. Raises SequenceLost, before
        any state has changed.
        """
        if not call.sequences:
            return structs.replace(call, sequences=(SequenceStep(0, start=True, end=True, state={}),))
        for step in call.sequences:
            if not step.start and self._states.get(step.slot, (0, {}))[0] != step.number:
                raise SequenceLost(f"{error_texts.missing_start(step.id, self._model)}; its worker was restarted")
        for step in call.sequences:
            if step.start:
                self._states[step.slot] = (step.number, {})
            step.state = self._states[step.slot][1]
            if step.end:
                del self._states[step.slot]
        return call
