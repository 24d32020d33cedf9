"""Where the values of minato's own options of a loader are stored.

They are attributes of the loader. So libraries that rebuild a loader from its attributes carry them
over, and a program may set them later. A class derived from torch's or minato's
loader may use attributes of the same names for its own purposes. For such a class, only the
arguments of the loader's constructor count, which minato records separately. (A pending state is
not recorded, because it lasts only until the next iterator.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

#: attribute of a loader: its options by name, as given to the constructor
RECORD = "_minato_options"

#: module of minato's class
_MODULE = f"{__package__}.loader"


def _is_loaders_own(kind: type) -> bool:
    """Whether this is torch's or minato's class itself, not a class derived from them."""
    return kind is torch.utils.data.DataLoader or kind.__module__ == _MODULE


def has_default(kind: type, name: str) -> bool:
    """Whether a class derives from torch's or minato's, and that has the option."""
    return any(name in vars(one) and _is_loaders_own(one) for one in kind.__mro__)


def default(kind: type, name: str) -> Any:
    """An option's default for loaders of this class."""
    return next(vars(one)[name] for one in kind.__mro__ if name in vars(one) and _is_loaders_own(one))


def option_values(loader: Any, names: Iterable[str]) -> dict[str, Any]:
    """minato's options of a loader, by name: the value that the program has set, else the
    constructor's argument, else the default."""
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
    """Records options that a loader was given and sets its attributes, even if a class
    derived from the loader's has a property of that name."""
    own = vars(loader)
    own.update(options)
    kept = {name: value for name, value in options.items() if name != "pending_state"}
    own[RECORD] = {**own.get(RECORD, {}), **kept}
