"""What to write instead of a name that there is not, in the errors that say so."""

import dis
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

from ._errors import OURS_AND_JAX

# Names that other libraries use, each with the name to use here.
ELSEWHERE = {
    "autocast": "amp",
    "half_function": "amp",
    "mixed_precision": "amp",
    "MixedPrecision": "amp",
    "custom_bwd": "amp_stop",
    "custom_fwd": "amp_stop",
    "float_function": "amp_stop",
    "force_full_precision": "amp_stop",
    "DTypePolicy": "Policy",
    "DTypePolicyMap": "PolicyMap",
    "dtype_policy": "global_policy",
    "set_dtype_policy": "set_global_policy",
    "DynamicLossScale": "DynamicScalerState",
    "DynamicLossScaler": "DynamicScalerState",
    "DynamicLossScaling": "DynamicScalerState",
    "DynamicScale": "DynamicScalerState",
    "FP16_Optimizer": "enable_amp",
    "GradScaler": "enable_amp",
    "enable_mixed_precision_graph_rewrite": "enable_amp",
    "initialize": "enable_amp",
    "LossScaleOptimizer": "loss_scale_optimizer",
    "NoOpLossScale": "NoScaler",
    "StaticLossScale": "static_scaler",
    "select_tree": "guard_step",
    "convert_model": "convert",
    "export": "convert",
    "quantise": "convert",
    "quantize": "convert",
    "save": "convert",
}
# How those are written that are called in another way than what they are taken for, by
# our name, or by that of others in lower case.
WRITTEN = {
    "amp": "mixed = amp(loss_fn)",
    "amp_stop": "with amp_stop():",
    "convert": "convert(fn, params, x)",
    "enable_amp": "mixed, tx = enable_amp(loss_fn, optimizer)",
    "guard_step": "@guard_step",
    "loss_scale_optimizer": "tx = loss_scale_optimizer(optimizer)",
    "export": "convert(fn, params, x).save(path)",
    "quantise": "convert(fn, params, x, amp_policy='int8_from_mixed_bfloat16')",
    "quantize": "convert(fn, params, x, amp_policy='int8_from_mixed_bfloat16')",
    "save": "convert(fn, params, x).save(path)",
}


def refuse_name(home: str, name: str) -> NoReturn:
    """Raises the error of a public module that has no such name.

    It says which public module has it, or which name is meant."""
    hint = _hint(home, name) if not name.startswith("_") else ""  # tools ask for those
    reader = sys._getframe(1)
    while reader.f_code.co_filename.startswith(OURS_AND_JAX) and reader.f_back:
        reader = reader.f_back
    # `from home import name` would make another error of an `AttributeError`.
    if hint and dis.opname[reader.f_code.co_code[reader.f_lasti]] == "IMPORT_FROM":
        path = getattr(sys.modules.get(home), "__file__", None)
        said = f"cannot import name {name!r} from {home!r}. {hint}"
        raise ImportError(said, name=home, path=path)
    raise AttributeError(f"module {home!r} has no attribute {name!r}. {hint}".strip())


def _hint(home: str, name: str) -> str:
    package = sys.modules.get(__name__.rpartition(".")[0])
    homes: tuple[Any, ...] = (package, *getattr(package, "_HOMES", ()))
    public = {x.__name__: x.__all__ for x in homes if hasattr(x, "__all__")}
    for module, names in public.items():
        if name in names:
            return f"It is in `{module}`."
    ours = {other.lower(): own for other, own in ELSEWHERE.items()}.get(name.lower())
    if ours is None:
        of_home = (
            public.get(home, ()) if home != getattr(package, "__name__", "") else ()
        )
        everywhere = (x for names in public.values() for x in names)
        return did_you_mean(name, of_home or everywhere).strip()
    written = WRITTEN.get(name.lower(), WRITTEN.get(ours))
    return f"Did you mean {ours!r}?" + (f" Write `{written}`." if written else "")


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """A question that names the `known` name closest to `name`; "" if none is close."""
    close = closest(name, known)
    return f" Did you mean {close!r}?" if close else ""


def closest(name: Any, known: Iterable[str]) -> str | None:
    """The name closest to `name`: with its words or its letters in another order, or
    with other letters."""
    given = str(name).lower()
    lower = {k.lower(): k for k in known}
    reordered = [k for k in lower if sorted(k.split("_")) == sorted(given.split("_"))]
    swapped = [k for k in lower if sorted(k) == sorted(given)]
    close = reordered or swapped or get_close_matches(given, lower, 1)
    return lower[close[0]] if close else None


def no_attribute(owner: Any, name: str, hint: str = "") -> AttributeError:
    """The error of an attribute that `owner` has not, with what to write instead."""
    said = f"{type(owner).__name__!r} has no attribute {name!r}."
    public = [known for known in dir(type(owner)) if not known.startswith("_")]
    hint = hint or did_you_mean(name, public).strip()
    return AttributeError(" ".join(filter(None, (said, hint))))
