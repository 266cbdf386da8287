"""A folder that holds one artifact, which is written whole or not at all.

Files are named by what is in them and never overwritten; a manifest says which belong
together, how long they are and what SHA-256 they have. The manifest alone is replaced,
in one step. So whenever writing ends, the folder holds the new artifact or what it held
before: the old artifact or none. A reader reads each file once. It checks the bytes
against the manifest, and the manifest against the digest that it carries. Only bytes
that were checked are used, and none of them are unpickled."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import AmpError

FORMAT = 1
KIND = "jaxamp_like artifact"
MANIFEST = "manifest.json"
SUFFIXES = {"program": "jax_export", "parameters": "safetensors"}

_OURS = re.compile(
    r"manifest\.json|(program-[0-9a-f]{16}\.jax_export"
    r"|parameters-[0-9a-f]{16}\.safetensors)|\.new-[0-9a-f]{16}"
)
_LARGEST_MANIFEST = 2**28


class ArtifactError(AmpError):
    """An artifact can't be used here, or must not be; the message says why."""


class Opened(NamedTuple):
    """An artifact whose files are what its manifest says.

    Args:
        manifest: the manifest as data.
        digest: the SHA-256 of the manifest, which stands for all of the artifact.
        files: by role, the content of each file that was asked for. These are the bytes
            that were checked; no file is read again."""

    manifest: dict[str, Any]
    digest: str
    files: dict[str, bytes]


def write_folder(
    path: str | Path,
    manifest: Mapping[str, Any],
    writers: Mapping[str, Callable[[Path], object]],
) -> str:
    """Writes an artifact; returns its digest.

    Args:
        path: the folder; one that holds an artifact gets the new one in its place.
        manifest: what is to be known of the artifact, as data for JSON.
        writers: for each role, a function that writes the file at a path.
    Raises:
        OSError: the folder can't be written to, or holds something else."""
    folder = Path(path)
    _check_is_ours(folder)
    if not folder.exists():
        folder.mkdir(parents=True)
        _sync(folder.parent)
    with _alone(folder):
        before = _names(folder)
        try:
            files = {role: _add(folder, role, write) for role, write in writers.items()}
            whole = {**manifest, "format": FORMAT, "kind": KIND, "files": files}
            data = _encoded(whole)
            new = _new(folder)
            new.write_bytes(data)
            _sync(new)
            _sync(folder)  # files get their names before the manifest refers to them
            os.replace(new, folder / MANIFEST)
        except (Exception, KeyboardInterrupt):
            _remove_others(folder, before)
            raise
        _sync(folder)
        _remove_others(folder, {MANIFEST, *(file["name"] for file in files.values())})
    return hashlib.sha256(data).hexdigest()


def open_folder(
    path: str | Path, digest: str | None = None, keep: Collection[str] = tuple(SUFFIXES)
) -> Opened:
    """Reads an artifact and checks all of it, each file once.

    Args:
        path: the folder.
        digest: the digest that the manifest must have, if any.
        keep: the roles of the files whose bytes are wanted.
    Raises:
        ArtifactError: there is no artifact, or it is not as it was written."""
    folder = Path(path)
    for _ in range(5):
        data = _read_manifest(folder)
        try:
            return _checked(folder, data, digest, keep)
        except FileNotFoundError as e:
            # Another process may have put a new artifact in its place meanwhile.
            if _read_manifest(folder) == data:
                raise _damaged(folder, f"{e.filename} is missing") from None
    raise ArtifactError(f"{folder} is written to again and again: load a copy of it.")


@contextlib.contextmanager
def well_formed(path: str | Path) -> Iterator[None]:
    """Makes an `ArtifactError` of the errors that reading a manifest raises inside.

    Its digest fits, but anyone may have written it."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
        raise ArtifactError(
            f"The artifact in {path} is malformed ({type(e).__name__}: {e}). Save it "
            "again."
        ) from e


def _check_is_ours(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(
            f"`path` must be a folder for the artifact, but {folder} is a file."
        )
    others = [p.name for p in folder.iterdir() if not _OURS.fullmatch(p.name)]
    if others:
        raise FileExistsError(
            f"`path` must be a new folder or one that holds an artifact, but {folder} "
            f"holds {', '.join(sorted(others)[:4])}."
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps a second writer out of a folder, since each removes the files of others.

    The lock is released when its process ends, however it ends."""
    if os.name == "nt":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"Somebody else is saving to {folder} right now. Save to another "
                "folder, or again later."
            ) from None
        except OSError as e:
            if e.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)


# Errors of file systems without locks, on which a folder is written without a lock.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def _new(folder: Path) -> Path:
    return folder / f".new-{secrets.token_hex(8)}"


