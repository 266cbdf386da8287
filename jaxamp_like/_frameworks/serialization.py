"""How Flax writes objects of this library to bytes, and reads them back."""

import sys
from collections.abc import Callable
from typing import Any


def save_with_flax(
    cls: type, to_dict: Callable[[Any], Any], from_dict: Callable[[Any, Any], Any]
) -> None:
    """Lets `flax.serialization`, if it is imported, save objects of a class.

    Args:
        cls: the class.
        to_dict: makes a dict of arrays and strings of an object.
        from_dict: makes an object of the one that is there and the saved dict."""
    serialization: Any = sys.modules.get("flax.serialization")
    if serialization is not None:
        serialization.register_serialization_state(
            cls, to_dict, from_dict, override=True
        )
