"""What make install, constraints.txt and tools/doctor.py promise, without installing anything."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tasks.engine.family import families
from tools import doctor
from tools.installation import checks, packages

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    Requirement(line)
    for lines in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for line in lines
    if not line.startswith("mixerlab[")
]
PINS = packages.read_pins()

# Everything tools/install.sh calls, apart from python.
COMMANDS = "awk bash cat cp cut df env flock grep ls mkdir rm sha256sum tail".split()


def versions(**installed):
    """A stand-in for the installed distributions, with _ for - in the names."""
    table = {name.replace("_", "-"): version for name, version in installed.items()}
    return table.get


def test_ranges_admit_the_tested_versions():
    for requirement in REQUIREMENTS:
        pin = PINS[packages.normalise(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement} does not admit {pin}"


def test_pins_are_exact_without_places_or_cuda_libraries():
    bounds = [r.specifier for r in REQUIREMENTS if r.name == "torch"]
    assert all(bound.contains("2.15.0") for bound in bounds)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert len(pins) == len(PINS), "a package is pinned twice"
    assert not [pin for pin in pins if pin.startswith("nvidia")]
    assert PINS["opencv-python"] == PINS["opencv-python-headless"]


def test_makefile_has_the_promised_targets_and_lists_them():
    promised = {"install", "demo", "test", "test-all", "lint", "doctor", "clean", "help"}
    code = re.findall(r"```.*?```|`[^`\n]+`", (ROOT / "README.md").read_text(), re.DOTALL)
    promised.update(re.findall(r"^`?make ([a-z][a-z-]*)", "\n".join(code), re.MULTILINE))
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert promised <= targets
    run = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in targets:
        assert f"make {target} " in run.stdout


def fake_python(path, calls):
    """Write a python3.11 that only writes down what it was asked, and fails while `fail` exists."""
    path.write_text(f"""#!{shutil.which("bash")}
site=.venv/lib/python3.11/site-packages
echo "$*" >>{calls}
case "$*" in
    *"-m venv"*)
        mkdir -p .venv/bin $site
        echo "$PWD/.venv" >.venv/bin/activate
        cat {path} >.venv/bin/python
        chmod +x .venv/bin/python ;;
    *"-m pip"*" install "*)
        [ ! -e fail ] || {{ cat fail; exit 1; }}
        mkdir -p $site/mixerlab-0.1.0.dist-info
        [[ "$*" != *--no-cache-dir* ]] || rm -f stale ;;
    *"import heads"*) [ ! -e stale ] ;;
    *fast.build*)
        echo "operators: $(cat operators 2>&1)"
        mkdir -p backbones/fast/cpu/compiled
        [ -e operators ] && cp --remove-destination operators backbones/fast/cpu/compiled/a.so ;;
esac
""")
    path.chmod(0o755)


class Machine:
    """A copy of the checkout's install files and a PATH with only what a test puts there."""

    def __init__(self, folder):
        self.root, self.bin, self.calls = folder / "checkout", folder / "bin", folder / "calls"
        (self.root / "tools").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("pyproject.toml", "constraints.txt", "Makefile", "tools/install.sh"):
            shutil.copy(ROOT / name, self.root / name)
        sources = Path("backbones/fast/cpu/csrc")
        shutil.copytree(ROOT / sources, self.root / sources)
        for name in COMMANDS:
            if found := shutil.which(name):
                (self.bin / name).symlink_to(found)
        (self.bin / "chmod").symlink_to(shutil.which("chmod"))
        self.add("df", "echo header; echo disk 0 0 99000000 0% /")
        fake_python(self.bin / "python3.11", self.calls)

    def add(self, name, body):
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
        (self.bin / name).chmod(0o755)

    def install(self, **environment):
        self.calls.write_text("")
        environment = {"PATH": str(self.bin), "HOME": str(self.root), **environment}
        command = [str(self.bin / "bash"), "tools/install.sh"]
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True
        )

    def installs(self, **environment):
        run = self.install(**environment)
        assert run.returncode == 0, run.stderr
        return run.stdout

    def pip_calls(self):
        return [line for line in self.calls.read_text().splitlines() if " install " in line]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("name", "body", "python", "words"),
    [
        ("python3.11", None, {},
         ["Python 3.11, 3.12 or 3.13 is missing", "apt-get install python3.11"]),
        ("python3.14", "exit 1", {"PYTHON": "python3.14"},
         ["PYTHON=python3.14 must be Python 3.11"]),
        ("python3.11", '[[ "$*" != *ensurepip* ]]', {}, ["apt-get install python3-venv"]),
        ("df", "echo header; echo disk 0 0 4000000 0% /", {},
         ["has 3 GB free, but 9 GB are needed"]),
    ],
)  # fmt: skip
def test_install_stops_in_one_line_before_it_does_anything(machine, name, body, python, words):
    if body is None:
        (machine.bin / name).unlink()
    else:
        machine.add(name, body)
    run = machine.install(**python)
    assert (run.returncode, run.stdout) == (1, "")
    (line,) = run.stderr.splitlines()
    assert line.startswith("make install: ")
    assert all(word in line for word in words)