def _add(folder: Path, role: str, write: Callable[[Path], object]) -> dict[str, Any]:
    """Writes one file, and names it by its role and a hash of its content."""
    new = _new(folder)
    write(new)
    _sync(new)
    sha, size = _hash(new)
    name = f"{role}-{sha[:16]}.{SUFFIXES[role]}"
    os.replace(new, folder / name)
    return {"name": name, "bytes": size, "sha256": sha}


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _names(folder: Path) -> set[str]:
    """The files of the artifact in a folder; all files, if the manifest is damaged."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"].values()
        return {MANIFEST, *(file["name"] for file in files)}
    except FileNotFoundError:
        return set()
    except (ValueError, TypeError, KeyError, AttributeError):
        return {path.name for path in folder.iterdir()}


def _remove_others(folder: Path, names: set[str]) -> None:
    for path in folder.iterdir():
        if path.name not in names and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _hash(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        sha = hashlib.file_digest(file, "sha256").hexdigest()
        return sha, file.tell()


def _encoded(manifest: Mapping[str, Any]) -> bytes:
    """A manifest as bytes, with its own SHA-256: equal data give equal bytes."""
    bare = {key: value for key, value in manifest.items() if key != "sha256"}
    sha = hashlib.sha256(_json(bare)).hexdigest()
    return _json({**bare, "sha256": sha})


def _json(data: Any) -> bytes:
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _read_manifest(folder: Path) -> bytes:
    try:
        with _opened(folder / MANIFEST) as file:
            data = file.read(_LARGEST_MANIFEST + 1)
    except (FileNotFoundError, NotADirectoryError):
        instead = "Give the folder that `Converted.save` wrote."
        if any(folder.glob("*_METADATA")):  # as Orbax writes
            instead = (
                "It is a checkpoint, as `save_parameters` writes: "
                "`converted.load_parameters(path)` reads it. `load` reads what "
                "`Converted.save` wrote."
            )
        raise ArtifactError(
            f"There is no artifact in {folder}: it has no {MANIFEST}. {instead}"
        ) from None
    if len(data) > _LARGEST_MANIFEST:
        raise _damaged(folder, f"{MANIFEST} has more than {_LARGEST_MANIFEST} bytes")
    return data


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """Opens a plain file: no link to a file elsewhere, and no pipe, which may block."""
    kind = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | kind))
    except OSError as e:
        if isinstance(e, FileNotFoundError | NotADirectoryError | PermissionError):
            raise
        raise _damaged(path.parent, f"{path.name} is no plain file") from e
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _damaged(path.parent, f"{path.name} is no plain file")
        yield file


def _checked(
    folder: Path, data: bytes, digest: str | None, keep: Collection[str]
) -> Opened:
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise _damaged(folder, f"{MANIFEST} is no JSON ({e})") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise ArtifactError(
            f"{folder} holds no artifact of this library: its {MANIFEST} is of another "
            "kind."
        )
    written = manifest.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise ArtifactError(
            f"The artifact in {folder} has format {written}; this version reads up to "
            f"{FORMAT}. Update jaxamp_like, or save it again with this version."
        )
    if written != FORMAT or data != _encoded(manifest):
        raise _damaged(folder, f"{MANIFEST} is not as it was written")
    found = hashlib.sha256(data).hexdigest()
    if digest is not None and digest != found:
        raise ArtifactError(
            f"The artifact in {folder} is whole, but it is another one: its digest is "
            f"{found}, and not `digest`, {digest}. If it was saved again since, give "
            "what that `save` returned; if not, it is not the one that you saved."
        )
    files = {
        role: _checked_file(folder, role, manifest["files"], role in keep)
        for role in SUFFIXES
    }
    return Opened(manifest, found, {role: files[role] for role in keep})


def _checked_file(folder: Path, role: str, files: Any, is_kept: bool) -> bytes:
    """The content of a file, after a check; nothing, unless it `is_kept`."""
    # The manifest may have been written by anyone, with a digest that fits.
    entry = files.get(role) if isinstance(files, dict) else None
    name = entry.get("name") if isinstance(entry, dict) else None
    pattern = rf"{role}-[0-9a-f]{{16}}\.{SUFFIXES[role]}"
    if entry is None or not isinstance(name, str) or not re.fullmatch(pattern, name):
        raise _damaged(folder, f"the name of its {role} is {name!r}")
    with _opened(folder / name) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(size) if is_kept and size == entry.get("bytes") else b""
        sha = hashlib.sha256(data) if data else hashlib.file_digest(file, "sha256")
    if (sha.hexdigest(), size) != (entry.get("sha256"), entry.get("bytes")):
        raise _damaged(folder, f"{name} is not as it was written")
    return data


def _damaged(folder: Path, what: str) -> ArtifactError:
    return ArtifactError(
        f"The artifact in {folder} is damaged: {what}. Copy it again from where it was "
        "saved, or save it again."
    )
