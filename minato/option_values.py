"""Where the values of minato's own options of a loader are stored.

They are attributes of the loader. So libraries that rebuild a loader from its attributes carry them
over, and a program may set them later. A class derived from torch's or minato's
loader may use attributes of the same names for its own purposes. For such a class, only the
arguments of the loader's constructor count, which minato records separately. (A pending state is
not recorded, because it lasts only until the next iterator.)
"""

from __future__ import annotations

from typing import Any

import torch

#: attribute of a loader: its options by name, as given to the constructor
RECORD = "_minato_options"

#: module of minato's class
_MODULE = f"{__package__}.loader"


def _is_loaders_own(kind: type) -> bool:
    """Whether this is torch's or minato's class itself, not a class derived from them."""
    return kind is torch.utils.data.DataLoader or kind.__module__ == _MODULE


def default(kind: type, name: str) -> Any:
    """An option's default for loaders of this class. Raises StopIteration for a class that has none."""
    return next(vars(one)[name] for one in kind.__mro__ if name in vars(one) and _is_loaders_own(one))


def option(loader: Any, name: str) -> Any:
    """One of minato's options of a loader: the value that the program has set, else the
    constructor's argument, else the default."""
    own, kind = getattr(loader, "__dict__", {}), type(loader)
    for values in (own if _is_loaders_own(kind) else {}, own.get(RECORD, {})):
        if name in values:
            return values[name]
    try:
        return default(kind, name)
    except StopIteration:
        return getattr(loader, name)


def record(loader: Any, options: dict[str, Any]) -> None:
    """Records options that a loader was given and sets its attributes, even if a class
    derived from the loader's has a property of that name."""
    own = vars(loader)
    own.update(options)
    kept = {name: value for name, value in options.items() if name != "pending_state"}
    own[RECORD] = {**own.get(RECORD, {}), **kept}
