"""Export of a run to a model folder for the Hugging Face hub, and its upload.

``config.json`` and ``model.safetensors`` hold what ``tasks.load`` and ``create_backbone`` read of
``hf-hub:<owner>/<name>``; ``README.md`` is the card. Options that name files here stay out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from backbones.checkpoints.equations import RECORD
from backbones.checkpoints.hub import CONFIG, LOCAL, WEIGHTS
from backbones.checkpoints.seal import seal
from backbones.options import mixer_names
from backbones.registry import find_mixer, look_up
from tasks.engine.base import BaseTask
from tasks.engine.checkpoints.entries import BUILT
from tasks.engine.family import Family
from tasks.engine.loading import GROUPS, open_task
from tasks.engine.run_folder.saved_runs import file_options
from tasks.engine.run_folder.schemas import read_summary
from tools.cli.printable import counted
from tools.comparison.answers import read_answers
from tools.comparison.journal import Run
from tools.comparison.statistics import samples_interval
from tools.exports.requests import ExportRequest

CARD = "README.md"
KEPT = ("task_name", "seed", "keep_classifier", "protocol", "choices", *GROUPS)  # of a run's config
READ = ("backbone", "head", "data.tokenizer")  # whose files prediction reads
TEXT = """---
{header}---
# {title}

{subject}, trained by MixerLab {version}.

## Use

```python
import mixerlab{extra}

task = mixerlab.load("{source}")  # or "local-dir:<this folder>"
rows = task.predict({example})
backbone = mixerlab.create_backbone("{source}")  # plain PyTorch
```

The folder holds tensors and plain values: loading runs no code of it. `{source}@<commit>` is one
version.

## Data

{data}

## Metrics

{metrics}

## Size

{counts}

## Citation

Cite MixerLab and the sources of its parts:

{sources}

## Licence

{licence}: the licence of these weights, as their author chose it. The data may have their own.
"""
EXAMPLES = {"image": '"photo.jpg"', "low_resolution_image": '"photo.jpg"'}


def export(request: ExportRequest) -> list[Path]:
    """Write the folder, load it, compare all values, and push it if a name is given.

    Raises:
        ValueError: The checkpoint lacks a run, the network needs a file of this machine, or the
            loaded folder differs.
    """
    run, checkpoint = request.run, request.checkpoint
    if run is None or checkpoint is None or request.ckpt is None:
        raise ValueError("to=hub takes a trained run; pass ckpt=<run folder>")
    task = open_task(request.ckpt)
    config = _portable({key: run[key] for key in KEPT if key in run})
    # The data of a run decide some options, such as the number of words; a folder lacks data.
    decided = getattr(task.data, "backbone_arguments", {})
    config["backbone"] |= {k: v for k, v in decided.items() if k in config["backbone"]}
    config["backbone"]["pretrained"] = None
    entries = {RECORD: checkpoint.record, BUILT: config, **task.target_state()}
    if checkpoint.step is not None:
        entries["global_step"] = checkpoint.step
    entries = json.loads(json.dumps(entries))  # as a reader sees it, for the checksum
    tensors = {name: value.clone().contiguous() for name, value in checkpoint.tensors.items()}
    sealed = seal({"state_dict": dict(sorted(tensors.items())), **entries})
    del sealed["state_dict"]
    _write(request.folder, sealed, tensors)
    source = request.settings["repo"] or f"<owner>/{request.label}"
    card = _card(request, task.family, config, f"hf-hub:{source}")
    (request.folder / CARD).write_text(card, encoding="utf-8")
    _check(request.folder, task)
    if request.settings["repo"]:
        request.report(_push(request.folder, request.settings))
    else:
        request.report("push it by: hf upload <owner>/<name> <folder>, or repo=<owner>/<name>")
    return [request.folder / name for name in (CONFIG, WEIGHTS, CARD)]


def _portable(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without options that name files here, which then have their defaults.

    Raises:
        ValueError: Prediction reads such a file.
    """
    config = json.loads(json.dumps(config))
    for name in file_options(config):
        is_read = any(f"{name}.".startswith(f"{part}.") for part in READ)
        if is_read and name != "backbone.pretrained":
            raise ValueError(f"to=hub takes networks without files of their own; {name} names one")
        *parents, last = name.split(".")
        part = config
        for parent in parents:
            part = part[parent]
        part.pop(last, None)  # a list is named once per file
    return config


