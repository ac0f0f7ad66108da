"""Who may import whom, read from the source without running it."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("backbones", "heads", "tasks", "datamodules")
OURS = {*PACKAGES, "tools", "tests", "configs"}
MM = {"mmengine", "mmcv", "mmdet", "mmseg", "mmpretrain"}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
HYDRA = {"hydra", "omegaconf"}

# What of ours a package may know; arrows run down the house only.
MAY_KNOW = {
    "backbones": {"backbones"},
    "heads": {"heads", "backbones"},
    "tasks": {"tasks", "heads", "backbones"},
    "datamodules": {"datamodules"},
}
NEVER = {
    "backbones": LIGHTNING | HYDRA | MM,
    "heads": LIGHTNING | HYDRA,
    "tasks": HYDRA | MM,
    "datamodules": HYDRA,
}
# Commands are tools/<command>.py; their helpers lie in folders of tools/.
COMMANDS = set("run complexity corrupt crop annotate export benchmark results search".split())
COMMANDS |= {"lipschitz", "analyse", "doctor", "timm_slots", "compare", "serve", "verify"}
# They register our backbones with other people's registries and are imported by users alone.
OUTWARD = {"backbones/mm.py": MM, "backbones/timm_models.py": set()}


@dataclass(frozen=True)
class Import:
    """One imported module and where."""

    module: str
    place: str
    runs_at_import: bool
    relative: bool

    @property
    def top(self):
        return self.module.split(".")[0]


def imports_of(source: str, name: str) -> Iterator[Import]:
    """Every import of a file, with those that importlib.import_module makes from a literal.

    A text such as "tools.bench.timing" is the name of something to import later.
    """
    tree = ast.parse(source)
    yield from walk(tree, name, runs=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch(r"tools(\.\w+)+", str(node.value)):
            yield Import(
                str(node.value), f"{name}:{node.lineno}", runs_at_import=False, relative=False
            )


def walk(node: ast.AST, name: str, runs: bool) -> Iterator[Import]:
    place = f"{name}:{getattr(node, 'lineno', 0)}"
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, place, runs, relative=False)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield Import(f"{node.module or ''}.{alias.name}", place, runs, node.level > 0)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        if called in ("import_module", "__import__"):
            yield Import(str(node.args[0].value), place, runs, relative=False)
    for field, value in ast.iter_fields(node):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for_types_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        body = field == "body" and (is_function or for_types_only)
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child, name, runs and not body)


def package_files() -> list[str]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


def parsed(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def broken_rules(name: str, source: str) -> list[str]:
    """Return the imports of a file that break the rules."""
    package = name.split("/")[0]
    broken = []
    for found in imports_of(source, name):
        if found.relative:
            broken.append(f"{found.place}: write the full name instead of a relative import")
        elif found.top in OURS - MAY_KNOW[package]:
            broken.append(f"{found.place}: {package} must not know {found.top}")
        elif found.top in NEVER[package] - OUTWARD.get(name, set()):
            broken.append(f"{found.place}: {package} must not import {found.top}")
        elif found.top in MM and package == "heads" and "heads/toolkits/" not in name:
            broken.append(f"{found.place}: {found.top} belongs into heads/toolkits")
        elif found.top in MM and found.runs_at_import and name not in OUTWARD:
            broken.append(f"{found.place}: import {found.top} inside the function that needs it")
        elif any(f"{found.module}.".startswith(f"{as_module(n)}.") for n in OUTWARD):
            broken.append(f"{found.place}: {found.module} is for users, not for the packages")
    return broken


def as_module(name: str) -> str:
    return name.removesuffix(".py").replace("/", ".")


def test_imports_follow_the_order_of_the_house():
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in package_files()}
    assert [line for name, text in texts.items() for line in broken_rules(name, text)] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("backbones/hosts/a.py", "import heads"),
        ("backbones/hosts/a.py", "def f():\n    import mmdet"),
        ("backbones/hosts/a.py", "from .b import c"),
        ("backbones/__init__.py", "from backbones import mm"),
        ("backbones/mm.py", "import lightning"),
        ("heads/linear.py", "def f():\n    from mmdet.registry import MODELS"),
        ("heads/toolkits/detectors.py", "from mmdet.registry import MODELS"),
        ("heads/toolkits/detectors.py", "try:\n    import mmdet\nexcept ImportError:\n    pass"),
        ("tasks/detection/task.py", "import datamodules.dense.coco"),
        ("tasks/detection/task.py", "from hydra.utils import instantiate"),
        ("datamodules/dense/coco.py", "from backbones import create_backbone"),
        ("datamodules/dense/coco.py", "import importlib as i\ni.import_module('mmdet.datasets')"),
        ("tasks/engine/base.py", "import tests.rows"),
        ("tasks/detection/family.py", "PIPELINE = 'tools.bench.pipelines.coco'"),
    ],
)
def test_a_wrong_import_is_noticed(name, source):
    assert len(broken_rules(name, source)) == 1


def imported_commands(name: str, source: str) -> list[str]:
    """The commands that a file of tools imports, which are for people to type."""
    modules = [found.module for found in imports_of(source, name) if found.top == "tools"]
    return [module for module in modules if module.split(".")[1] in COMMANDS]


def test_tools_are_commands_that_nothing_imports_and_their_helpers():
    files = {path.name for path in (ROOT / "tools").iterdir() if path.is_file()}
    assert files == {"__init__.py", "install.sh", *(f"{name}.py" for name in COMMANDS)}
    for name in COMMANDS:
        assert 'if __name__ == "__main__":' in (ROOT / "tools" / f"{name}.py").read_text()
    helpers = [path for path in (ROOT / "tools").rglob("*.py") if path.stem not in COMMANDS]
    assert all(ast.get_docstring(ast.parse(path.read_text())) for path in helpers)
    for name in tool_files():
        assert not imported_commands(name, (ROOT / name).read_text()), name
    for wrong in ("from tools import results", "def f():\n    from tools.run import run"):
        assert imported_commands("tools/config/sweeps.py", wrong)


def import_graph() -> dict[str, set[str]]:
    """Return the subpackages that each subpackage imports, without packages' own __init__."""
    files = [*package_files(), *tool_files()]
    modules = {as_module(name).removesuffix(".__init__") for name in files}
    graph: dict[str, set[str]] = {}
    for name in files:
        if name.count("/") == 1 and name.endswith("__init__.py"):
            continue
        own = ".".join(as_module(name).split(".")[:2])
        for found in imports_of((ROOT / name).read_text(encoding="utf-8"), name):
            target = found.module if found.module in modules else found.module.rpartition(".")[0]
            package = ".".join(target.split(".")[:2])
            if package != own and "." in package and package.split(".")[0] == own.split(".")[0]:
                graph.setdefault(own, set()).add(package)
    return graph


