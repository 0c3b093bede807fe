#!/usr/bin/env bash
# Runs a command as on a machine where nothing has run yet: with an empty folder as home and for temporary files, and
# without variables that name caches (of vLLM, Hugging Face, torch, Triton, matplotlib, tiktoken, pip). The folder is
# deleted at the end. The exit status is the command's.
#
#   tools/bench/new_machine.sh make demo
set -uo pipefail
home=$(mktemp -d /tmp/new.XXXX) # short, because the paths of sockets have at most 107 characters
trap 'rm -rf "$home"' EXIT
for name in $(compgen -e); do
    case $name in
        XDG_*_HOME | HF_* | HUGGINGFACE_* | TRANSFORMERS_* | TORCH_HOME | TORCHINDUCTOR_* | TRITON_* | VLLM_* | \
            *_CACHE | *_CACHE_DIR | *_CACHE_ROOT | MPLCONFIGDIR) unset "$name" ;;
    esac
done
HOME=$home TMPDIR=$home "$@"
