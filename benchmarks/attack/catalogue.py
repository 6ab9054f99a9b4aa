"""The attacks that there are: every module in `benchmarks/attack/attacks` has a tuple `ATTACKS`."""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence

from benchmarks.attack import attacks
from benchmarks.attack.attack import Attack


def all_attacks() -> Mapping[str, Attack]:
    """Every attack by its name. Raises ValueError for a name that is used twice."""
    found: dict[str, Attack] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(attacks.__path__)):
        for attack in importlib.import_module(f"{attacks.__name__}.{module}").ATTACKS:
            if attack.name in found:
                raise ValueError(f"two attacks are named '{attack.name}'")
            found[attack.name] = attack
    return found


def chosen(names: Sequence[str]) -> Sequence[Attack]:
    """The attacks of these names, or whose names begin so; all of them if there are none.

    Raises ValueError for a name that fits no attack.
    """
    known = all_attacks()
    for name in names:
        if not any(each.startswith(name) for each in known):
            raise ValueError(f"unknown attack '{name}': expected one of {', '.join(known)}")
    return [attack for each, attack in known.items() if not names or any(each.startswith(name) for name in names)]
