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
# Ray calls a node lost after three checks without an answer: in 20 s or so. Its own values take more than a minute.
export RAY_health_check_initial_delay_ms=${RAY_health_check_initial_delay_ms:-5000}
export RAY_health_check_period_ms=${RAY_health_check_period_ms:-2000}
export RAY_health_check_timeout_ms=${RAY_health_check_timeout_ms:-5000}
export RAY_health_check_failure_threshold=${RAY_health_check_failure_threshold:-3}
# Ray would run trainers and engines at the lowest priority but four: any busy daemon of a node would starve them.
export RAY_worker_niceness=${RAY_worker_niceness:-0}
if [ -n "${MEGATRON_RL_INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$MEGATRON_RL_INTERFACE NCCL_SOCKET_IFNAME=$MEGATRON_RL_INTERFACE
fi

# Jobs that share a node have different ports, and so have nodes that share an address.
first_port=${MEGATRON_RL_FIRST_PORT:-$((20000 + SLURM_JOB_ID * 10 * num_nodes % 10000))}

# Sets `step`: how a command starts on the node $1. The options are explicit because a step that Slurm or NeMo-Run
# started this script in leaves its own in the environment.
step_on() {
    step=(srun --export=ALL --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[$1]}" --cpu-bind=none --mpi=none)
    [ "$num_components" = 1 ] || step+=(--het-group="${components[$1]}")
}

# Sets `step` likewise, with the container if there is one.
contained_step_on() {
    step_on "$1"
    local image=${MEGATRON_RL_CONTAINER:-} mounts=$PWD:$PWD,$logs:$logs${MEGATRON_RL_MOUNTS:+,$MEGATRON_RL_MOUNTS}
    case $image in
    "") ;;
    *.sif | docker://*) step+=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$image") ;;
    *) step+=(--container-image="$image" --container-mounts="$mounts" --container-workdir="$PWD") ;;
    esac
}

# The next three functions are handed to bash on the nodes.
# shellcheck disable=SC2329
address_of_this_node() {
    if [ -n "${MEGATRON_RL_INTERFACE:-}" ]; then
        ip -o -4 addr show dev "$MEGATRON_RL_INTERFACE" | awk '{ sub("/.*", "", $4); print $4; exit }'
    else
        { hostname -I; hostname --ip-address; } | tr ' ' '\n' | grep -m 1 -E '^[0-9]+(\.[0-9]+){3}$'
    fi
}

# shellcheck disable=SC2329
start_ray() { # NODE POOL HEAD-ADDRESS HEAD-PORT FIRST-PORT IS-HEAD READY-SECONDS
    # Some ways to send the signal before the time limit reach every process of the job; it is for the command alone.
    trap '' USR1
    eval "${MEGATRON_RL_ENVIRONMENT:-}"
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
    eval "${MEGATRON_RL_ENVIRONMENT:-}"
    local file=$1 seconds=$2 names=$3
    # shellcheck disable=SC2086  # the names of nodes hold no spaces
    python -m megatron_rl.cluster.joined "$seconds" $names || exit 69
    : >"$file"
    shift 3
    exec "$@"
}

step_on 0
head=$("${step[@]}" bash -c "$(declare -f address_of_this_node); address_of_this_node") || head=
[ -n "$head" ] || fail 64 "${nodes[0]} has no IPv4 address${MEGATRON_RL_INTERFACE:+ on $MEGATRON_RL_INTERFACE}"
export RAY_ADDRESS=$head:$first_port
say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: Ray at $RAY_ADDRESS, $num_nodes nodes, logs in $logs"

rays=() files=()
for ((i = 0; i < num_nodes; i++)); do
    files[i]=$logs/${SLURM_JOB_ID}_ray_${pools[i]:+${pools[i]}_}${nodes[i]}.log
    is_head=no
    ((i > 0)) || is_head=yes
    contained_step_on "$i"
    # RAY_ADDRESS would make the head join another Ray.
    env -u RAY_ADDRESS "${step[@]}" bash -c "$(declare -f address_of_this_node start_ray); start_ray \"\$@\"" start_ray \
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
"${step[@]}" bash -c "$(declare -f run_when_ready); run_when_ready \"\$@\"" run_when_ready \
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
