#!/usr/bin/env bash
# Runs a command as on a machine where nothing has run yet: with an empty folder as home and for temporary files, and
# without variables that name caches (of vLLM, Hugging Face, torch, Triton, matplotlib, tiktoken, pip). The folder is
# deleted at the end. The exit status is the command's.
#
#   tools/bench/new_machine.sh make demo
set -uo pipefail
: "${1:?give a command}"
home=$(mktemp -d /tmp/new.XXXX) # short, because the paths of sockets have at most 107 characters
trap 'rm -rf "$home"' EXIT
for name in $(compgen -e); do
    case $name in
        XDG_*_HOME | HF_HOME | TORCH_HOME | TRITON_HOME | SENTENCE_TRANSFORMERS_HOME | *_CACHE | *_CACHE_DIR | \
            *_CACHE_ROOT | *_CACHE_PATH | TORCH_EXTENSIONS_DIR | MPLCONFIGDIR | PYTHONPYCACHEPREFIX | TMP | TEMP)
            unset "$name" ;;
    esac
done
# Where packages come from is a setting of the machine, and no cache.
[ ! -f "$HOME/.config/pip/pip.conf" ] || export PIP_CONFIG_FILE=${PIP_CONFIG_FILE:-$HOME/.config/pip/pip.conf}
HOME=$home TMPDIR=$home "$@"
