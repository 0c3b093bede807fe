#!/usr/bin/env bash
# Starts Ray on every node of a Slurm allocation, runs a command on the first node, and stops Ray.
#
#   salloc --nodes=2 slurm/ray_up.sh python -m megatron_rl grpo configs/... cluster.ray_address=auto
#
# The command finds Ray through RAY_ADDRESS and RAY_AUTH_TOKEN. The exit status is that of the command, or
#   64  the allocation or a variable is wrong
#   69  a node was lost: Ray did not start on it, or ended on it and then the command failed
# The variables MEGATRON_RL_... are described in slurm/README.md.
set -uo pipefail

say() { echo "ray_up: $*" >&2; }
fail() {
    say "${*:2}"
    exit "$1"
}

[ $# -gt 0 ] || fail 64 "give the command to run as arguments"
[ -n "${SLURM_JOB_ID:-}" ] || fail 64 "SLURM_JOB_ID is not set; run this inside of sbatch or salloc"

ready_s=${MEGATRON_RL_READY_S:-600}
logs=${MEGATRON_RL_LOGS:-$PWD/slurm_logs}
mkdir -p "$logs" || fail 64 "the folder $logs for logs cannot be made; set MEGATRON_RL_LOGS"
logs=$(cd "$logs" && pwd)

# The nodes, and for each its pool (train, rollout, or none) and its component of a heterogeneous job.
nodes=() pools=() components=()
num_components=${SLURM_HET_SIZE:-1}
for ((component = 0; component < num_components; component++)); do
    list=SLURM_JOB_NODELIST
    [ "$num_components" = 1 ] || list=SLURM_JOB_NODELIST_HET_GROUP_$component
    names=$(scontrol show hostnames "${!list}") || fail 64 "scontrol does not know the nodes of job $SLURM_JOB_ID"
    while read -r name; do
        nodes+=("$name") components+=("$component")
        if [ "$num_components" = 1 ]; then pools+=(""); elif [ "$component" = 0 ]; then pools+=(train); else pools+=(rollout); fi
    done <<<"$names"
done
num_nodes=${#nodes[@]}
if [ -n "${MEGATRON_RL_TRAIN_NODES:-}" ]; then
    train=$MEGATRON_RL_TRAIN_NODES
    [[ $train =~ ^[1-9][0-9]*$ ]] || fail 64 "MEGATRON_RL_TRAIN_NODES is '$train'; give the number of nodes that train"
    [ "$num_components" = 1 ] ||
        fail 64 "this is a heterogeneous job, whose first component trains; do not set MEGATRON_RL_TRAIN_NODES"
    [ "$train" -lt "$num_nodes" ] ||
        fail 64 "MEGATRON_RL_TRAIN_NODES is $train, but the job has $num_nodes nodes; leave one for rollouts, or unset it"
    for ((i = 0; i < num_nodes; i++)); do
        if ((i < train)); then pools[i]=train; else pools[i]=rollout; fi
    done
fi

# Only processes that know this token may talk to this Ray. It travels in the environment, never on a command line.
RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
# Ray calls a node lost after five failed checks: 50 s, or 100 s if nothing answers. Its own period is 3 s, but a node
# that reads a terabyte of weights may be silent for longer, and losing it costs the steps since the checkpoint.
export RAY_health_check_period_ms=${RAY_health_check_period_ms:-10000}
# Ray would run trainers and engines at the lowest priority but four: any busy daemon of a node would starve them.
export RAY_worker_niceness=${RAY_worker_niceness:-0}
if [ -n "${MEGATRON_RL_INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$MEGATRON_RL_INTERFACE NCCL_SOCKET_IFNAME=$MEGATRON_RL_INTERFACE
fi

# Compilers write to the node itself. Their own places are in the home directory, which hundreds of processes would
# share, and which may be missing in a container.
caches=/tmp/megatron_rl_$(id -u)
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$caches/triton} VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$caches/vllm}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$caches/inductor}

# Jobs that share a node have different ports, and so have nodes that share an address.
first_port=${MEGATRON_RL_FIRST_PORT:-$((20000 + SLURM_JOB_ID * 10 * num_nodes % 10000))}