def test_operators_that_cannot_be_compiled_stop_nothing(machine):
    printed = machine.installs()
    assert "      operators: " in printed
    assert "Installed in" in printed
    assert "fast.build --portable" not in machine.calls.read_text()
    assert "up to date" in machine.installs()  # the second one does nothing
    assert machine.calls.read_text() == ""
    source = next((machine.root / "backbones/fast/cpu/csrc").glob("*.cpp"))
    source.write_text("// changed")
    machine.installs(PORTABLE="1")
    assert "fast.build --portable" in machine.calls.read_text()


@pytest.mark.parametrize("change", ["nothing", "deleted", "replaced", "compiler", "CXX"])
def test_install_compiles_operators_that_are_missing(machine, change):
    """It installs no package again, and compiles again only where something else may come of it."""
    (machine.root / "operators").write_text("library")
    machine.installs()
    library = machine.root / "backbones/fast/cpu/compiled/a.so"
    environment = {"CXX": "other"} if change == "CXX" else {}
    if change in ("deleted", "replaced"):
        library.unlink()
    if change == "replaced":
        os.mkfifo(library)
    if change == "compiler":
        machine.add("g++", "exit 0")
    printed = machine.installs(**environment)
    assert "up to date" in printed
    assert ("fast.build" in machine.calls.read_text()) == (change != "nothing")
    assert ("compiling the mixers' operators if needed" in printed) == (change != "nothing")
    assert not machine.pip_calls()
    assert library.is_file()
    machine.installs(**environment)
    assert machine.calls.read_text() == ""


def test_install_continues_after_a_failure(machine):
    (machine.root / "fail").write_text("lots of output\nERROR: No space left on device\n")
    run = machine.install()
    assert run.returncode == 1
    assert "lots of output" in run.stderr
    assert "the disk is full" in run.stderr.splitlines()[-1]
    (machine.root / "fail").unlink()
    machine.installs()
    assert not any("-m venv" in call for call in machine.calls.read_text().splitlines())


def test_install_scripts_parse_and_never_name_an_index():
    for script in ("tools/install.sh", ".ci/run"):
        subprocess.run(["bash", "-n", ROOT / script], check=True)
    text = (ROOT / "tools" / "install.sh").read_text()
    assert not re.search(r"index-url|find-links|https?://", text)


def test_doctor_describes_packages():
    missing = packages.describe("timm", "", "1.0.31", None)
    assert (missing.status, missing.feature) == ("missing", "backbones")
    assert missing.remedy
    assert packages.describe("timm", "", "1.0.31", "1.0.30").status == "untested version"
    fine = packages.describe("torch", "", "2.12.1", "2.12.1+cu130")
    assert (fine.status, fine.remedy) == ("ok", "")
    names = [row.name for row in packages.list_packages()]
    assert len(names) == len(set(names))
    assert set(names) == {packages.normalise(requirement.name) for requirement in REQUIREMENTS}
    installed = versions(mmcv="2.1.0", mmsegmentation="1.2.2", onedl_mmcv="2.3.6")
    found = checks.check_overwritten(installed)
    assert [check.name for check in found] == ["onedl-mmcv", "onedl-mmsegmentation"]
    assert "pip uninstall -y mmcv onedl-mmcv" in found[0].remedy
    assert checks.check_overwritten(versions(onedl_mmcv="2.3.6")) == []


def test_doctor_finds_classification_usable_without_the_mm_packages():
    rows = packages.list_packages(lambda name: None if name.startswith("onedl") else PINS[name])
    found = [checks.check_operators(checks.EMPTY_PROBE, versions())]
    assert doctor.core_is_fine(rows, found)
    text = doctor.format_report(rows, found)
    usable = [name for name, family in families().items() if not family.needs]
    assert {"classification", "super_resolution", "transfer"} <= set(usable)
    assert f"Can run: {', '.join(usable)}. Need the above: detection, segmentation." in text
    rows = packages.list_packages(lambda name: None if name == "lightning" else PINS[name])
    assert not doctor.core_is_fine(rows, [])


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_doctor_refuses_another_python(version):
    check = checks.check_python(version)
    assert check.level == "problem"
    assert not doctor.core_is_fine([], [check])