def test_subpackages_form_no_cycle():
    graph = import_graph()
    assert list(TopologicalSorter(graph).static_order())
    with pytest.raises(CycleError):
        TopologicalSorter(graph | {"tools.cli": {"tools.runs"}}).prepare()


MODULES = {
    "__init__", "base", "factory", "importing", "lora", "mixer", "mixer_calls", "mixer_selection",
    "mm", "plugins", "registry", "replace", "slots", "timm_models",
}  # fmt: skip
CONTRACT = {"base", "mixer", "slots"}
# What each subpackage or module may import of backbones. Only users import "analysis".
ALLOWED_IMPORTS = {
    "options": {"options"},
    "replace": set(),
    "layers": {"layers", "options", "replace"},
    "mixer_calls": {"layers", *CONTRACT},
    # Fast forms import what they replace; only the factory imports them.
    "fast": {"fast", "hosts", "mixers", "layers", *CONTRACT, "replace", "importing"},
    "parameters": {"parameters"},
    "mixer": {"layers"},
    "slots": {"mixer", "replace"},
    "base": {"layers", "mixer", "parameters", "replace", "slots"},
    "importing": set(),
    "plugins": {"importing"},
    "registry": {*CONTRACT, "importing", "options", "plugins"},
    "mixer_selection": {*CONTRACT, "options", "registry"},
    "checkpoints": {"checkpoints", *CONTRACT, "options"},
    "lora": {*CONTRACT, "layers", "options", "replace"},
    "factory": {*CONTRACT, "checkpoints", "fast", "layers", "lora", "mixer_selection", "options"}
    | {"registry"},
    "mixers": {"mixers", "layers", *CONTRACT, "options", "registry", "importing"},
    "hosts": {"hosts", "mixers", "layers", "checkpoints", *CONTRACT, "options", "registry"}
    | {"replace", "importing", "mixer_calls", "parameters"},
    "analysis": {"analysis", "hosts", "mixers", "layers", "parameters", "checkpoints"}
    | {*CONTRACT, "options", "registry", "factory", ""},
    "__init__": {"hosts", "mixers", *CONTRACT, "factory", "registry"},
    # For users: they import the public names, and what their toolkits need.
    "mm": {"", *CONTRACT, "checkpoints", "options", "parameters", "replace"},
    "timm_models": {"", "checkpoints", "hosts", *CONTRACT, "parameters", "registry"},
}
# Scaffolds serve several hosts and import none of them.
SCAFFOLDS = "hosts.scaffolds"
LOSS = r"(?:^|_)loss(?:es)?$|Loss$|cross_entropy"


