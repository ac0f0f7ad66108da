"""Measure published weights on ImageNet's validation images, beside their published accuracy.

usage: python tools/verify.py data=FOLDER weights=FOLDER [key=value ...]

  data=FOLDER        ImageNet, or its validation images: [val/]<synset>/*.JPEG
  weights=FOLDER     the files: swin_tiny_patch4_window7_224*, poolformer_s12*,
                     deit_tiny_patch16_224* (default: weights)
  network=NAME,NAME  some of swin_t, poolformer_s12, deit_t (default: all)
  out=FOLDER         gets the run folders (default: outputs)
  ...                any option of tools/run.py, such as trainer=gpu or data.num_workers=16

Images are prepared as in timm's table of results: shorter side 249, bicubic, central 224. Each
network is one run of tools/run.py mode=test; the command ends with an error if a top-1 accuracy
differs by more than 0.1 points.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# As a script, Python only finds modules in tools/; the packages are one level up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cli.arguments import parse_options
from tools.cli.command import exit_with, run_command
from tools.cli.paths import ROOT

DEFAULTS = {"data": "", "weights": "weights", "network": "", "out": "outputs"}
CROP = 0.9
TOLERANCE = 0.1  # points: libraries decode and resize JPEGs differently
CHANCE = 1.0  # %: below it the order of the classes is wrong


@dataclass(frozen=True)
class Published:
    """Published weights.

    Attributes:
        stem: Beginning of the file's name.
        url: Where its authors publish it.
        top1: Top-1 accuracy in %.

    Source: results/results-imagenet.csv of huggingface/pytorch-image-models.
    """

    stem: str
    url: str
    top1: float


NETWORKS = {
    "swin_t": Published(
        "swin_tiny_patch4_window7_224",
        "https://github.com/SwinTransformer/storage/releases/download/v1.0.0/"
        "swin_tiny_patch4_window7_224.pth",
        81.376,
    ),
    "poolformer_s12": Published(
        "poolformer_s12",
        "https://github.com/sail-sg/poolformer/releases/download/v1.0/poolformer_s12.pth.tar",
        77.234,
    ),
    "deit_t": Published(
        "deit_tiny_patch16_224",
        "https://dl.fbaipublicfiles.com/deit/deit_tiny_patch16_224-a1311bcf.pth",
        72.172,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error."""
    return run_command("verify.py", __doc__, verify, arguments, needs_arguments=True)


def verify(arguments: Sequence[str]) -> None:
    """Measure the networks one after the other, and print ours beside the published figures.

    Raises:
        ValueError: An option is wrong, a file is missing or holds another network, or an accuracy
            differs.
    """
    from datamodules.files import require_folder
    from tools.cli.tables import write

    settings = [word for word in arguments if word.partition("=")[0] in DEFAULTS]
    more = [word for word in arguments if word not in settings]
    options = parse_options(settings, DEFAULTS, {})
    if not options["data"]:
        raise ValueError("data=FOLDER is missing; see --help")
    root, weights = (Path(options[key]).expanduser() for key in ("data", "weights"))
    require_folder(root, "pass ImageNet's folder as data=")
    names = options["network"].split(",") if options["network"] else [*NETWORKS]
    strays = [name for name in names if name not in NETWORKS]
    if strays:
        raise ValueError(f"network must be among {', '.join(NETWORKS)}; got {strays[0]!r}")
    files = {name: find_file(weights, name) for name in names}
    records, differing = [], []
    for name, file in files.items():
        words = [f"backbone={name}", f"ckpt={file}", f"data.roots.imagenet={root}"]
        top1 = measure(name, [*words, f"output_dir={options['out']}", *more])
        published = NETWORKS[name].top1
        records.append(
            {"network": name, "file": file.name, "published": published, "ours": top1,
             "verdict": judge(top1, published)}
        )  # fmt: skip
        if abs(top1 - published) > TOLERANCE:
            differing.append(f"{name} {judge(top1, published)}")
    columns = {key: (key, "{}") for key in ("network", "file", "published", "ours", "verdict")}
    write(records, "table", columns | {"ours": ("ours", "{:.3f}")})
    if differing:
        raise ValueError("; ".join(differing))


def find_file(folder: Path, name: str) -> Path:
    """Return the file of a network's weights.

    Raises:
        FileNotFoundError: The folder lacks it.
        ValueError: Several files have its name.
    """
    published = NETWORKS[name]
    files = sorted(folder.glob(f"{published.stem}*"))
    if not files:
        raise FileNotFoundError(
            f"{folder} lacks the weights of {name}; put {published.url} there, or pass weights= or "
            "network="
        )
    if len(files) > 1:
        listing = " and ".join(file.name for file in files)
        raise ValueError(f"{folder} holds {listing}; keep the file of {name} alone")
    return files[0]


def measure(name: str, words: Sequence[str]) -> float:
    """Return the top-1 accuracy in % that a run of tools/run.py measures.

    Raises:
        ValueError: The run failed; the text is its error.
    """
    from tasks.engine.run_folder.schemas import read_summary

    usual = ["mode=test", "task=classification", "data=robustness", "data.sets=[imagenet]"]
    command = [sys.executable, str(ROOT / "tools" / "run.py"), *usual, f"data.crop_pct={CROP}"]
    process = subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(last, end="", flush=True)
        last = line
    if process.wait():
        raise ValueError(f"{name}: {last.strip().removeprefix('error: ')}")
    folder = Path(last.strip().removeprefix("Run folder: "))
    return float(read_summary(folder / "summary.json")["metrics"]["top1"])


def judge(top1: float, published: float) -> str:
    """Return the verdict on an accuracy in %."""
    if abs(top1 - published) <= TOLERANCE:
        return "agrees"
    if top1 < CHANCE:
        return (
            f"has {top1:.3f} % instead of {published} %, as by chance: the weights are untrained "
            "or number the classes differently, or the images lie in other classes' folders"
        )
    return f"differs by {top1 - published:+.3f} points"


if __name__ == "__main__":
    exit_with(main, writes_files=True)