# Sets `step`: how a command starts on the node $1. The options are explicit because a step that Slurm or NeMo-Run
# started this script in leaves its own in the environment.
step_on() {
    step=(srun --export=ALL --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[$1]}" --cpu-bind=none --mpi=none)
    [ "$num_components" = 1 ] || step+=(--het-group="${components[$1]}")
}

# Sets `step` likewise, with the container if there is one. Enroot gives every container an empty /tmp, so that the
# command would not find the sockets of its node's Ray: all containers of a node have the node's /tmp.
contained_step_on() {
    step_on "$1"
    local mounts=/tmp:/tmp,$PWD:$PWD,$logs:$logs${MEGATRON_RL_MOUNTS:+,$MEGATRON_RL_MOUNTS}
    case $image in
    "") ;;
    *.sif) step+=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$image") ;;
    *) step+=(--container-image="$image" --container-mounts="$mounts" --container-workdir="$PWD") ;;
    esac
}

# The next four functions are handed to bash on the nodes.
# shellcheck disable=SC2329
address_of_this_node() { # ANOTHER-NODE
    if [ -n "${MEGATRON_RL_INTERFACE:-}" ]; then
        ip -o -4 addr show dev "$MEGATRON_RL_INTERFACE" | awk '{ sub("/.*", "", $4); print $4; exit }'
        return
    fi
    # The first address of a node may belong to docker0, so the address of its route to another node comes before it.
    local other
    other=$(getent ahostsv4 "${1:-}" | awk '{ print $1; exit }')
    {
        [ -z "$other" ] || ip -4 route get "$other" | sed -n '/^local/d; s/.* src \([0-9.]*\).*/\1/p'
        hostname -I
        hostname --ip-address
    } | tr ' ' '\n' | grep -m 1 -E '^[0-9]+(\.[0-9]+){3}$'
}

# shellcheck disable=SC2329
prepare_node() {
    # Slurm hands on the limit of the shell that submitted the job, often 1,024 files. Only drivers of Ray raise theirs.
    (($(ulimit -Sn) >= 65536)) || ulimit -Sn 65536 2>/dev/null || ulimit -Sn hard
    eval "${MEGATRON_RL_ENVIRONMENT:-}"
}

# shellcheck disable=SC2329
start_ray() { # NODE POOL HEAD-ADDRESS HEAD-PORT FIRST-PORT IS-HEAD READY-SECONDS
    # Some ways to send the signal before the time limit reach every process of the job; it is for the command alone.
    trap '' USR1
    prepare_node
    local options=(
        --node-name="$1" --num-cpus="$SLURM_CPUS_ON_NODE" --temp-dir="/tmp/ray_$SLURM_JOB_ID"
        --node-manager-port="$(($5 + 1))" --object-manager-port="$(($5 + 2))" --runtime-env-agent-port="$(($5 + 3))"
        --dashboard-agent-listen-port="$(($5 + 4))" --dashboard-agent-grpc-port="$(($5 + 5))"
        --metrics-export-port="$(($5 + 6))" --min-worker-port=0 --max-worker-port=0 --disable-usage-stats --block
    )
    [ -z "$2" ] || options+=(--labels="pool=$2")
    if [ "$6" = yes ]; then
        exec ray start --head --node-ip-address="$3" --port="$4" --ray-client-server-port="$(($5 + 7))" \
            --include-dashboard=false "${options[@]}"
    fi
    [ -z "${MEGATRON_RL_INTERFACE:-}" ] || options+=(--node-ip-address="$(address_of_this_node)")
    until (exec 3<>"/dev/tcp/$3/$4") 2>/dev/null; do
        if ((SECONDS > $7)); then
            echo "$1 cannot reach the first node at $3:$4; name the interface between the nodes: MEGATRON_RL_INTERFACE" >&2
            exit 69
        fi
        sleep 0.5
    done
    exec ray start --address="$3:$4" "${options[@]}"
}

# shellcheck disable=SC2329
run_when_ready() { # READY-FILE READY-SECONDS NODES COMMAND ...
    prepare_node
    local file=$1 seconds=$2 names=$3
    # shellcheck disable=SC2086  # the names of nodes hold no spaces
    python -m megatron_rl.cluster.wait_for_nodes "$seconds" $names || exit 69
    : >"$file"
    shift 3
    exec "$@"
}