def forbidden_imports(name: str, source: str) -> list[str]:
    """Return the forbidden imports of a file of backbones/."""
    package, broken = as_module(name).split(".")[1], []
    for found in imports_of(source, name):
        if found.top != "backbones":
            continue
        target, *rest = found.module.split(".")[1:] or [""]
        known = target if target in ALLOWED_IMPORTS else ""  # a public name of the package
        if known not in ALLOWED_IMPORTS[package]:
            broken.append(f"{found.place}: {package} must not import {found.module}")
        elif SCAFFOLDS in as_module(name) and known == "hosts" and rest[0] != "scaffolds":
            broken.append(f"{found.place}: a scaffold must not import {found.module}")
    return broken


def backbones_files() -> list[str]:
    return [name for name in package_files() if name.startswith("backbones/")]


def test_modules_and_subpackages_of_backbones_are_listed():
    folder = ROOT / "backbones"
    assert {path.stem for path in folder.glob("*.py")} == MODULES
    packages = {path.name for path in folder.iterdir() if any(path.glob("*.py"))}
    assert packages | MODULES == set(ALLOWED_IMPORTS) | {"__init__"}


def test_imports_inside_backbones_are_allowed():
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in backbones_files()}
    assert [line for name, text in texts.items() for line in forbidden_imports(name, text)] == []
    assert [(name, loss) for name, text in texts.items() for loss in losses(text)] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("layers/a.py", "from backbones.base import Slot"),
        ("layers/a.py", "from backbones.registry import register_mixer"),
        ("options/a.py", "from backbones.base import Mixer"),
        ("mixers/a.py", "from backbones.hosts.deit import DeiT"),
        ("mixers/afbo/a.py", "def f():\n    from backbones.factory import create_mixer"),
        ("mixers/a.py", "from backbones.checkpoints.keys import rename"),
        ("mixers/a.py", "def f():\n    from backbones.fast import is_available"),
        ("hosts/a.py", "from backbones.fast.cpu.linear import linear"),
        ("mixers/a.py", "from backbones.analysis.counting import count_macs"),
        ("hosts/a.py", "from backbones import create_backbone"),
        ("checkpoints/a.py", "from backbones.hosts.deit import DeiT"),
        ("registry.py", "from backbones.mixers.ffn import FFN"),
        ("factory.py", "import backbones.hosts.deit"),
        ("mm.py", "from backbones.hosts.deit import DeiT"),
        ("__init__.py", "from backbones.analysis import counting"),
    ],
)
def test_a_hole_in_a_wall_is_noticed(name, source):
    assert len(forbidden_imports(f"backbones/{name}", source)) >= 1


