"""Comparisons without runs, and results for them."""

import numpy as np

from tools.comparison.cells import CellPlan, Network
from tools.comparison.journal import Journal
from tools.comparison.plan import data_entries, host_entries, mixer_entries, read_plan
from tools.comparison.register import fixed_entries, read_registered, register
from tools.comparison.runner import Comparison

WORDS = ("mixer=ffn,glu", "host=deit_t", "data=sample_classification", "baseline=ffn")


def plan_of(folder, *words):
    return read_plan([*WORDS, f"output_dir={folder}", *words])


def network(parameters=100, **terms):
    facts = {"class_tokens": 1, "pooling": "class token", "norms": ["LayerNorm"], **terms}
    return Network(parameters, 10.0 * parameters, 0.1, 0.1, 2.0, 500.0, 40, facts, {})


def comparison_of(folder, *words, refused=()):
    plan = plan_of(folder, *words)
    mixers, hosts, data = mixer_entries(plan), host_entries(plan), data_entries(plan)
    cells = []
    for host in hosts:
        for entry in data:
            cell = CellPlan(host.label, entry.label, rate=1e-3, prints={"val": "a"})
            for number, mixer in enumerate(mixers):
                if (mixer.label, host.label) in refused:
                    cell.refused[mixer.label] = "dim 3 is not divisible by 2"
                else:
                    unlike = {"class_tokens": 0} if mixer.label == "iffn" else {}
                    cell.networks[mixer.label] = network(100 + number, **unlike)
            cells.append(cell)
    plan.folder.mkdir(parents=True, exist_ok=True)
    lines = []
    made = Comparison(
        plan, mixers, hosts, data, cells, plan.folder, Journal(plan.folder), lines.append
    )
    return made


def fill(comparison, effects=None, seed=0):
    """Give each planned run a result: a mixer's effect and a seed's deviation of 1."""
    generator = np.random.default_rng(seed)
    levels = {cell.key: generator.normal(70, 5) for cell in comparison.cells}
    for planned in comparison.planned():
        run = comparison.settled(planned)
        mean = levels[run.cell] + (effects or {}).get(run.mixer, 0.0)
        facts = {"value": generator.normal(mean, 1), "status": "finished", "folder": "/gone"}
        comparison.journal.add(run.model_copy(update=facts | {"ece": 0.1, "memory": 50.0}))


def registered_text(comparison, commit="c", *, begun):
    fixed = fixed_entries(comparison.plan, comparison.mixers, comparison.cells, commit)
    before = read_registered(comparison.folder) if begun else None
    return register(comparison.folder, comparison.plan, fixed, before, begun=begun)
