#!/usr/bin/env bash
# Converts by one plan on many nodes of a Slurm cluster, and publishes when all of them are done:
#
#   ninfer-convert plan RECIPE --source DIR -o plan.json --output OUT.ninfer
#   scripts/cluster/slurm_submit.sh plan.json 8 [options of sbatch, such as --partition=cpu --cpus-per-task=16]
#
# Plan, sources and output lie where every node finds them. Prints the number of the last job; nothing is
# submitted when the artifact is there already.
set -euo pipefail
plan=$(realpath "$1") shares=$2
shift 2
here=$(dirname "$(realpath "$0")")

told=$(ninfer-convert prepare --plan "$plan" 2>&1) || { code=$?; printf '%s\n' "$told" >&2; exit "$code"; }
printf '%s\n' "$told" >&2
case $told in *" is complete already") exit 0 ;; esac
array=$(sbatch --parsable --array="0-$((shares - 1))" "$@" "$here/slurm_share.sbatch" "$plan" "$shares")
sbatch --parsable --dependency="afterok:${array%%;*}" --kill-on-invalid-dep=yes "$@" "$here/slurm_finalize.sbatch" "$plan"
