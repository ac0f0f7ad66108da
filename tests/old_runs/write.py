"""Write the run folders and exports of one commit, which test_old_runs.py opens.

usage: python tests/old_runs/write.py CHECKOUT ROOT/COMMIT

CHECKOUT is a clean worktree of the commit (``git worktree add --detach CHECKOUT COMMIT``). Take a
neutral ROOT, such as /srv/mixerlab: old checkpoints record its path. Unpack old_runs.tar.xz there
to keep the other commits; then copy ROOT/old_runs.tar.xz beside this file. One archive has all
commits, as equal weights are stored once. For each commit it holds

- ``runs/<task>/<finished or unfinished>``; SIGTERM stopped the unfinished ones after step 1,
- ``exports/<target>``,
- ``answers.json``: predictions for ``image.png`` and outputs of the exports at that commit,
- ``targets.json``: every ``_target_`` in the commit's configs.

Networks are narrow (narrow.py). Finished parts are kept, so a failed call can be repeated.
"""

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCENES = ("data.num_train=6", "data.num_val=3", "data.scene_size=64", "data.batch_size=2",
          "head.group_norm=false")  # fmt: skip
NARROW_DETECTOR = (
    "++head.options={neck:{out_channels:16},rpn_head:{in_channels:16,feat_channels:16},"
    "roi_head:{bbox_roi_extractor:{out_channels:16},mask_roi_extractor:{out_channels:16},"
    "bbox_head:{in_channels:16,fc_out_channels:32},"
    "mask_head:{in_channels:16,num_convs:1,conv_out_channels:16}}}"
)
NARROW_SEGMENTOR = "++head.options={neck:{out_channels:16},decode_head:{in_channels:[16,16,16,16]}}"
CLASSIFIED = "runs/classification/finished"
# Of the finished runs classification's alone keeps its last checkpoint, which is the largest file.
TASKS = {
    "classification": (
        "backbone=deit_t_afbo", "backbone.patch_size=8", "data.batch_size=8",
        "data.digits_per_class=4", "data.train_copies=1",
    ),
    "transfer": (
        "backbone=deit_t_afbo", "backbone.patch_size=8", f"backbone.pretrained={CLASSIFIED}",
        "data.train_per_class=1", "data.val_per_class=1", "data.batch_size=20",
        "task.ema={decay: 0.5}",
    ),
    "detection": (
        "backbone=swin_t_afbo", *SCENES, "optimizer={name: sgd, lr: 0.01}",
        "head.num_rois=16", "head.num_proposals=30",
        NARROW_DETECTOR,
    ),
    "segmentation": (
        "backbone=swin_t_glu", "head=semantic_fpn", *SCENES, "head.channels=16", NARROW_SEGMENTOR,
    ),
}  # fmt: skip
STATES = {"finished": ("trainer.max_epochs=1",), "unfinished": ("trainer.max_epochs=2",)}
FROM_TASK = {"mmdet": "detection", "mmseg": "segmentation"}
SITES = {sysconfig.get_paths()[name] for name in ("purelib", "platlib", "stdlib")}
PRIVATE = re.compile(rb"/tmp/|/home/|/root/")


def in_a_process(function, *arguments) -> int:
    """Call a function in a process of its own and return the exit status."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def train(task: str, state: str) -> None:
    """Train one run with the checkout's command; its folder becomes ``runs/<task>/<state>``."""
    from narrow import narrow_timm
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from tools.run import main

    narrow_timm()
    if state == "unfinished":
        register_optimizer_step_post_hook(lambda *_: stop_training(task))
    typed = [f"task={task}", "trainer=cpu", "schedule.warmup=0", "logger=csv", *TASKS[task],
             *STATES[state], f"output_dir=runs/{task}/{state}-all"]  # fmt: skip
    sys.argv[1:] = typed
    sys.exit(main(typed))


def drop_large(run: Path) -> None:
    """Remove what no test reads: pictures, and checkpoints besides the best or the last."""
    shutil.rmtree(run / "preview", ignore_errors=True)
    (run / "curves.png").unlink(missing_ok=True)
    (run / "checkpoints" / "last.previous.ckpt").unlink(missing_ok=True)
    if run.name == "finished" and run.parent.name != "classification":
        (run / "checkpoints" / "last.ckpt").unlink()


def stop_training(task: str) -> None:
    """Send SIGTERM once the run has its folder: trial steps come before."""
    if any(Path("runs", task, "unfinished-all").rglob("run.lock")):
        os.kill(os.getpid(), signal.SIGTERM)


def write_runs() -> None:
    """Train all runs and leave each in its place."""
    expected = {"finished": 0, "unfinished": 128 + signal.SIGTERM}
    for run in (Path("runs", task, state) for task in TASKS for state in STATES):
        if run.exists():
            continue
        task, state = run.parts[1:]
        status = in_a_process(train, task, state)
        assert status == expected[state], (run, status)
        outputs = run.with_name(f"{state}-all")
        (folder,) = (path for path in outputs.glob("*/*/2*") if not path.is_symlink())
        folder.rename(run)
        shutil.rmtree(outputs)
        drop_large(run)


