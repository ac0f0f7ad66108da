"""Plans of comparisons in configs/plans: their mixers, hosts and data are what runs take."""

import itertools
import re

import pytest
import torch
import yaml

from backbones import create_backbone, list_mixers
from backbones.analysis.counting import count_macs
from tests.runs import CONFIGS, ROOT, composed
from tools.comparison.cells import compose_run, run_words
from tools.comparison.plan import data_entries, host_entries, mixer_entries, read_plan

PLANS = sorted((CONFIGS / "plans").glob("*.yaml"))
BLOCKS = [
    block
    for block in re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs/howto/compare.md").read_text(), re.S
    )
    if "mixer:" in block
]


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_composes(path):
    plan = yaml.safe_load(path.read_text())
    assert plan["baseline"] in plan["mixer"]
    kinds = [kind for kind in ("channel", "token") if {*plan["mixer"]} <= {*list_mixers(kind)}]
    assert len(kinds) == 1
    for host, data in itertools.product(plan["host"], plan["data"]):
        words = [*f"backbone={host} data={data}".split(), *plan["options"]]
        config = composed(f"task={plan['task']}", *words)
        if plan["task"] == "classification":
            assert (config.backbone["img_size"], config.data["resident"]) == (32, True)


@pytest.mark.parametrize("text", BLOCKS)
def test_plans_of_the_documentation_compose(tmp_path, text):
    (tmp_path / "plan.yaml").write_text(text)
    plan = read_plan([f"plan={tmp_path / 'plan.yaml'}"])
    baseline = next(entry for entry in mixer_entries(plan) if entry.label == plan.baseline)
    for host, data in itertools.product(host_entries(plan), data_entries(plan)):
        assert composed(*run_words(plan, host, data, baseline)).task_name == plan.task


@pytest.mark.slow
@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_mixer_of_a_plan_fits_every_host(path):
    plan = read_plan([f"plan={path}"])
    data = data_entries(plan)[0]
    for host, mixer in itertools.product(host_entries(plan), mixer_entries(plan)):
        config = compose_run(run_words(plan, host, data, mixer))
        with torch.device("meta"):
            assert create_backbone(**config.backbone).channel_mixers()


@pytest.mark.parametrize(("name", "kind"), [("leaderboard", "channel"), ("token_mixers", "token")])
def test_the_leaderboard_has_all_mixers_of_a_kind(name, kind):
    plan = yaml.safe_load((CONFIGS / f"plans/{name}.yaml").read_text())
    controls = {"identity_ffn", "random_ffn", "identity", "random"}  # which a comparison adds
    assert {*plan["mixer"]} - controls == {*list_mixers(kind)} - controls


def test_hosts_of_the_leaderboard_have_2_to_5_million_multiply_adds():
    plan = yaml.safe_load((CONFIGS / "plans/leaderboard.yaml").read_text())
    counts = []
    for host in plan["host"]:
        config = composed("task=classification", "data.image_size=32", *f"backbone={host}".split())
        counts.append(count_macs(create_backbone(**config.backbone).eval(), (32, 32)) / 1e6)
    assert counts == pytest.approx([4.37, 4.64, 4.18], abs=0.01)
