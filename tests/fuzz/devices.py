"""A `shard_map` in Python: every device is a thread that runs the body on its part."""

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Axes = tuple[Any, ...]


class Device:
    """A place in a mesh, and where it meets the others."""

    def __init__(self, where: dict[Any, int], mesh: "Mesh"):
        self.where = where  # its index along each axis
        self.mesh = mesh

    def sum(self, x: Any, axes: Axes) -> Any:
        """The sum over the devices that differ from this one in some axes alone."""
        others = [d for d in self.where if d not in axes]
        parts = [
            part
            for device, part in self.mesh.meet(self, x)
            if all(device.where[d] == self.where[d] for d in others)
        ]
        return np.asarray(functools.reduce(np.add, parts))

    def part(self, x: Any, spec: Any) -> Any:
        """What this device has of a value that is split as a spec says."""
        return x[self._slices(np.shape(x), spec)] if len(tuple(spec)) else x

    def put(self, out: Any, x: Any, spec: Any) -> None:
        out[self._slices(out.shape, spec)] = x

    def _slices(self, shape: Sequence[int], spec: Any) -> tuple[slice, ...]:
        found = []
        for n, axes in zip(shape, spec, strict=False):
            i, count = 0, 1
            for axis in _names(axes):
                i = i * self.mesh.sizes[axis] + self.where[axis]
                count *= self.mesh.sizes[axis]
            found.append(slice(i * (n // count), (i + 1) * (n // count)))
        return tuple(found)


def _names(axes: Any) -> Axes:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


class Mesh:
    def __init__(self, sizes: dict[Any, int]):
        self.sizes = sizes
        places = list(np.ndindex(*sizes.values()))
        self.devices = [Device(dict(zip(sizes, p, strict=True)), self) for p in places]
        self._barrier = threading.Barrier(len(places))
        self._values: dict[Device, Any] = {}

    def meet(self, device: Device, x: Any) -> list[tuple[Device, Any]]:
        """What all devices bring."""
        self._values[device] = x
        self._barrier.wait()
        found = [(d, self._values[d]) for d in self.devices]
        self._barrier.wait()
        return found

    def run(self, body: Callable[[Device], Any]) -> list[Any]:
        """What the body gives on each device; the first runs in the thread at hand."""
        results: list[Any] = [None] * len(self.devices)
        errors: list[BaseException] = []

        def run(i: int) -> None:
            try:
                with np.errstate(all="ignore"):
                    results[i] = body(self.devices[i])
            except BaseException as e:
                errors.append(e)
                self._barrier.abort()

        threads = [
            threading.Thread(target=run, args=(i,)) for i in range(1, len(results))
        ]
        for thread in threads:
            thread.start()
        run(0)
        for thread in threads:
            thread.join()
        for e in errors:
            if not isinstance(e, threading.BrokenBarrierError):
                raise e
        return results


def shard_map(ev: Any, eqn: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a `shard_map` of arrays."""
    params = eqn.params
    mesh = Mesh(dict(params["mesh"].shape))

    def body(device: Device) -> list[Any]:
        here = copy.copy(ev)
        here.device = device
        parts = [
            device.part(x, spec)
            for x, spec in zip(args, params["in_specs"], strict=True)
        ]
        return here.run(params["jaxpr"], parts)

    results = mesh.run(body)
    outs = [np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    for device, values in zip(mesh.devices, results, strict=True):
        for out, x, spec in zip(outs, values, params["out_specs"], strict=True):
            device.put(out, x, spec)
    return outs


def collective(ev: Any, eqn: Any, args: Sequence[Any]) -> list[Any] | None:
    """The results of an equation in which devices meet, or that only speaks of them."""
    name, params = eqn.primitive.name, eqn.params
    if ev.device is None:
        return None
    if name == "axis_index":
        return [np.asarray(ev.device.where[params["axis_name"]], np.int32)]
    if name.startswith("psum"):
        assert params.get("axis_index_groups") is None
        return [ev.device.sum(x, tuple(params["axes"])) for x in args]
    return list(args)


COLLECTIVES = frozenset(
    "axis_index psum psum2 psum_invariant pvary pbroadcast pcast".split()
)
