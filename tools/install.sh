#!/usr/bin/env bash
# Makes .venv and installs the tested set (constraints.txt) with the compiled mmcv operators.
# Called by `make install`; may be called again at any time, after an interruption too.
#   PYTHON=python3.11   the interpreter to use
#   CUDA=1              compile mmcv's CUDA operators as well (needs nvcc)
#   MAX_JOBS=1          compile fewer files at a time, when memory is short
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."

venv=.venv
py=$venv/bin/python
log=$venv/install.log
stamp=$venv/.installed
cuda=${CUDA:-0}
number=0

stop() {
    echo "make install: $*" >&2
    exit 1
}

# Changes with the files that say what to install, with the place, and with what pip has installed since.
fingerprint() {
    { pwd && cat pyproject.toml constraints.txt tools/install.sh && (cd "$venv/lib/python3.11/site-packages" && ls -d *.dist-info); } |
        sha256sum | cut -c1-16
}

up_to_date() {
    local have
    [ -x "$py" ] && [ -f "$stamp" ] || return 1
    have=$(<"$stamp")
    [ "$have" = "$(fingerprint) cuda" ] || { [ "$cuda" != 1 ] && [ "$have" = "$(fingerprint) cpu" ]; }
}

is_python_3_11() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_python_3_11 "$PYTHON" || stop "PYTHON=$PYTHON is no Python 3.11, the version MixerLab is tested with."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3 python; do
        if is_python_3_11 "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    stop "Python 3.11 is missing. Type: apt-get install python3.11 python3.11-venv python3.11-dev (or name one: make install PYTHON=/path/to/python3.11)"
}

check_machine() {
    local need free header
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "$python cannot make virtual environments. Type: apt-get install python3.11-venv"
    if ! compgen -G "$venv/lib/python3.11/site-packages/mmcv/_ext*.so" >/dev/null || [ "$cuda" = 1 ]; then
        command -v "${CXX:-g++}" >/dev/null ||
            stop "the C++ compiler ${CXX:-g++} is missing (mmcv's operators are compiled here). Type: apt-get install g++"
        header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h
        [ -f "$header" ] || stop "Python's headers are missing ($header). Type: apt-get install python3.11-dev"
    fi
    if [ "$cuda" = 1 ] && ! command -v "${CUDA_HOME:+$CUDA_HOME/bin/}nvcc" >/dev/null; then
        stop "CUDA=1 needs nvcc. Install the CUDA toolkit of torch's version, or set CUDA_HOME to its folder."
    fi
    need=12
    [ -d "$venv/lib/python3.11/site-packages/torch" ] && need=3
    free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$free" -ge "$need" ] || stop "needs $need GB free in $PWD, there are $free. Free some space or move the checkout."
}

wait_for_other_install() {
    mkdir -p "$venv"
    command -v flock >/dev/null || return 0
    exec 9>"$venv/.lock"
    flock -n 9 || { echo "another make install is at work here, waiting for it" && flock 9; }
}

step() {
    number=$((number + 1))
    echo "[$number/5] $*"
    echo "=== $*" >>"$log"
}

cause() {
    if grep -q 'No space left on device' "$log"; then
        echo "the disk is full; free some space, or point TMPDIR to a larger disk"
    elif grep -q 'Killed signal terminated' "$log"; then
        echo "the compiler ran out of memory. Type: make install MAX_JOBS=1"
    elif grep -qE 'name resolution|Max retries exceeded|Network is unreachable' "$log"; then
        echo "the package index cannot be reached; check the network, the proxy and pip's configuration"
    else
        grep -i 'error' "$log" | tail -n 1 || echo "see the lines above"
    fi
}

fail() {
    tail -n 20 "$log" >&2
    stop "step $number failed: $(cause) (whole log: $log)"
}

logged() {
    "$@" >>"$log" 2>&1 || fail
}

pip_install() {
    logged "$py" -m pip --disable-pip-version-check install --progress-bar off -c constraints.txt "$@"
}