def export(target: str) -> None:
    """Export a finished run with the checkout's command."""
    from narrow import narrow_timm

    from tools import export
    from tools.exporters import standalone

    narrow_timm()
    to = target.removesuffix("_standalone")
    # The check of a standalone export runs in another process.
    narrow = f"sys.path.append({str(HERE)!r})\nimport narrow\nnarrow.narrow_timm()\n"
    standalone.CHECK = standalone.CHECK.replace("import torch\n", f"{narrow}import torch\n", 1)
    typed = [f"ckpt=runs/{FROM_TASK.get(to, 'classification')}/finished", f"to={to}",
             f"out=exports/{target}", "image_size=64"]  # fmt: skip
    if to in ("onnx", "torch_export"):
        typed.append("network=classifier")  # recording a graph takes half a minute
    if "standalone" in target:
        typed.append("standalone=true")
    sys.exit(export.main(typed))


def write_exports() -> None:
    """Export to every target."""
    from opening import OPENERS

    for target in OPENERS:
        if not Path("exports", target).exists():
            assert in_a_process(export, target) == 0, target


def draw_image() -> None:
    """Draw the picture on which predictions are compared."""
    import numpy as np
    from PIL import Image

    y, x = np.mgrid[:64, :64]
    pixels = np.stack([4 * x, 4 * y, 128 + 64 * np.sin(x / 5) + 63 * np.cos(y / 7)], axis=-1)
    Image.fromarray(pixels.astype("uint8")).save("image.png")


def answer() -> None:
    """Write what the commit predicts from its runs and exports, and its targets."""
    from narrow import narrow_timm

    narrow_timm()
    from opening import OPENERS, as_json

    from tasks import load

    answers: dict = {"runs": {}, "exports": {}}
    for task in TASKS:
        for state in STATES:
            file = {"finished": "best", "unfinished": "last"}[state]
            run = load(f"runs/{task}/{state}/checkpoints/{file}.ckpt")
            (prediction,) = run.predict("image.png")
            answers["runs"][f"{task}/{state}"] = prediction
    for target, opener in OPENERS.items():
        with contextlib.redirect_stdout(sys.stderr):
            outputs = opener(Path("exports", target).resolve())
        alone = "standalone" in target
        answers["exports"][target] = outputs if alone else json.loads(as_json(outputs))
    Path("answers.json").write_text(json.dumps(answers, default=lambda value: value.tolist()))


def list_targets(checkout: Path) -> None:
    """List every ``_target_`` in the commit's configs."""
    texts = [path.read_text() for path in sorted(Path(checkout, "configs").rglob("*.yaml"))]
    found = {name for text in texts for name in re.findall(r"_target_: ([\w.]+)", text)}
    Path("targets.json").write_text(json.dumps(sorted(found), indent=1) + "\n")


def strip_paths(checkout: Path) -> None:
    """Make the paths in the stack traces that exported graphs carry relative, in place."""
    import onnx

    roots = re.compile("|".join(re.escape(f"{root}/") for root in (checkout, *SITES)).encode())
    for path in Path("exports").rglob("*.onnx"):
        model = onnx.load(path)
        for node in (*model.graph.node, *(node for one in model.functions for node in one.node)):
            for entry in node.metadata_props:
                entry.value = roots.sub(b"", entry.value.encode()).decode()
        onnx.save(model, path)
    for path in Path("exports").rglob("*.pt2"):
        with zipfile.ZipFile(path) as file:
            members = {info: file.read(info) for info in file.infolist()}
        with zipfile.ZipFile(path, "w") as file:
            for info, content in members.items():
                file.writestr(info, roots.sub(b"", content))


def check_private() -> None:
    """Refuse files that name folders of the machine that wrote them."""
    files = [path for path in Path().rglob("*") if path.is_file()]
    found = {str(path): PRIVATE.findall(path.read_bytes()) for path in files}
    assert not any(found.values()), {path: names for path, names in found.items() if names}


def main(checkout: Path, folder: Path) -> None:
    """Write the folder of one commit, and the archive of all."""
    sys.path.insert(0, str(checkout))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["MIXERLAB_CACHE"] = str(folder.parent / "cache")
    with contextlib.chdir(folder):
        draw_image()
        write_runs()
        write_exports()
        strip_paths(checkout)
        assert in_a_process(answer) == 0
        list_targets(checkout)
        check_private()
        pack(folder.parent)


def pack(root: Path) -> None:
    """Write the archive of all commits in the folder."""
    with tarfile.open(root / "old_runs.tar.xz", "w:xz", preset=9) as file:
        for answers in sorted(root.glob("*/answers.json")):
            file.add(answers.parent, answers.parent.name, filter=nameless)


def nameless(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave the names of user and group out of the archive."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main(*(Path(word).resolve() for word in sys.argv[1:]))