step_on 0
other=
[ "$num_nodes" = 1 ] || other=$(scontrol show node "${nodes[1]}" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
head=$("${step[@]}" bash -c "$(declare -f address_of_this_node); address_of_this_node \"\$@\"" \
    address_of_this_node "$other") || head=
[ -n "$head" ] || fail 64 "${nodes[0]} has no IPv4 address${MEGATRON_RL_INTERFACE:+ on $MEGATRON_RL_INTERFACE}"
export RAY_ADDRESS=$head:$first_port
say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: Ray at $RAY_ADDRESS, $num_nodes nodes, logs in $logs"

# An image of a registry is imported once. Otherwise each step would import it for itself.
image=${MEGATRON_RL_CONTAINER:-}
import=()
case $image in
"" | *.sif | [./]*) ;;
docker://*) file=$logs/$SLURM_JOB_ID.sif && import=(apptainer pull "$file" "$image") ;;
*://*) file=$logs/$SLURM_JOB_ID.sqsh && import=(enroot import --output "$file" "$image") ;;
*) file=$logs/$SLURM_JOB_ID.sqsh && import=(enroot import --output "$file" "docker://$image") ;;
esac
if [ ${#import[@]} != 0 ]; then
    trap 'rm -f "$file"' EXIT
    rm -f "$file" # of a start of this job that was killed
    say "${import[*]}"
    "${step[@]}" "${import[@]}" || fail 64 "the image $image cannot be imported (see above)"
    image=$file
fi

rays=() files=()
for ((i = 0; i < num_nodes; i++)); do
    files[i]=$logs/${SLURM_JOB_ID}_ray_${pools[i]:+${pools[i]}_}${nodes[i]}.log
    is_head=no
    ((i > 0)) || is_head=yes
    contained_step_on "$i"
    # RAY_ADDRESS would make the head join another Ray.
    env -u RAY_ADDRESS "${step[@]}" bash -c "$(declare -f address_of_this_node prepare_node start_ray); start_ray \"\$@\"" start_ray \
        "${nodes[i]}" "${pools[i]}" "$head" "$first_port" "$((first_port + 10 * i))" "$is_head" "$ready_s" \
        >>"${files[i]}" 2>&1 </dev/null &
    rays[i]=$!
done

is_running() { kill -0 "$1" 2>/dev/null; }

# This file says that every node has joined Ray in this start of the job.
ready=$logs/${SLURM_JOB_ID}_ready_${SLURM_RESTART_COUNT:-0}
rm -f "$ready"
contained_step_on 0
command=
trap '[ -z "$command" ] || kill -s USR1 "$command"' USR1
trap '[ -z "$command" ] || kill -s TERM "$command"' TERM
trap '[ -z "$command" ] || kill -s INT "$command"' INT
"${step[@]}" bash -c "$(declare -f prepare_node run_when_ready); run_when_ready \"\$@\"" run_when_ready \
    "$ready" "$ready_s" "${nodes[*]}" "$@" &
command=$!

is_lost=no
while is_running "$command"; do
    sleep 0.2  # `wait -n` would miss a process that ends a moment before it
    for ((i = 0; i < num_nodes; i++)); do
        if [ -z "${rays[i]:-}" ] || is_running "${rays[i]}"; then continue; fi
        say "Ray on ${nodes[i]} ended; the end of ${files[i]}:"
        tail -n 15 "${files[i]}" >&2
        unset "rays[i]"
        is_lost=yes
        echo "$(date +%FT%T) ${nodes[i]}" >>"$logs/${SLURM_JOB_ID}_lost_nodes"
        if [ ! -e "$ready" ] || ((i == 0)); then
            say "the run cannot go on without ${nodes[i]}"
            kill -s TERM "$command" 2>/dev/null
        fi
    done
done
wait "$command"
status=$?
case $is_lost$status in yes0 | yes138 | no*) ;; *) status=69 ;; esac

# The steps get SIGTERM, on which Ray ends its processes. What does not end then, Slurm kills at the end of the job.
[ ${#rays[@]} = 0 ] || kill "${rays[@]}" 2>/dev/null
end=$((SECONDS + 30))
for ray in "${rays[@]}"; do
    while is_running "$ray" && ((SECONDS < end)); do sleep 0.2; done
done
exit "$status"
