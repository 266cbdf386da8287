"""Devices to compile for that need not be there: XLA knows them by a description."""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from .._errors import how_to_install

_GPU = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32
 shared_memory_per_block: 49152 shared_memory_per_core: 233472
 threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
 cuda_compute_capability {{ major: {major} minor: 0 }} registers_per_core_limit: 65536
 registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
 thread_dim_limit_z: 64 device_address_bits: 64 driver_version: "13.0.0"
 runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
 dnn_version: "9.10.0" name: "{name}" device_vendor: "NVIDIA Corporation" }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
_GPUS = {
    "h200": dict(name="NVIDIA H200", major=9, cores=132, bandwidth=4_800_000_000_000),
    "b200": dict(name="NVIDIA B200", major=10, cores=148, bandwidth=8_000_000_000_000),
}
# The smallest slice of each generation of TPUs that libtpu describes.
_TPUS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
# Otherwise libtpu asks the network which TPU this machine has, and is there for one
# process at a time.
_NO_TPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

NAMES = (*_GPUS, *_TPUS)
"""The names that `described` takes."""


def as_device(given: Any, argument: str, also: str = "") -> Any:
    """A device, which may be given by the name of one that need not be there.

    Args:
        given: what a user gave.
        argument: for what.
        also: what else this argument may be, for the message of the error.
    Raises:
        TypeError: it is no device.
        ValueError: there is no device of this name.
        ImportError: the compiler for it is not installed."""
    if isinstance(given, str):
        return described(given, argument)
    if not hasattr(given, "device_kind"):
        raise TypeError(
            f"`{argument}` must be {also}a device, such as `jax.devices('cpu')[0]`, or "
            f"one of the names {', '.join(NAMES)}, but got {given!r}."
        )
    return given


def described(name: str, argument: str = "device") -> Any:
    """The device of a name, as XLA sees it. It need not be there.

    Raises:
        ValueError: there is no device of this name.
        ImportError: the compiler for it is not installed."""
    if name in _GPUS:
        return gpus(name, 1)[0]
    if name in _TPUS:
        return tpus(_TPUS[name])[0]
    raise ValueError(
        f"`{argument}` must be a device, or one of the names {', '.join(NAMES)}, but "
        f"got {name!r}. A device that is here is one of `jax.devices()`."
    )


def placed(args: Any, device: Any) -> Any:
    """The shapes of all arrays, on a device."""
    sharding = jax.sharding.SingleDeviceSharding(device)

    def place(x: Any) -> Any:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, args)


def gpus(name: str, count: int) -> Sequence[Any]:
    """GPUs of a name, up to eight in a host."""
    _need("gpu-compile", "NVIDIA GPUs", "jax_cuda13_plugin", "jax_cuda12_plugin")
    try:
        topology = topologies.get_topology_desc(
            "",
            platform="cuda",
            target_config=_GPU.format(**_GPUS[name]),
            topology=f"{-(-count // 8)}x{min(count, 8)}x1",
        )
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise ImportError(
            f"The compiler for NVIDIA GPUs of JAX {jax.__version__} can't compile for "
            f"a GPU that is only described: {error}. Use a newer JAX with its plugin, "
            "or a TPU such as 'v5e'."
        ) from error
    return topology.devices


def tpus(topology_name: str) -> Sequence[Any]:
    """The TPUs of a slice, such as "v5e:2x2"."""
    _need("tpu-compile", "TPUs", "libtpu")
    for key, value in _NO_TPU.items():
        os.environ.setdefault(key, value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=topology_name)
    return topology.devices


def _need(extra: str, of: str, *packages: str) -> None:
    if not any(map(find_spec, packages)):
        raise ImportError(
            f"XLA's compiler for {of} is not installed, which needs no such device. "
            f"{how_to_install(packages[0].replace('_', '-'), extra)}"
        )