def losses(source: str) -> list[str]:
    """Losses that a file defines or computes: backbones are "image to feature maps"."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [getattr(node, "attr", None) or getattr(node, "name", None) for node in nodes]
    return [name for name in names if isinstance(name, str) and re.search(LOSS, name)]


@pytest.mark.parametrize(
    ("source", "count"),
    [("def loss(x):\n    return F.cross_entropy(x, y)", 2), ("class FocalLoss(nn.Module): pass", 1),
     ("nn.CrossEntropyLoss()", 1), ("lossless = F.softplus(x)", 0)],
)  # fmt: skip
def test_a_loss_is_noticed(source, count):
    assert len(losses(source)) == count


def test_names_and_docstrings_stand_alone():
    classes = [node.name for name in backbones_files() for node in parsed(name).body
               if isinstance(node, ast.ClassDef)]  # fmt: skip
    assert not [name for name, count in Counter(classes).items() if count > 1]
    leaning = [
        f"{name}:{node.lineno}"
        for name in [*package_files(), *tool_files()]
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and re.match(r"The same\b|As above|Likewise|Ditto", ast.get_docstring(node) or "")
    ]
    assert not leaning
    taken = {*MM, *HYDRA, *LIGHTNING, "onnx", "onnxruntime", "onnxscript", "safetensors"}
    taken |= {"timm", "torch", "torchvision", "datasets", "utils"}
    # Files of mixers may have any name: all imports are absolute.
    files = [name for name in package_files() if not name.startswith("backbones/mixers/")]
    files += tool_files()
    assert not [name for name in files if Path(name).stem in taken or Path(name).parts[1] in taken]


# Adjectives, participles and pronouns: alone, as a variable or function, they name nothing.
VAGUE = set(
    """one other others found own known unknown shown chosen given kept named typed whole made
    wanted left picked asked taken told seen written listed plain there here each such these
    those what which both mine theirs drawn stored missed fitting sure allowed changed described
    imported applied fixed free new old done held meant added needed needless worn bound born
    beaten likely alike apart alone wide narrow short long full empty same different""".split()
)
# What is left: names of options, mixers and methods that others type or call.
VAGUE_LEFT = {
    "backbones": """bound fixed fixed full kept left left left listed narrow plain seen
    unknown""".split(),
    "heads": [],
    "tasks": "done fixed imported left plain plain seen".split(),
    "datamodules": "left plain plain".split(),
    "tools": [],
}


def vague_names(source: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(source)))
    names = [n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    names += [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    return [name for name in names if name.removeprefix("_") in VAGUE]


def test_names_of_variables_functions_and_parameters_are_nouns_and_verbs():
    assert vague_names("def _found(one):\n    own, rows = one, one") == ["own", "_found", "one"]
    names = {package: Counter() for package in VAGUE_LEFT}
    for file in [*package_files(), *tool_files()]:
        names[file.split("/")[0]].update(vague_names((ROOT / file).read_text(encoding="utf-8")))
    assert names == {package: Counter(left) for package, left in VAGUE_LEFT.items()}


def tool_files() -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in (ROOT / "tools").rglob("*.py")]


def fresh_interpreter(code: str) -> str:
    """Return the output of code in a new interpreter."""
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout


@pytest.mark.slow  # the walls above show it without running anything
def test_importing_backbones_loads_no_toolkit():
    own, loaded = fresh_interpreter(
        "import sys, backbones\n"
        "assert 'torch' not in sys.modules\n"
        "backbones.create_backbone('swin_t_afbo', img_size=64)\n"
        "print(*sys.modules)\n"
        "assert backbones.list_backbones('swin_t_afbo')\n"
        "print(*sys.modules)"
    ).splitlines()
    rooms = {
        ".".join(name.split(".")[1:3]) for name in own.split() if name.startswith("backbones.")
    }
    assert {room for room in rooms if room.startswith("hosts.")} == {
        "hosts.scaffolds",
        "hosts.swin",
    }
    mixers = {"mixers.afbo", "mixers.attentions", "mixers.ffn"}
    assert {room for room in rooms if room.startswith("mixers.")} <= mixers
    loaded = loaded.split()
    assert not {name.split(".")[0] for name in loaded} & (LIGHTNING | HYDRA | MM | {"cv2"})
    assert not {as_module(name) for name in OUTWARD} & set(loaded)
