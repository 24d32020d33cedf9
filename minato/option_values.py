"""Where the values of minato's own options of a loader lie.

They are attributes of the loader, so that libraries that make a loader again from its attributes
hand them on, and so that a program may set them later. A class derived from torch's or from minato's
loader may have attributes of the same names for purposes of its own: there, what counts is what
the loader's constructor was given, which minato records beside the attributes. (Not so a pending
state, which lasts until the next iterator.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

#: attribute of a loader: its options by name, as the constructor was given them
RECORD = "_minato_options"

#: of minato's class
_MODULE = f"{__package__}.loader"


def _is_loaders_own(kind: type) -> bool:
    """Whether it is torch's class or minato's, and not one derived from them."""
    return kind is torch.utils.data.DataLoader or kind.__module__ == _MODULE


def has_default(kind: type, name: str) -> bool:
    """Whether it is derived from torch's class or minato's, and that has the option."""
    return any(name in vars(one) and _is_loaders_own(one) for one in kind.__mro__)


def default(kind: type, name: str) -> Any:
    """An option's default for loaders of a class."""
    return next(vars(one)[name] for one in kind.__mro__ if name in vars(one) and _is_loaders_own(one))


def option_values(loader: Any, names: Iterable[str]) -> dict[str, Any]:
    """minato's options of a loader, by name: as the program has set them, else as the constructor
    was given them, else the defaults."""
    own, kind = getattr(loader, "__dict__", {}), type(loader)
    known = own.get(RECORD, {})
    first = own if _is_loaders_own(kind) else known
    found = {}
    for name in names:
        if name in first:
            found[name] = first[name]
        else:
            found[name] = known[name] if name in known else _else_of(loader, kind, name)
    return found


def option(loader: Any, name: str) -> Any:
    """One of minato's options of a loader."""
    own = getattr(loader, "__dict__", {})
    if name in own and _is_loaders_own(type(loader)):
        return own[name]
    return option_values(loader, (name,))[name]


def _else_of(loader: Any, kind: type, name: str) -> Any:
    return default(kind, name) if has_default(kind, name) else getattr(loader, name)


def record(loader: Any, options: dict[str, Any]) -> None:
    """Notes options that a loader was given. They become attributes, too, even where a class
    derived from the loader's has a property of the name."""
    own = vars(loader)
    own.update(options)
    kept = {name: value for name, value in options.items() if name != "pending_state"}
    own[RECORD] = {**own.get(RECORD, {}), **kept}
