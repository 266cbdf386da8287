"""Small models that split their own work: by constraints, by types, in a `shard_map`.

As in `workloads`, each is written once and told in three styles. A stack of blocks
(norm, two products, residual), or of experts, at the sizes of a layer that is worth
splitting."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from jaxamp_like._jax import varying_over
from jaxamp_like.rules import Rule, use_compute_precision

from .workloads import FLOAT32, Loss, Params, Style, layer_norm

if hasattr(jax.sharding, "reshard"):
    reshard = jax.sharding.reshard
else:  # JAX < 0.7
    from jax.experimental.shard import reshard  # pyright: ignore

ROWS, LENGTH, DIM, HIDDEN, DEPTH = 8, 256, 512, 2048, 2
EXPERTS, MICROBATCHES = 16, 16

Build = Callable[[Style, Mesh], Loss]


@dataclass(frozen=True)
class Split:
    """A model with the way that it is split.

    Args:
        build: given a style and a mesh, the loss of parameters and batch.
        axes: names and sizes of the mesh's axes, by the number of devices.
        params: shapes of the parameters, and how each lies on the devices, by the
            number of devices.
        rows: how the batch lies.
        explicit: whether types say how arrays are split.
        rules: what a user would add to the default policy."""

    build: Build
    axes: Callable[[int], Mapping[str, int]]
    params: Callable[[int], Mapping[str, tuple[tuple[int, ...], P]]]
    rows: P
    explicit: bool = False
    rules: dict[Any, Rule] = field(default_factory=dict)

    def arguments(self, mesh: Mesh, n: int) -> tuple[Params, Any]:
        """Parameters and batch as shapes, each with its place."""

        def shaped(shape, spec):
            where = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)

        params = {name: shaped(*given) for name, given in self.params(n).items()}
        return params, shaped((ROWS * n, LENGTH, DIM), self.rows)

    @property
    def axis_type(self) -> AxisType:
        return AxisType.Explicit if self.explicit else AxisType.Auto


def block(
    style: Style,
    up: Array,
    down: Array,
    x: Array,
    whole: Callable[[Array], Array] = lambda x: x,
    inner: Callable[[Array], Array] = lambda h: h,
    back: Callable[[Array], Array] = lambda y: y,
    stay: Callable[[Array], Array] = lambda x: x,
) -> Array:
    """A block of two products.

    `whole` is applied to what goes into it, `inner` between the products, `back` to
    what comes out, and `stay` to the residual stream."""
    norm = {"scale": jnp.ones(DIM), "bias": jnp.zeros(DIM)}
    h = whole(style.in_full(lambda x: layer_norm(x, norm))(x))
    h = style.cheap(jax.nn.gelu)(inner(h @ style.low(up)))
    y = back(h @ style.low(down))
    with jax.named_scope("residual"):
        x = x + y
    return stay(x)


def mean_square(style: Style, x: Array) -> Array:
    return jnp.mean(jnp.square(style.full(x)))


def stack(spec: Callable[[str], P]) -> Callable[[int], Any]:
    """Parameters of a stack of blocks, split by `spec`."""

    def of(n: int) -> Mapping[str, tuple[tuple[int, ...], P]]:
        ups = {f"up{i}": ((DIM, HIDDEN), spec("up")) for i in range(DEPTH)}
        return ups | {f"down{i}": ((HIDDEN, DIM), spec("down")) for i in range(DEPTH)}

    return of


def run_stack(style: Style, params: Params, x: Array, **options: Any) -> Array:
    x = style.low(x)
    for i in range(DEPTH):
        x = block(style, params[f"up{i}"], params[f"down{i}"], x, **options)
    return mean_square(style, x)


LONGEST = {"up": P(None, "data"), "down": P("data", None)}
COLUMNS_ROWS = {"up": P(None, "model"), "down": P("model", None)}


# ----------------------------------------------------------- constraints and types


def sequence_parallel(style: Style, mesh: Mesh) -> Loss:
    """Between blocks each device has a part of every sequence; in them, all of it."""

    def at(x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def loss(params, x):
        return run_stack(
            style,
            params,
            x,
            whole=lambda h: at(h, "data", None, None),
            inner=lambda h: at(h, "data", None, "model"),
            back=lambda y: at(y, "data", "model", None),
            stay=lambda x: at(x, "data", "model", None),
        )

    return loss


def by_types(style: Style, mesh: Mesh) -> Loss:
    """Fully sharded: each weight is made whole where it is read."""

    def loss(params, x):
        whole = {k: reshard(style.low(w), P()) for k, w in params.items()}
        return run_stack(style, whole, x)

    return loss


# ---------------------------------------------------------------------- shard_map


def mapped(
    body: Callable[[Style, Params, Array], Array],
    specs: Callable[[str], P],
    rows: P,
    style: Style,
    mesh: Mesh,
) -> Loss:
    def loss(params, x):
        per_device = jax.shard_map(
            partial(body, style),
            mesh=mesh,
            in_specs=({k: specs(k) for k in params}, rows),
            out_specs=P(),
        )
        return per_device(params, x)

    return loss


def replicated_body(style: Style, params: Params, x: Array) -> Array:
    return lax.pmean(run_stack(style, params, x), "data")


def gathered_body(style: Style, params: Params, x: Array) -> Array:
    def whole(name, w):
        axis = int("up" in name)
        return lax.all_gather(style.low(w), "data", axis=axis, tiled=True)

    params = {name: whole(name, w) for name, w in params.items()}
    return lax.pmean(run_stack(style, params, x), "data")


def columns_body(style: Style, params: Params, x: Array) -> Array:
    """Columns of the one product and rows of the other, then a sum."""
    loss = run_stack(style, params, x, back=lambda y: lax.psum(y, "model"))
    return lax.pmean(loss, "data")


def experts_body(style: Style, params: Params, x: Array) -> Array:
    """Each token goes to one expert, and the experts live on all devices."""
    x = style.low(x.reshape(-1, DIM))
    norm = {"scale": jnp.ones(DIM), "bias": jnp.zeros(DIM)}
    h = style.in_full(lambda x: layer_norm(x, norm))(x)

    def route(h, router):
        chances = jax.nn.softmax(h @ router)
        best = jax.nn.one_hot(jnp.argmax(chances, -1), EXPERTS)
        place = jnp.cumsum(best, 0) * best - best
        fits = jax.nn.one_hot(place.sum(-1).astype(int), len(h) * 2 // EXPERTS)
        to = best[:, :, None] * fits[:, None, :]
        return to, to * chances.max(-1)[:, None, None]

    to, weighted = map(style.low, route(*style.full((h, params["router"]))))
    sent = jnp.einsum("tec,td->ecd", to, h)
    sent = lax.all_to_all(sent, "data", 0, 1, tiled=True)
    made = style.cheap(jax.nn.gelu)(
        jnp.einsum("ecd,edh->ech", sent, style.low(params["up"]))
    )
    made = jnp.einsum("ech,ehd->ecd", made, style.low(params["down"]))
    back = lax.all_to_all(made, "data", 1, 0, tiled=True)
    y = x + jnp.einsum("tec,ecd->td", weighted, back)
    return lax.pmean(mean_square(style, y), "data")


def pipeline_body(style: Style, params: Params, x: Array) -> Array:
    """Each device is a stage; what it has made goes on to the next one."""
    stages = lax.axis_size("data")
    first, last = (lax.axis_index("data") == i for i in (0, stages - 1))
    xs = style.low(x.reshape(MICROBATCHES, -1, LENGTH, DIM))
    rest = jnp.zeros((stages - 1, *xs.shape[1:]), xs.dtype)
    up, down = params["up"][0], params["down"][0]

    def tick(state, new):
        y = block(style, up, down, jnp.where(first, new, state))
        on = [(i, (i + 1) % stages) for i in range(stages)]
        return lax.ppermute(y, "data", on), mean_square(style, y)

    start = varying_over(jnp.zeros_like(xs[0]), ["data"])
    _, losses = lax.scan(tick, start, jnp.concatenate([xs, rest]))
    return lax.psum(jnp.where(last, losses[stages - 1 :].mean(), 0.0), "data")


def experts(n: int) -> Mapping[str, tuple[tuple[int, ...], P]]:
    return {
        "router": ((DIM, EXPERTS), P()),
        "up": ((EXPERTS, DIM, HIDDEN), P("data")),
        "down": ((EXPERTS, HIDDEN, DIM), P("data")),
    }


def stages(n: int) -> Mapping[str, tuple[tuple[int, ...], P]]:
    return {
        "up": ((n, DIM, HIDDEN), P("data")),
        "down": ((n, HIDDEN, DIM), P("data")),
    }


def of_name(specs: Mapping[str, P]) -> Callable[[str], P]:
    return lambda name: specs[name.rstrip("0123456789")]


def one_axis(n: int) -> Mapping[str, int]:
    return {"data": n}


def two_axes(n: int) -> Mapping[str, int]:
    return {"data": 2, "model": n // 2}


def in_shard_map(
    body: Any,
    axes: Callable[[int], Mapping[str, int]],
    params: Callable[[int], Any],
    rows: P,
) -> Split:
    def build(style, mesh):
        specs = {k: spec for k, (_, spec) in params(mesh.size).items()}
        return mapped(body, specs.__getitem__, rows, style, mesh)

    return Split(build, axes, params, rows)


COLUMNS = in_shard_map(columns_body, two_axes, stack(of_name(COLUMNS_ROWS)), P("data"))
PIPELINE = in_shard_map(pipeline_body, one_axis, stages, P())

SPLITS = {
    "sequence parallel": Split(
        sequence_parallel,
        two_axes,
        stack(of_name(COLUMNS_ROWS)),
        P("data", "model", None),
    ),
    "fully sharded, by types": Split(
        by_types, one_axis, stack(of_name(LONGEST)), P("data"), explicit=True
    ),
    "data parallel, shard_map": in_shard_map(
        replicated_body, one_axis, stack(lambda name: P()), P("data")
    ),
    "fully sharded, shard_map": in_shard_map(
        gathered_body, one_axis, stack(of_name(LONGEST)), P("data")
    ),
    "tensor parallel, shard_map": COLUMNS,
    "tensor parallel, low stream": replace(
        COLUMNS, rules={"residual": use_compute_precision}
    ),
    "expert parallel, shard_map": in_shard_map(
        experts_body, one_axis, experts, P("data")
    ),
    "pipeline, shard_map": PIPELINE,
    "pipeline, sent low": replace(
        PIPELINE, rules={lax.ppermute_p: use_compute_precision}
    ),
}


def in_style(split: Split, dtype: str | None, lean: bool, mesh: Mesh) -> Loss:
    style = FLOAT32 if dtype is None else Style(dtype, lean=lean)
    return split.build(style, mesh)
