"""The command line: `convert`, `explain`, `inspect` and `check`.

Its exit status is 0 if all is done, 1 if the model or the artifact is refused (the
reason is on stderr), and 2 if it was called wrongly."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

from .._errors import how_to_install

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from typer.core import TyperGroup
except ImportError as e:
    package = (e.name or "typer").partition(".")[0]
    how = how_to_install(package, "convert")
    sys.exit(f"The command line needs {package}, which is not installed. {how}")

from .._certify import lock as locks
from .._certify.certify import certify
from .._errors import AmpError
from .._policies.settings import global_policy
from .._reports import explain as explain_fn
from .._reports.data.units import human_bytes
from .._suggestions import did_you_mean
from . import summary as summaries
from .artifact import explained, short
from .convert import convert as convert_fn
from .factories import WrongTarget, made, users_traceback
from .folder import open_folder, well_formed
from .models import take_apart
from .printable import printable
from .progress import showing

_FACTORIES = """\b
MODULE:FACTORY names a function of a Python file, here models.py in this folder:
  def digits(): return fn, params, x         # for convert and explain
  def training(): return step, state, batch  # for check
fn(params, x) and step(state, batch) are what is looked at."""
_EXAMPLES = {
    "explain": "models:digits --compute-dtype bfloat16",
    "convert": "models:digits -o digits --compute-dtype bfloat16",
    "inspect": "digits",
    "check": "models:training precision.lock --write",
}


def _example(*commands: str) -> str:
    """The end of a help text: how commands are called."""
    lines = [f"  python -m jaxamp_like {name} {_EXAMPLES[name]}" for name in commands]
    return "\n".join(["\b", f"Example{'s' * (len(lines) > 1)}:", *lines])


class _Commands(TyperGroup):
    """The commands; an unknown one is told with those that there are."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0] not in known:
            hint = did_you_mean(args[0], known)
            _wrong(
                f"There is no command {args[0]!r}.{hint} The commands are "
                f"{', '.join(known)}: `python -m jaxamp_like --help` shows each."
            )
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="Mixed precision for JAX, from a shell: see which precision a model or a "
    "training step runs in, convert a trained model, and fail a build when precision "
    "changes.",
    epilog=f"{_FACTORIES}\n\n{_example(*_EXAMPLES)}\n\n"
    "`python -m jaxamp_like COMMAND --help` tells the options of a command.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_REFUSED, _WRONG = 1, 2

Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help="A function without arguments, or a tuple: (fn, params, *example_inputs), "
        "as `jaxamp_like.convert` takes them.",
    ),
]
ComputeDtype = Annotated[
    str | None, typer.Option(help="What contractions compute in, such as bfloat16.")
]
PolicyName = Annotated[
    str | None,
    typer.Option("--policy", help="The name of a policy, such as mixed_bfloat16."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Html = Annotated[Path | None, typer.Option(help="Also write a page to this file.")]
TargetOps = Annotated[
    list[str], typer.Option("--target-op", help="An op that runs in low precision.")
]
Float32Ops = Annotated[
    list[str], typer.Option("--float32-op", help="An op that runs as written.")
]
WidestOps = Annotated[
    list[str], typer.Option("--widest-op", help="An op that runs in its widest input.")
]
ConditionalOps = Annotated[
    list[str],
    typer.Option(
        "--conditional-float32-op",
        metavar="OP:PARAMETER=VALUE",
        help="An op that runs as written where its parameter has this value, as JSON, "
        "such as integer_pow:y=3.",
    ),
]
Excluded = Annotated[
    list[str],
    typer.Option("--excluded-scope", help="A scope in which all runs as written."),
]
Kept = Annotated[
    list[str],
    typer.Option("--keep-input", help="The path of a parameter to store as it is."),
]


def main() -> None:
    """Runs the command line.

    An error of the user's own code ends it with a traceback of that code alone, and a
    refusal with its message."""
    try:
        app()
    except Exception as e:
        told = users_traceback(e)
        if told is None and not isinstance(e, _REFUSALS):
            raise  # a fault of this package, of which every frame is wanted
        told = told or f"{type(e).__name__}: {e}"
        lines = told.rstrip("\n").split("\n")
        print("\n".join(printable(lines)), file=sys.stderr)
        sys.exit(_REFUSED)


_REFUSALS = AmpError, TypeError, ValueError, OSError, ImportError


@app.callback()
def without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(epilog=_example("convert"))
def convert(
    model: Target,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder for the artifact.")
    ],
    compute_dtype: ComputeDtype = None,
    policy: PolicyName = None,
    target_op: TargetOps = [],  # noqa: B006
    float32_op: Float32Ops = [],  # noqa: B006
    widest_op: WidestOps = [],  # noqa: B006
    conditional_float32_op: ConditionalOps = [],  # noqa: B006
    excluded_scope: Excluded = [],  # noqa: B006
    keep_input: Kept = [],  # noqa: B006
    cast_params: Annotated[
        bool, typer.Option(help="Store parameters in the dtypes that they are read in.")
    ] = True,
    platform: Annotated[
        list[str], typer.Option(help="Where it is to run: cpu, cuda, rocm, tpu.")
    ] = [],  # noqa: B006
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Converts a model and saves it as an artifact."""
    conditions = [_condition(text) for text in conditional_float32_op]
    fn, params, *inputs = _made(model)
    with _bar():
        converted = convert_fn(
            fn,
            params,
            *inputs,
            compute_dtype=compute_dtype,
            amp_policy=policy,
            target_ops=target_op,
            float32_ops=float32_op,
            widest_ops=widest_op,
            conditional_float32_ops=conditions,
            excluded_scopes=excluded_scope,
            keep_inputs=keep_input,
            cast_params=cast_params,
        )
        digest = converted.save(output, platforms=platform or None)
    summary = converted.summary
    if html is not None:
        summary.save_html(html)
    if as_json:
        _print_json({"path": str(output), "digest": digest} | summary.to_dict())
        return
    summary.print()
    print(f"Saved to {output}, digest {digest}")


@app.command(epilog=_example("explain"))
def explain(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY or ARTIFACT",
            help="What `convert` takes, or the folder of an artifact.",
        ),
    ],
    compute_dtype: ComputeDtype = None,
    policy: PolicyName = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Tells the precision of each contraction; runs nothing."""
    if Path(model).is_dir():
        if compute_dtype is not None or policy is not None:
            _wrong("An artifact has its precision already: leave out the policy.")
        opened = open_folder(model, keep=())
        with well_formed(model):
            summary = summaries.from_dict(printable(opened.manifest["summary"]))
        if html is not None:
            summary.save_html(html)
        if as_json:
            _print_json([one._asdict() for one in summary.contractions])
        else:
            print(explained(summary))
        return
    fn, params, *inputs = _made(model)
    apart = take_apart(fn, params)
    # Without options the global policy holds, as it does for `convert`.
    explained_fn = explain_fn(
        apart.call,
        compute_dtype=compute_dtype,
        amp_policy=global_policy() if compute_dtype is policy is None else policy,
    )
    report = explained_fn(apart.params, *inputs)
    if html is not None:
        report.save_html(html)
    if as_json:
        print(report.to_json())
    else:
        report.print()


@app.command(epilog=_example("inspect"))
def inspect(
    artifact: Annotated[Path, typer.Argument(help="The folder of an artifact.")],
    digest: Annotated[
        str | None, typer.Option(help="What `convert` printed, to be compared.")
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Checks an artifact, and tells what is in it."""
    opened = open_folder(artifact, digest, keep=())
    manifest = printable(opened.manifest)
    with well_formed(artifact):
        summary = summaries.from_dict(manifest["summary"])
        inputs = [short(type_) for type_ in manifest["input_types"]]
        wrote = ", ".join(f"{k} {v}" for k, v in manifest["written_by"].items())
    if html is not None:
        summary.save_html(html)
    if as_json:
        _print_json({"digest": opened.digest} | opened.manifest)
        return
    size = sum(file["bytes"] for file in manifest["files"].values())
    print(f"{summary.name}: whole, {human_bytes(size)}, format {manifest['format']}")
    print(f"digest    {opened.digest}")
    print(f"platforms {', '.join(manifest['platforms'])}")
    print(f"inputs    {', '.join(inputs)}")
    print(f"written   {wrote}")
    print(summary)
    Console().print(summaries.contraction_table(summary))


@app.command(epilog=_example("check"))
def check(
    step: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="A tuple: (step, *arguments), a training step or model and what to "
            "call it with; or a function without arguments that returns it.",
        ),
    ],
    lock: Annotated[Path, typer.Argument(help="The lock file.")],
    write: Annotated[
        bool, typer.Option("--write", help="Write the lock file anew.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="What to compile for, such as h200 or v5e. It need not be there. "
            "Without it, JAX's default device."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compiles a step, and compares its precision with a lock file."""
    made = _made(step, "(step, *arguments)", least=1)
    if not write:
        locks.read(lock)  # raises before anything is compiled
    certificate = certify(*made, device=device)
    if write:
        certificate.save(lock)
    if as_json:
        print(certificate.to_json(1))
    else:
        print(certificate)
    certificate.check(lock)
    if not as_json:
        print(f"Wrote {lock}" if write else f"The precision is that of {lock}")


def _made(
    target: str, form: str = "(fn, params, *example_inputs)", least: int = 2
) -> tuple[Any, ...]:
    try:
        return made(target, form, least)
    except WrongTarget as e:
        _wrong(str(e))


def _condition(text: str) -> tuple[str, str, list[Any]]:
    """An op, its parameter and its value, as `convert` takes them."""
    left, equals, value = text.partition("=")
    op, colon, parameter = left.partition(":")
    if not (equals and colon and op and parameter):
        _wrong(f"Write OP:PARAMETER=VALUE, such as integer_pow:y=3, but got {text!r}.")
    try:
        found = json.loads(value)
    except ValueError:
        _wrong(f'The value in {text!r} must be JSON: 3, [0, 1], null or "text".')
    return op, parameter, [tuple(found) if isinstance(found, list) else found]


def _wrong(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise typer.Exit(_WRONG)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))


@contextlib.contextmanager
def _bar() -> Iterator[None]:
    """A progress bar on stderr for models of many parameters."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    try:
        with showing(progress):
            yield
    finally:
        if progress.tasks:  # to stop a bar that was not shown would print a line
            progress.stop()
