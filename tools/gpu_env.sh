#!/usr/bin/env bash
# Makes .venv-gpu: the GPU packages of requirements/gpu.lock, Transformer Engine's extension for torch from its source,
# and this project. It needs Linux x86-64, Python 3.11 or 3.12, a C++ compiler and 20 GB of disk, and no GPU. A start
# that was ended goes on with the part that it was in. It prints the seconds of each part and the size. The parts are
# environment, torch, packages, extension, project and check; `tools/gpu_env.sh torch packages` does these alone.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/gpu.lock folder=${VENV:-.venv-gpu} python=${PYTHON:-python3}
source_package=$(grep '^transformer_engine_torch==' "$lock")

log=$(mktemp)
trap 'rm -f "$log"' EXIT
part() { # NAME COMMAND...: does nothing if this part was done with the same lock and the same script
    local name=$1 start=$SECONDS stamp
    shift
    stamp=$(cat "$lock" tools/gpu_env.sh | sha256sum)
    [ "$(cat "$folder/$name.done" 2>/dev/null)" = "$stamp" ] && return
    echo "gpu-env: $name"
    "$@" >>"$log" 2>&1 || { tail -n 25 "$log" >&2; echo "gpu-env: '$name' failed; see above, then run the same command again" >&2; exit 1; }
    echo "$stamp" >"$folder/$name.done"
    echo "gpu-env: $name took $((SECONDS - start)) s; $(du -sh "$folder" | cut -f1) in $folder"
}
install() { "$folder/bin/python" -m pip install --disable-pip-version-check "$@"; }

environment() { [ -x "$folder/bin/python" ] || "$python" -m venv "$folder"; }
# === takes the CUDA build also where an index offers 2.13.0+cpu first.
torch() { install "$(grep '^torch==' "$lock" | sed 's/==/===/')" -c <(grep -v '^torch==' "$lock"); }
packages() { install --no-deps -r <(grep -v '^torch==\|^transformer_engine_torch==' "$lock"); }
# The extension is C++ without kernels. It needs CUDA's headers, which the wheels have, and asks nvcc for its version.
# Without NVTE_PYTORCH_FORCE_BUILD its setup.py would download a binary that no hash protects.
extension() {
    local nvidia
    nvidia=$("$folder/bin/python" -c 'import nvidia; print(list(nvidia.__path__)[0])')
    CUDA_HOME=$nvidia/cu13 CPATH=$nvidia/cu13/include:$nvidia/cudnn/include:$nvidia/nccl/include \
        NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS=${MAX_JOBS:-$(nproc)} TORCH_CUDA_ARCH_LIST=9.0 \
        install --no-deps --no-build-isolation --no-binary transformer_engine_torch "$source_package"
}
project() { install --no-deps --no-build-isolation -e .; }
# A missing package, or an API that has changed, ends an import. slurm.launch needs NeMo-Run, and tools.docs what builds
# the site; neither is installed here.
check() {
    "$folder/bin/python" -m pip check && "$folder/bin/python" - <<'END'
import importlib, pkgutil, megatron_rl
for module in pkgutil.walk_packages(megatron_rl.__path__, "megatron_rl."):
    if not module.name.endswith((".__main__", ".slurm.launch")) and ".tools.docs" not in module.name:
        importlib.import_module(module.name)
END
}

mkdir -p "$folder"
[ $# -gt 0 ] || set -- environment torch packages extension project check
for name; do part "$name" "$name"; done
