"""Trains in float32, converts once, ships a folder, and serves it over HTTP.

A small vision transformer learns handwritten digits (see train_digits.py). It is saved
twice, as it is and converted to bfloat16; each artifact is then served by a process of
its own, which has none of the model's code, and is asked by several clients at once.

    python examples/serve_digits.py                    # train, convert, serve, measure
    python examples/serve_digits.py --serve FOLDER --port 8000          # only serve one

    curl localhost:8000/classify -d '{"images": [[0, 0, 5, 13, ...]]}'  # 64 pixels each

On a CPU the gain is in bytes: most CPUs have no fast bfloat16 units.
"""

import argparse
import asyncio
import contextlib
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import jax
import jax.export
import numpy as np
import uvicorn
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from jaxamp_like import load
from jaxamp_like.inference import Artifact

PIXELS, LARGEST = 64, 1024


# ------------------------------------------------------------------------- the server


def application(model: Artifact) -> Starlette:
    """Answers POST /classify with digits; any number of images a request."""

    def classify(images: np.ndarray) -> np.ndarray:
        # A program is compiled for each batch size: few of them, by padding.
        size = 1 << (len(images) - 1).bit_length()
        padded = np.zeros((size, PIXELS), np.float32)
        padded[: len(images)] = images
        return np.asarray(model(padded))[: len(images)]

    async def answer(request: Request) -> JSONResponse:
        try:
            images = np.asarray((await request.json())["images"], np.float32)
            if images.ndim != 2 or images.shape[1] != PIXELS:
                raise ValueError(f"the images have the shape {images.shape}")
            if not 0 < len(images) <= LARGEST:
                raise ValueError(f"there are {len(images)} images")
        except (ValueError, KeyError, TypeError) as e:
            wanted = f'{{"images": [[{PIXELS} pixels], ...]}}, 1 to {LARGEST} of them'
            return JSONResponse({"error": f"{e}; send {wanted}"}, status_code=400)
        scores = await run_in_threadpool(classify, images)
        digits = scores.argmax(-1).tolist()
        return JSONResponse({"digits": digits, "scores": scores.max(-1).tolist()})

    async def about(request: Request) -> JSONResponse:
        return JSONResponse({"digest": model.digest, "model": str(model.summary)})

    classify(np.zeros((1, PIXELS), np.float32))  # compiled before the first request
    return Starlette(
        routes=[
            Route("/classify", answer, methods=["POST"]),
            Route("/", about),
        ]
    )


def serve(folder: pathlib.Path, port: int) -> None:
    """Serves an artifact on loopback; prints the port as soon as it listens."""
    app = application(load(folder))
    with socket.create_server(("127.0.0.1", port)) as listening:
        print(listening.getsockname()[1], flush=True)
        config = uvicorn.Config(app, log_level="warning")
        uvicorn.Server(config).run(sockets=[listening])


# ---------------------------------------------------------------------- the load test


@contextlib.contextmanager
def served(folder: pathlib.Path) -> Iterator[tuple[str, int]]:
    """A process that serves an artifact: its address and its id."""
    command = [sys.executable, __file__, "--serve", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            if not port:
                raise RuntimeError(f"{command} ended before it listened")
            yield f"http://127.0.0.1:{port}", server.pid
        finally:
            server.terminate()


async def ask(
    url: str, images: np.ndarray, labels: np.ndarray, requests: int, clients: int
) -> dict[str, float]:
    """Sends requests of 1 to 16 images from several clients at once."""
    rng = np.random.default_rng(0)
    sizes = [int(n) for n in rng.integers(1, 17, requests)]
    latencies, right, total = [], 0, 0

    async def client(http: httpx.AsyncClient, mine: list[int]) -> None:
        nonlocal right, total
        for n in mine:
            places = rng.integers(0, len(images), n)
            begin = time.perf_counter()
            response = await http.post(
                "/classify", json={"images": images[places].tolist()}
            )
            latencies.append(1e3 * (time.perf_counter() - begin))
            response.raise_for_status()
            right += int((response.json()["digits"] == labels[places]).sum())
            total += n

    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for n in (1, 2, 4, 8, 16):  # each size is compiled once
            await http.post("/classify", json={"images": images[:n].tolist()})
        begin = time.perf_counter()
        await asyncio.gather(*(client(http, sizes[i::clients]) for i in range(clients)))
        seconds = time.perf_counter() - begin
        wrong = await http.post("/classify", json={"images": [[1, 2]]})
        assert wrong.status_code == 400, wrong
    return {
        "median ms": statistics.median(latencies),
        "99 % ms": float(np.percentile(latencies, 99)),
        "images/s": total / seconds,
        "accuracy %": 100 * right / total,
    }


def resident_mib(pid: int) -> float:
    """The memory that a process holds, as Linux tells it."""
    status = pathlib.Path(f"/proc/{pid}/status")
    if not status.exists():
        return float("nan")
    line = next(x for x in status.read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


# ------------------------------------------------------------------ train and convert


def save_both(out: pathlib.Path, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Trains the model, saves it as it is and converted; returns what to ask it."""
    # Here and not above: the process that serves needs none of it.
    import equinox as eqx
    import optax
    from sklearn.datasets import load_digits
    from train_digits import BATCH, VisionTransformer, cross_entropy, predict

    from jaxamp_like import convert

    pixels, labels = load_digits(return_X_y=True)
    mean, deviation = float(pixels.mean()), float(pixels.std())

    def classify(model, pixels):
        images = ((pixels - mean) / deviation).reshape(-1, 8, 8)
        return jax.nn.softmax(predict(model, images))

    @eqx.filter_jit
    def step(model, state, images, labels):
        grads = eqx.filter_grad(cross_entropy)(model, images, labels)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state

    model, tx = VisionTransformer(jax.random.key(0)), optax.adamw(1e-3)
    state = tx.init(eqx.filter(model, eqx.is_array))
    rng, images = np.random.default_rng(0), (pixels - mean) / deviation
    for _ in range(steps):
        batch = rng.integers(len(labels) * 4 // 5, size=BATCH)  # a fifth is for asking
        shaped = images[batch].reshape(-1, 8, 8).astype(np.float32)
        model, state = step(model, state, shaped, labels[batch])

    shape = jax.export.symbolic_shape(f"images, {PIXELS}")
    example = jax.ShapeDtypeStruct(shape, np.float32)
    for dtype in ("float32", "bfloat16"):
        converted = convert(classify, model, example, amp_policy=f"p=f32,c={dtype}")
        converted.save(out / dtype)
        print(converted.summary)
    asked = slice(len(labels) * 4 // 5, None)
    return pixels[asked], labels[asked]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--serve", type=pathlib.Path, help="only serve this artifact")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path, default="examples/out/serve_digits")
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args.serve, args.port)

    images, labels = save_both(args.out, args.steps)
    table = Table(
        title=f"{args.requests} requests of 1 to 16 images, {args.clients} clients"
    )
    table.add_column("model")
    rows = {}
    for dtype in ("float32", "bfloat16"):
        folder = args.out / dtype
        with served(folder) as (url, pid):
            row = asyncio.run(ask(url, images, labels, args.requests, args.clients))
            row["server MiB"] = resident_mib(pid)
        size = sum(file.stat().st_size for file in folder.glob("parameters-*"))
        rows[dtype] = row | {"parameters KiB": size / 1024}
    for heading in rows["float32"]:
        table.add_column(heading, justify="right")
    for dtype, row in rows.items():
        table.add_row(dtype, *(f"{value:.1f}" for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
