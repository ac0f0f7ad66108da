"""Model folders of others: ``config.json`` and ``model.safetensors``, on the hub or on this disk.

``hf-hub:owner/name@revision`` is fetched from the Hugging Face hub (HF_ENDPOINT) into its cache;
``local-dir:FOLDER`` is a folder here. Both files are data: no pickle is opened, no code is run.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbones.checkpoints.equations import RECORD

HUB, LOCAL = "hf-hub:", "local-dir:"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
MOST_BYTES = 2**24  # of a config
FORM = re.compile(r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ModelFolder:
    """A folder with ``config.json`` and ``model.safetensors``.

    Attributes:
        source: Name under which exactly these files open again: with the commit, or the full path.
        weights: The file of weights.
    """

    source: str
    weights: Path


def is_model_source(path: str | Path) -> bool:
    """Return True for ``hf-hub:...`` and ``local-dir:...``."""
    return str(path).startswith((HUB, LOCAL))


@functools.cache
def open_model_folder(source: str) -> ModelFolder:
    """Return the folder of a source; a process fetches each source once and prints its commit.

    Raises:
        ValueError: The source has another form, a file is missing, or the hub is out of reach.
    """
    if source.startswith(LOCAL):
        folder = Path(source.removeprefix(LOCAL)).expanduser().absolute()
        if not (folder / WEIGHTS).is_file():
            raise ValueError(f"{source} lacks {WEIGHTS}; pass a folder made by export.py to=hub")
        return ModelFolder(f"{LOCAL}{folder}", folder / WEIGHTS)
    form = FORM.fullmatch(source.removeprefix(HUB))
    if form is None:
        raise ValueError(f"{source} must be {HUB}owner/name or {HUB}owner/name@revision")
    repo, revision = form["repo"], form["revision"]
    config = _fetch(source, repo, CONFIG, revision)
    commit = config.parent.name
    weights = _fetch(source, repo, WEIGHTS, commit)
    pinned = f"{HUB}{repo}@{commit}"
    if revision != commit:
        print(f"{source} is {pinned}", file=sys.stderr)
    return ModelFolder(pinned, weights)


def _fetch(source: str, repo: str, name: str, revision: str | None) -> Path:
    """Return a file of the hub in its cache, ``.../snapshots/<commit>/<name>``."""
    import huggingface_hub

    try:
        with quick_offline():
            return Path(huggingface_hub.hf_hub_download(repo, name, revision=revision))
    except Exception as error:  # also of the transport, which differs between releases
        where = huggingface_hub.constants.ENDPOINT
        raise ValueError(
            f"{name} of {source} could not be fetched from {where} ({type(error).__name__}); check "
            f"the name and the network, type `hf auth login` for a private model, or download the "
            f"folder elsewhere and pass {LOCAL}<folder>"
        ) from error


@contextmanager
def quick_offline() -> Iterator[None]:
    """Read the hub's cache alone while its server is out of reach, as a context manager.

    Otherwise each file is tried six times, with 31 seconds of waiting and a warning per try.
    """
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    try:
        if not before:
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # as above
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def read_entries(weights: Path) -> dict[str, Any]:
    """Return the entries of a checkpoint that the ``config.json`` beside its weights holds.

    Other tools' files of this name lack it.

    Raises:
        ValueError: The file is too large, or not JSON.
    """
    file = weights.with_name(CONFIG)
    if weights.name != WEIGHTS or not file.is_file():
        return {}
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(f"{file} cannot be read ({reason})") from error
    is_ours = isinstance(content, Mapping) and isinstance(content.get(RECORD), Mapping)
    return dict(content) if is_ours else {}


def backbone_options(source: str) -> dict[str, Any]:
    """Return the name and options of the backbone of a source, for ``create_backbone``.

    Raises:
        ValueError: The folder describes no backbone of ours.
    """
    folder = open_model_folder(source)
    config = read_entries(folder.weights).get("config")
    options = config.get("backbone") if isinstance(config, Mapping) else None
    if not isinstance(options, Mapping) or not isinstance(options.get("name"), str):
        raise ValueError(
            f"{folder.source} was not made by export.py to=hub; name its backbone and pass its "
            f"weights: create_backbone(NAME, pretrained={source!r})"
        )
    if is_model_source(options["name"]):
        raise ValueError(f"{folder.source} names another model, {options['name'][:80]}")
    return {**options, "pretrained": folder.source}
