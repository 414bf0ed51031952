#!/usr/bin/env bash
# Runs the tests that need a Slurm cluster on one that has this machine as its only node; needs root and Debian.
# The daemons and all they write end with the script: their configuration lies in a directory of its own.
# Exit code 77: no cluster could be had here, so that nothing was tested.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    slurm-wlm munge >/dev/null || { echo "Slurm cannot be installed here" >&2; exit 77; }
fi

work=$(mktemp -d)
pids=()
finish() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$work"
}
trap finish EXIT
mkdir "$work/state" "$work/spool"
chmod 755 "$work"
host=$(hostname -s)
dd if=/dev/urandom of="$work/munge.key" bs=128 count=1 status=none
chmod 600 "$work/munge.key"
cat >"$work/slurm.conf" <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$(id -un)
AuthType=auth/munge
# A job that is queued again waits as long as its credential lives.
AuthInfo=socket=$work/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
ReturnToService=2
SchedulerParameters=requeue_delay=1,sched_interval=1,bf_interval=1
MinJobAge=3600
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF

munged --foreground --force --key-file="$work/munge.key" --socket="$work/munge.socket" --pid-file="$work/munged.pid" \
  --seed-file="$work/munge.seed" >"$work/munged.log" 2>&1 &
pids+=($!)
for _ in $(seq 100); do [[ -S $work/munge.socket ]] && break; sleep 0.1; done
export SLURM_CONF=$work/slurm.conf
slurmctld -D -c >"$work/slurmctld.log" 2>&1 &
pids+=($!)
slurmd -D >"$work/slurmd.log" 2>&1 &
pids+=($!)
for _ in $(seq 300); do [[ $(sinfo --noheader --format=%t 2>/dev/null) == idle ]] && break; sleep 0.1; done
if [[ $(sinfo --noheader --format=%t 2>/dev/null) != idle ]]; then
  tail -n 20 "$work"/*.log >&2
  echo "Slurm's daemons do not run here" >&2
  exit 77
fi
# A daemon has its moods: what is wrong with the scripts is wrong twice.
python -m pytest -q -m slurm "$@" || python -m pytest -q -m slurm "$@"
