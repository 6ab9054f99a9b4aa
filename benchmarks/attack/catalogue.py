"""Find the attacks: every module in `benchmarks/attack/attacks` has a tuple `ATTACKS`."""

import importlib
import pkgutil
from collections.abc import Mapping, Sequence

from benchmarks.attack import attacks
from benchmarks.attack.attack import Attack


def all_attacks() -> Mapping[str, Attack]:
    """Return the attacks by name. Raises ValueError for a duplicate name."""
    found: dict[str, Attack] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(attacks.__path__)):
        for attack in importlib.import_module(f"{attacks.__name__}.{module}").ATTACKS:
            if attack.name in found:
                raise ValueError(f"two attacks are named '{attack.name}'")
            found[attack.name] = attack
    return found


def select_attacks(names: Sequence[str]) -> Sequence[Attack]:
    """Return the attacks whose names start with one of `names`; all if it is empty.

    Raises ValueError for a name without an attack.
    """
    known = all_attacks()
    for name in names:
        if not any(item.startswith(name) for item in known):
            raise ValueError(f"unknown attack '{name}': expected one of {', '.join(known)}")
    return [attack for item, attack in known.items() if not names or any(item.startswith(name) for name in names)]
