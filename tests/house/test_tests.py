"""Rules for the tests: helpers live in their own modules, and draws cover everything."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from backbones import list_mixers
from backbones.registry import look_up
from tests.families import HOSTS, SMALLEST, by_turns, drawn, sparse

TESTS = Path(__file__).resolve().parents[1]


def test_imports_avoid_tests_and_private_registry_tables():
    broken = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            wrong = False
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                is_ours = not module or module.partition(".")[0] == "tests"
                wrong = is_ours and module.rpartition(".")[2].startswith("test_")
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "registry":
                wrong = node.attr.startswith("_")
            broken += [f"{path.relative_to(TESTS)}:{node.lineno}"] if wrong else []
    assert broken == []


@pytest.mark.parametrize("seed", range(4))
def test_a_draw_covers_hosts_and_channel_mixers(seed):
    pairs = [look_up(name) for name in drawn(seed)]
    counts, times = Counter(mixer for _, mixer in pairs), Counter(host.name for host, _ in pairs)
    assert times.keys() == set(HOSTS)
    # A host comes again only for mixers that no other host has.
    singles = Counter(host.name for host, mixer in pairs if counts[mixer] == 1)
    assert all(times[name] - 1 <= singles[name] for name in HOSTS)
    assert {mixer for _, mixer in pairs} >= {None, *list_mixers("channel")} - {"ffn"}
    assert drawn(seed) == drawn(seed)
    assert set(drawn(seed)) != set(drawn(seed + 1))


@pytest.mark.parametrize("targets", [("a", "b"), ("a", "b", "c", "d")], ids=len)
def test_turns_cover_hosts_mixers_and_targets(targets):
    cases = by_turns(*targets)
    assert len(cases) == len(set(cases)) == len(drawn(0)) + (len(targets) - 1) * len(SMALLEST)
    pairs = [look_up(name) for _, name in cases]
    assert {host.name for host, _ in pairs} == set(HOSTS)
    assert {mixer for _, mixer in pairs} >= {None, *list_mixers("channel")} - {"ffn"}
    for host in SMALLEST:
        assert {target for target, name in cases if look_up(name)[0].name == host} == {*targets}


def test_draws_of_mixers_cover_all():
    pairs = [look_up(name) for name in sparse(3)]
    assert {host.name for host, _ in pairs} >= set(SMALLEST)
    assert {mixer for _, mixer in pairs} == {look_up(name)[1] for name in drawn(3)}
    assert len(pairs) < len(drawn(3))
