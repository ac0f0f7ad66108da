"""Of Hydra's own options only launchers with plain options are allowed."""

import pytest

from tests.errors import refuses
from tools.config.hydra_options import check_hydra
from tools.config.name_checks import check_names

TARGET = "{x:{_target_:torch.hub.load}}"


REFUSED = [
    "--experimental-rerun=job.pickle", "--experimental-rerun job.pickle", "--exp=job.pickle",
    "--config-dir=/tmp", "-cd /tmp", "-cd/tmp", "--config-path=/tmp", "--config-name=x",
    "-cn x", "-mcd /tmp", f"hydra.callbacks={TARGET}", f"+hydra.callbacks={TARGET}",
    "++hydra.callbacks.x._target_=shutil.make_archive", f"hydra={{callbacks:{TARGET}}}",
    " hydra.callbacks.x._target_=io.open", "~hydra.callbacks", "hydra/callbacks=x",
    "hydra.launcher._target_=os.system", "hydra.launcher={_target_:os.system}",
    "hydra.launcher.setup=[ls]", "hydra.launcher.submitit_folder=/tmp",
    "hydra.launcher.temp_folder=/tmp", "hydra.launcher.name=${oc.env:HOME}",
    "hydra.launcher.comment='a; b'", "hydra/launcher=basic,joblib", "+hydra/launcher=joblib",
    "hydra.sweeper._target_=os.system", "hydra/sweeper=basic", "hydra/sweeper@x=basic",
    "hydra/job_logging=none", "hydra.job_logging.handlers.x.class=os.system",
    "hydra.hydra_logging.root.x=1", "hydra.job.env_set.LD_PRELOAD=/x", "hydra.verbose=[a]",
    "hydra.searchpath=[file:///tmp]", "hydra.run.dir=/tmp", "hydra.sweep.dir=/tmp",
    "data@hydra.callbacks=coco", "hydra/help=x",
]  # fmt: skip
PLAIN = [
    "hydra/launcher=basic", "hydra.launcher.n_jobs=2", "hydra.launcher.mem_gb=16",
    "hydra.launcher.gres=gpu:4", "hydra.launcher.partition=null", "hydra.verbose=true",
    "hydra.launcher.constraint='a100|h100'", "data.root=/data/hydra", "+task.hydra=1",
]  # fmt: skip


@pytest.mark.parametrize("flags", [[], ["-m"], ["--info", "all"], ["--cfg", "job"]])
def test_options_that_name_code_or_a_folder_are_rejected(flags):
    for typed in REFUSED:
        words = typed.split(" ") if typed.startswith("-") else [typed]
        refuses(r"is not allowed|hydra/launcher=.* is unknown", check_hydra, flags + words)


def test_plain_options_of_launchers_pass():
    for typed in PLAIN:
        check_hydra(["-m", "--cfg", "job", typed])


def test_other_processes_of_a_run_have_the_folder_that_lightning_chose(monkeypatch):
    typed = ["hydra.run.dir='/runs'", "hydra.job.name=train_ddp_process_1"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    check_hydra(typed)
    with pytest.raises(ValueError, match="is not allowed"):
        check_hydra(["hydra.callbacks.x=1"])


@pytest.mark.parametrize(
    "typed",
    ["data=/tmp/x", "recipe=../../x", "+recipe='../x'", "logger=[csv,../x]", "experiment=a/../../x",
     "task=classification,/x", "recipe=choice(../x)", "data=[1,2]"],
)  # fmt: skip
def test_a_group_takes_names_not_paths(typed):
    with pytest.raises(
        ValueError, match=r"is not allowed: \w+ takes a name; .*--help|has several values"
    ):
        check_names([typed])