def test_doctor_tells_a_broken_file_from_a_broken_installation(monkeypatch):
    probed = {**checks.EMPTY_PROBE, "broken": "backbones/mixers/mine.py:1: NameError: name 'y'"}
    rows = packages.list_packages(PINS.get)
    check = checks.check_files(probed, versions(timm="1.0"))
    assert (check.level, check.text) == ("problem", probed["broken"])
    assert "Nothing can run until the file above is fixed." in doctor.format_report(rows, [check])
    assert checks.check_files(probed, versions()).level == "note"
    check = checks.check_files(checks.EMPTY_PROBE, versions(timm="1.0"))
    assert (check.level, check.text) == ("note", "not checked: torch is missing")
    monkeypatch.setattr(checks, "PROBE", "import os; os.abort()")
    assert checks.probe()["error"]


def test_doctor_command_needs_nothing_but_python(tmp_path):
    """An interpreter without site packages gets the table, and status 1."""
    command = [sys.executable, "-I", "-S", ROOT / "tools" / "doctor.py"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 1, run.stderr
    assert "missing" in run.stdout
    assert "Traceback" not in run.stderr


def run_mixerlab(python, *words, cwd):
    """Run the command ``mixerlab`` of an installation, and return what it prints."""
    done = subprocess.run(
        [python.parent / "mixerlab", *words], cwd=cwd, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_command_lists_the_tools_and_refuses_others(tmp_path):
    code = "import sys, mixerlab; sys.exit(mixerlab.main())"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def answer(*words):
        return subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=tmp_path, capture_output=True, text=True, env=environment,
        )  # fmt: skip

    listed = answer("--help").stdout
    for file in (ROOT / "tools").glob("[!_]*.py"):
        assert f"\n  {file.stem} " in listed
    refused = answer("sing")
    assert refused.returncode == 2
    assert refused.stderr == "error: 'sing' is no command; mixerlab --help lists them\n"
    assert "usage: doctor.py" in answer("doctor", "--help").stdout


def test_the_editable_installation_has_the_command(tmp_path):
    assert "\n  run  " in run_mixerlab(Path(sys.executable), "--help", cwd=tmp_path)


@pytest.mark.slow
def test_a_wheel_trains_predicts_and_exports_from_any_folder(tmp_path, monkeypatch):
    """In an environment that has the packages, but no checkout; nothing is written into it."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # launchers of Hydra set it in tests before
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, ROOT]
    subprocess.run(pip, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert names == {"mixerlab", wheel.name.partition("-py3")[0] + ".dist-info"}
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    (site,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    # A folder that is named in a file brings no editable installation along.
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", wheel]
    subprocess.run(pip, check=True)
    files = {path: path.stat().st_mtime for path in site.rglob("*") if path.suffix != ".pyc"}

    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "tasks.py").write_text("raise SystemExit('shadowed')")
    run_mixerlab(python, "run", "backbone=deit_t_afbo", "trainer.max_steps=1",
                 "trainer.limit_val_batches=1", cwd=folder)  # fmt: skip
    run = "outputs/classification/deit_t_afbo/latest"
    picture = next((folder / run / "preview").glob("*.png"))
    run_mixerlab(python, "run", "mode=predict", f"ckpt={run}", f"input={picture}", cwd=folder)
    run_mixerlab(python, "export", f"ckpt={run}", "to=timm", "out=exported", cwd=folder)
    for command in ("run", "export"):
        assert "tools/" not in run_mixerlab(python, command, "--help", cwd=folder)
    script = (
        "import mixerlab; task = mixerlab.load('outputs/classification/deit_t_afbo/latest')\n"
        "import backbones.timm_models, timm\n"
        "assert backbones.__file__.endswith('mixerlab/backbones/__init__.py')\n"
        "timm.create_model('local-dir:exported', pretrained=True)"
    )
    subprocess.run([python, "-P", "-c", script], cwd=folder, check=True)
    after = {path: path.stat().st_mtime for path in site.rglob("*") if path.suffix != ".pyc"}
    assert {path for path in after if after[path] != files.get(path) and path.is_file()} == set()


def test_all_extras_are_listed_where_they_are_promised():
    extras = set(PROJECT["optional-dependencies"])
    page = (ROOT / "docs/get_started/installation.md").read_text(encoding="utf-8")
    table = page.partition("| extra | serves |")[2]
    cells = "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", cells)) == extras
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert Requirement(everything).extras == extras - {"all", "docs", "dev", "fla", "points"}
    installed = re.search(r"^extras=(.*)", (ROOT / "tools/install.sh").read_text(), re.MULTILINE)
    sentence = re.search(r"brings all of them but (.*?)\.", page)
    left_out = {"all", *re.findall(r"`(\w+)`", sentence[1])}
    assert set(installed[1].split(",")) == extras - left_out
