#!/usr/bin/env bash
# Cancels all jobs of the Slurm that slurm_up.sh started in FOLDER, and ends its daemons.
set -uo pipefail
folder=${1:?give the folder of this Slurm}
export SLURM_CONF=$folder/slurm.conf
jobs=$(timeout 10 squeue --noheader --format=%A | sort -u)
# shellcheck disable=SC2086  # job numbers hold no spaces
[ -z "$jobs" ] || timeout 10 scancel $jobs
for ((attempt = 0; attempt < 100; attempt++)); do
    [ -n "$(timeout 10 squeue --noheader)" ] || break
    sleep 0.2
done
for file in "$folder"/run/{slurmd.*,slurmctld,munged}.pid; do
    [ -s "$file" ] || continue
    process=$(cat "$file")
    grep -qzE '(slurmd|slurmctld|munged)$' "/proc/$process/cmdline" 2>/dev/null || continue
    kill "$process"
    for ((attempt = 0; attempt < 50; attempt++)); do
        kill -0 "$process" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL "$process" 2>/dev/null || true
done
