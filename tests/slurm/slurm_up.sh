#!/usr/bin/env bash
# Starts a real Slurm on this machine, for tests: one controller, and one daemon for each of three nodes.
#
#   tests/slurm/slurm_up.sh FOLDER     FOLDER gets its keys, states and logs; then: export SLURM_CONF=FOLDER/slurm.conf
#
# Everything listens on 127.0.0.1. Nothing needs systemd. Debian's packages are installed if they are missing, as root.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
folder=${1:?give the folder of this Slurm}
num_nodes=3
port=${SLURM_TEST_PORT:-26817}
host=$(hostname -s)
user=$(id -un)
export SLURM_CONF=$folder/slurm.conf

if ! command -v slurmctld slurmd munged sbatch >/dev/null; then
    echo "slurm_up: installing Slurm and munge from Debian's packages"
    if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge; } \
        >"${TMPDIR:-/tmp}/slurm_up_apt.log" 2>&1; then
        tail -n 20 "${TMPDIR:-/tmp}/slurm_up_apt.log" >&2
        echo "slurm_up: Slurm cannot be installed (see above): as root run apt-get install slurm-wlm munge" >&2
        exit 1
    fi
fi

umask 022
mkdir -p "$folder"/{munge,run,log,state,dev}
chmod 755 "$folder"
chmod 711 "$folder/munge"
[ -s "$folder/munge/key" ] || (umask 077 && head -c 1024 /dev/urandom >"$folder/munge/key")
for ((i = 1; i <= num_nodes; i++)); do mkdir -p "$folder/spool/n$i"; done
# Slurm counts character devices. These stand for GPUs, so that --gpus-per-node is accepted.
for i in 0 1; do ln -sfn /dev/null "$folder/dev/gpu$i"; done
echo "NodeName=n[1-$num_nodes] Name=gpu Flags=nvidia_gpu_env File=$folder/dev/gpu[0-1]" >"$folder/gres.conf"

# A job that is put back into the queue waits for its credential to expire: cred_expire. A silent node is down after
# SlurmdTimeout. The partition `urgent` preempts jobs of the partition `main`: they get their own signal (--signal) and
# have GraceTime, after which they go back into the queue.
cat >"$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SrunPortRange=$((port + 100))-$((port + 299))
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd.%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=3600
SlurmdTimeout=10
NodeName=n[1-$num_nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + num_nodes))] CPUs=2 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=n[1-$num_nodes] Default=YES PriorityTier=1 GraceTime=120 State=UP
PartitionName=urgent Nodes=n[1-$num_nodes] PriorityTier=2 State=UP
END

is_up() { [ -s "$folder/run/$1.pid" ] && kill -0 "$(cat "$folder/run/$1.pid")" 2>/dev/null; }
is_up munged || munged --key-file="$folder/munge/key" --socket="$folder/munge/socket" --seed-file="$folder/munge/seed" \
    --pid-file="$folder/run/munged.pid" --log-file="$folder/log/munged.log" --num-threads=2 --force
is_up slurmctld || slurmctld -f "$SLURM_CONF"
for ((i = 1; i <= num_nodes; i++)); do is_up "slurmd.n$i" || slurmd -f "$SLURM_CONF" -N "n$i"; done

for ((attempt = 0; attempt < 150; attempt++)); do
    up=$(sinfo --noheader --Node --partition=main --format=%t 2>/dev/null | grep -cE '^(idle|mix|alloc|comp)$' || true)
    [ "$up" != "$num_nodes" ] || exit 0
    sleep 0.2
done
sinfo --Node --long || true
tail -n 20 "$folder"/log/*.log >&2
echo "slurm_up: only $up of $num_nodes nodes came up (see above)" >&2
exit 1