def _write(folder: Path, entries: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})
    text = json.dumps(entries, indent=1, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def _check(folder: Path, task: BaseTask) -> None:
    """Load the folder as a user does, and compare weights and targets.

    Raises:
        ValueError: A value differs.
    """
    opened = open_task(f"{LOCAL}{folder}")
    before, after = task.model.state_dict(), opened.model.state_dict()
    wrong = [name for name in before if not torch.equal(before[name], after.get(name))]
    if wrong or before.keys() != after.keys() or task.target_state() != opened.target_state():
        raise ValueError(f"the folder opens with other values ({wrong[:3]}); not exported")


def _card(request: ExportRequest, family: Family, config: Mapping[str, Any], source: str) -> str:
    """Return the model's card, from the summary of its run and the answers of its test."""
    assert request.ckpt is not None
    folder = Path(request.settings["test"] or request.ckpt.parent.parent)
    summary = read_summary(folder / "summary.json") if (folder / "summary.json").is_file() else {}
    data = str((config.get("choices") or {}).get("data") or config["data"]["_target_"])
    rows = _metrics(summary, folder, family)
    header: dict[str, Any] = {
        "library_name": "mixerlab",
        "license": request.settings["licence"],
        **({"pipeline_tag": family.hub_task} if family.hub_task else {}),
        "tags": ["mixerlab", family.name, request.backbone],
    }
    if rows and family.hub_task:
        header["model-index"] = [_index(request.label, family, data, rows)]
    parts = [look_up(config["backbone"]["name"])[0].source]
    names = [look_up(config["backbone"]["name"])[1]]
    for kind in ("mixer", "token_mixer"):
        names += mixer_names(config["backbone"].get(kind))
    parts += [f"{name}: {find_mixer(name).source}" for name in dict.fromkeys(filter(None, names))]
    return TEXT.format(
        header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True),
        title=request.label,
        subject=f"A network of task={family.name}, `{request.label}`",
        version=version("mixerlab"),
        extra='  # pip install "mixerlab[dense]"' if family.needs else "",
        source=source,
        example=EXAMPLES.get(family.modality, "inputs"),
        data=_describe_data(data, summary, family),
        metrics=_table(rows),
        counts=_describe_counts(summary),
        sources="\n".join(f"- {part}" for part in parts),
        licence=request.settings["licence"],
    )


def _metrics(
    summary: Mapping[str, Any], folder: Path, family: Family
) -> list[tuple[str, float, str]]:
    """Return name, value and 95 % interval of each metric."""
    rows = []
    for name, value in (summary.get("metrics") or {}).items():
        run = Run(
            stage="final", mixer="", host="", data="", seed=0, factor=1, folder=str(folder),
            value=value,
        )  # fmt: skip
        answers = read_answers([run], name) if name == family.answers else None
        ends = samples_interval([value], answers) if answers is not None else None
        rows.append((name, value, "{:.4g} to {:.4g}".format(*ends) if ends else ""))
    return rows


def _table(rows: list[tuple[str, float, str]]) -> str:
    if not rows:
        return "The run kept no summary."
    lines = ["| metric | value | 95 % interval |", "| --- | --- | --- |"]
    lines += [f"| {name} | {value:.4g} | {ends} |" for name, value, ends in rows]
    note = "Intervals are of the test samples, by resampling them; the seed of the training is one."
    return "\n".join(lines) + (f"\n\n{note}" if any(ends for *_, ends in rows) else "")


def _index(
    label: str, family: Family, data: str, rows: list[tuple[str, float, str]]
) -> dict[str, Any]:
    metrics = [{"type": name, "value": round(value, 6)} for name, value, _ in rows]
    result = {"task": {"type": family.hub_task}, "dataset": {"name": data, "type": data}}
    return {"name": label, "results": [{**result, "metrics": metrics}]}


def _describe_data(data: str, summary: Mapping[str, Any], family: Family) -> str:
    facts = summary.get("data") or {}
    sizes = [
        f"{counted(count, family.unit.removesuffix('s'))} in {part}"
        for part, count in (facts.get("samples") or {}).items()
        if count
    ]
    classes = f"; {facts['classes']} classes" if facts.get("classes") else ""
    prints = [f"{name} `{value}`" for name, value in (facts.get("fingerprints") or {}).items()]
    text = f"`data={data}`: {', '.join(sizes) or 'of unrecorded size'}{classes}."
    return text + (f" Fingerprints: {', '.join(prints)}." if prints else "")


def _describe_counts(summary: Mapping[str, Any]) -> str:
    if not summary:
        return "Unrecorded."
    size = " x ".join(map(str, summary["macs_at"]))
    return (
        f"{summary['parameters']:,.0f} parameters; the backbone has "
        f"{summary['backbone_macs']:,.0f} multiply-adds at {size}."
    )


def _push(folder: Path, settings: Mapping[str, str]) -> str:
    """Upload the folder and return where it is, or how to upload it later."""
    import huggingface_hub

    repo = settings["repo"]
    try:
        api = huggingface_hub.HfApi()
        api.create_repo(repo, exist_ok=True, private=settings["private"] == "true")
        commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="MixerLab")
    except Exception as error:  # also of the transport, which differs between releases
        reason = " ".join(str(error).split())[:120]
        return f"not pushed ({reason}); type hf auth login, then hf upload {repo} <folder>"
    return f"pushed to {commit.commit_url}"
