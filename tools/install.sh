#!/usr/bin/env bash
# Create .venv, install the tested set (constraints.txt) from wheels, and compile the operators of
# backbones/fast if there is a C++ compiler; otherwise mixers use torch's operators.
# Called by `make install`; safe to repeat at any time, also after an interruption.
#   PYTHON=python3.12   the interpreter to use
#   PORTABLE=1          compile operators for any processor of this architecture
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."

venv=.venv
py=$venv/bin/python
log=$venv/install.log
stamp=$venv/.installed
compiled=$venv/.compiled
extras=dense,lipschitz,attributions,export,sweep,search,parquet,wandb,mlflow,schedulefree,notebooks,docs,dev

stop() {
    echo "make install: $*" >&2
    exit 1
}

# Changes with the files that define the installation, the checkout's path, and later pip installs.
fingerprint() {
    { pwd && cat pyproject.toml constraints.txt tools/install.sh backbones/fast/cpu/csrc/* && ls -d "$venv"/lib/python3*/site-packages/*.dist-info; } |
        sha256sum | cut -c1-16
}

up_to_date() {
    [ -x "$py" ] && [ -f "$stamp" ] && [ "$(<"$stamp")" = "$(fingerprint)" ]
}

# Changes with the compiler, the processor and the compiled files.
operators_fingerprint() {
    {
        echo "${CXX:-} ${PORTABLE:-}"
        command -v g++ c++ || true
        grep -m1 -E '^(flags|Features)' /proc/cpuinfo || true
        ls -ln --time-style=+%s backbones/fast/cpu/compiled || true
    } 2>/dev/null | sha256sum | cut -c1-16
}

operators_up_to_date() {
    [ -f "$compiled" ] && [ "$(<"$compiled")" = "$(operators_fingerprint)" ]
}

# May fail without breaking the installation; prints a line with the result.
compile_operators() {
    echo "      $("$py" -m backbones.fast.build ${PORTABLE:+--portable} 2>>"$log" || true)"
    operators_fingerprint >"$compiled"
    # The list of backbones and mixers that commands read, so that the first one need not import torch.
    "$py" -c 'from tools.cli.catalogue import load_catalogue; load_catalogue()' >>"$log" 2>&1 || true
}

is_fitting() { # constraints.txt has wheels for these versions
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_fitting "$PYTHON" || stop "PYTHON=$PYTHON must be Python 3.11, 3.12 or 3.13, because all packages have wheels for these."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if is_fitting "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    stop "Python 3.11, 3.12 or 3.13 is missing. Type: apt-get install python3.11 python3.11-venv, or make install PYTHON=/path/to/python3.11"
}

check_machine() {
    local need free
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "$python cannot make virtual environments. Type: apt-get install python3-venv (python3.11-venv for python3.11)"
    need=9
    compgen -G "$venv/lib/python3*/site-packages/torch" >/dev/null && need=3
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free" -ge "$need" ] || stop "$PWD has $free GB free, but $need GB are needed. Free some space or move the checkout."
}

wait_for_other_install() {
    mkdir -p "$venv"
    command -v flock >/dev/null || return 0
    exec 9>"$venv/.lock"
    flock -n 9 || { echo "another make install is running here; waiting for it" && flock 9; }
}

step() {
    echo "[$1] ${*:2}"
    echo "=== ${*:2}" >>"$log"
}

cause() {
    if grep -q 'No space left on device' "$log"; then
        echo "the disk is full; free some space, or point TMPDIR to a larger disk"
    elif grep -qE 'name resolution|Max retries exceeded|Network is unreachable' "$log"; then
        echo "the package index cannot be reached; check the network, the proxy and pip's configuration"
    else
        grep -i 'error' "$log" | tail -n 1 || echo "see the lines above"
    fi
}

logged() {
    "$@" >>"$log" 2>&1 && return
    tail -n 20 "$log" >&2
    stop "$(cause) (whole log: $log)"
}

# Python byte-compiles modules on import; compiling all of them here would double the time.
pip_install() {
    logged "$py" -m pip --disable-pip-version-check install --no-compile --progress-bar off -c constraints.txt "$@"
}

toolkits_work() {
    "$py" -c 'import heads, mmcv.ops, mmdet.models, mmseg.models' >>"$log" 2>&1
}

make_venv() {
    if [ -e "$py" ] && ! is_fitting "$py"; then
        echo "      $venv has another Python version and is created again"
        logged "$python" -m venv --clear "$venv"
    elif ! [ -x "$py" ] || ! "$py" -m pip --version >/dev/null 2>&1 || ! grep -qsF "$PWD/" "$venv/bin/activate"; then
        logged "$python" -m venv "$venv"
    fi
}

if up_to_date && operators_up_to_date; then
    echo "$venv is up to date (tools/doctor.py lists its packages)"
    exit 0
fi
trap 'echo "interrupted; type make install to continue" >&2; exit 130' INT TERM
if up_to_date; then
    wait_for_other_install
    echo "$venv is up to date; compiling the mixers' operators if needed (a minute or two)"
    operators_up_to_date || compile_operators
    exit 0
fi
python=$(find_python)
check_machine
wait_for_other_install
if up_to_date; then
    exit 0
fi
rm -f "$stamp"
: >"$log"
echo "Installing into $PWD/$venv. To watch: tail -f $log"

step 1/4 "virtual environment ($("$python" --version))"
make_venv
step 2/4 "torch, timm, lightning, mmdet, mmseg, hydra and the rest (a download of 3.3 GB)"
pip_install pip
pip_install -e ".[$extras]"
# imaug, which mmdet needs, requires opencv-python and opencv-python-headless. Both write to the same
# folder; the headless one must be last, because the other needs libGL.
grep -qs 'headless = True' "$venv"/lib/python3*/site-packages/cv2/version.py ||
    pip_install --force-reinstall --no-deps opencv-python-headless
step 3/4 "checking"
logged "$py" -m pip check
if ! toolkits_work; then
    echo "      pip's cache has an mmcv compiled for another torch; installing it again without the cache"
    pip_install --force-reinstall --no-deps --no-cache-dir onedl-mmcv
    logged toolkits_work
fi
step 4/4 "compiling the mixers' operators (a minute or two)"
compile_operators

fingerprint >"$stamp"
echo "Installed in $((SECONDS / 60)) min $((SECONDS % 60)) s. Next: make demo"