make_venv() {
    if [ -e "$py" ] && ! is_python_3_11 "$py"; then
        echo "      $venv holds another Python and is made anew"
        logged "$python" -m venv --clear "$venv"
    elif ! [ -x "$py" ] || ! "$py" -m pip --version >/dev/null 2>&1 || ! grep -qsF "$PWD/" "$venv/bin/activate"; then
        logged "$python" -m venv "$venv"
    fi
}

# imaug, which mmdet needs, asks for opencv-python and for opencv-python-headless. Both fill the same
# folder; the headless one must be written last, because the other cannot be imported without libGL.
put_headless_opencv_on_top() {
    grep -qs 'headless = True' "$venv"/lib/python3.11/site-packages/cv2/version.py ||
        pip_install --force-reinstall --no-deps opencv-python-headless
}

mmcv_operators_work() {
    "$py" -c "import sys, mmcv.ops
sys.exit($cuda == 1 and mmcv.ops.get_compiling_cuda_version() == 'not available')" >>"$log" 2>&1
}

# Without CUDA=1 the GPUs are hidden, because mmcv's build would otherwise ask for nvcc.
build_mmcv() {
    local memory_gb jobs flags
    flags=("CFLAGS=${CFLAGS:-} -g0" "PATH=$PWD/$venv/bin:$PATH") # pip itself does not put ninja on PATH
    memory_gb=$(awk '/^MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo)
    jobs=$(nproc)
    [ "$jobs" -le "$memory_gb" ] || jobs=$memory_gb
    flags+=("MAX_JOBS=${MAX_JOBS:-$((jobs > 0 ? jobs : 1))}")
    if [ "$cuda" = 1 ]; then
        flags+=("FORCE_CUDA=1")
    else
        flags+=("FORCE_CUDA=0" "CUDA_VISIBLE_DEVICES=")
    fi
    logged env "${flags[@]}" "$py" -m pip --disable-pip-version-check install --progress-bar off \
        -c constraints.txt --no-build-isolation --no-deps "$@" onedl-mmcv
}

# pip may have a copy in its cache that was compiled for another torch, or without CUDA: then once more.
install_mmcv() {
    if mmcv_operators_work; then
        echo "      nothing to do, they work with the installed torch"
        return
    fi
    if [ "$cuda" != 1 ] && ! "$py" -m pip show -q onedl-mmcv 2>/dev/null; then
        build_mmcv
        mmcv_operators_work && return
    fi
    build_mmcv --force-reinstall --no-cache-dir
    mmcv_operators_work || fail
}

if up_to_date; then
    echo "$venv is up to date (tools/doctor.py says what is in it)"
    exit 0
fi
python=$(find_python)
check_machine
wait_for_other_install
if up_to_date; then
    exit 0
fi
trap 'echo "interrupted; make install goes on from here" >&2; exit 130' INT TERM
rm -f "$stamp"
: >"$log"
echo "Installing into $PWD/$venv, about 9 minutes on 2 cores. To watch: tail -f $log"

step "virtual environment ($("$python" --version))"
make_venv
step "torch and torchvision (a download of about 2 GB, 1 to 10 minutes)"
pip_install pip
pip_install 'setuptools>=80,<82' wheel ninja packaging psutil torch torchvision
pip_install onedl-mmengine opencv-python opencv-python-headless # all that mmcv needs to be imported
put_headless_opencv_on_top
step "compiling mmcv's operators (the slow step: about 6 minutes on 2 cores)"
install_mmcv
step "timm, lightning, mmdet, mmseg, hydra and the rest (about 1 minute)"
pip_install --no-build-isolation -e '.[dense,lipschitz,export,dev]'
put_headless_opencv_on_top
step "checking"
logged "$py" -m pip check
mmcv_operators_work || fail

operators=cpu
if cuda=1 mmcv_operators_work; then
    operators=cuda
fi
echo "$(fingerprint) $operators" >"$stamp"
echo "Installed in $((SECONDS / 60)) min $((SECONDS % 60)) s. Next: make demo"
if [ "$operators" = cpu ] && command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    echo "There is a GPU: detection on it needs mmcv's CUDA operators. Type: make install CUDA=1"
fi
