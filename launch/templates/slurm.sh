#!/bin/bash
#SBATCH --job-name={{ name }}
{% if partition %}
#SBATCH --partition={{ partition }}
{% endif %}
{% if account %}
#SBATCH --account={{ account }}
{% endif %}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node={{ tasks_per_node or gpus_per_node or 1 }}
{% if gpus_per_node %}
# With --gpus-per-task the GPUs would have wrong numbers in JAX.
#SBATCH --gpus-per-node={{ gpus_per_node }}
{% endif %}
{% if cpus_per_task %}
#SBATCH --cpus-per-task={{ cpus_per_task }}
{% endif %}
{% if time %}
#SBATCH --time={{ time }}
{% endif %}
{% if tasks %}
#SBATCH --array=0-{{ tasks | length - 1 }}
{% endif %}
#SBATCH --output={{ log or ("dist_ens-%A_%a.log" if tasks else "dist_ens-%j.log") }}
#SBATCH --open-mode=append
#SBATCH --signal=TERM@{{ grace_secs }}
#SBATCH --requeue

# Slurm sends SIGTERM to this script, too, when it ends the job. The script then waits for srun.
trap : TERM
{% if setup %}

# Without its setup, the job would run with other software than the user asked for.
if [ ! -r {{ setup | sh }} ]; then
  echo "This node cannot read the file of --setup: "{{ setup | sh }} >&2
  exit 2
fi
source {{ setup | sh }}
{% endif %}

restarts=${SLURM_RESTART_COUNT:-0}
{% if tasks %}
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # The id of the array would requeue all tasks.

case $SLURM_ARRAY_TASK_ID in
{% for flags in tasks %}
{{ loop.index0 }}) set -- {{ flags | map("sh") | join(" ") }} "$@" ;;
{% endfor %}
esac
{% else %}
job=$SLURM_JOB_ID
{% endif %}

# The first task that fails says why the job ends. srun then ends the others with SIGTERM, and
# returns the highest code of all tasks. So the first task writes its code to a file. A task that
# was preempted waits for those that still save.
first=$PWD/.dist_ens-$job-$restarts
task='trap : TERM HUP USR1
  "$@"
  rc=$?
  [ "$rc" = 0 ] || (set -o noclobber; echo "$rc" > "$0") 2> /dev/null
  [ "$rc" != 42 ] || sleep 5
  exit "$rc"'

srun --kill-on-bad-exit=1 \
{% if cpus_per_task %}
  --cpus-per-task={{ cpus_per_task }} \
{% endif %}
  bash -c "$task" "$first" \
  {{ python | sh }} -P -m launch.{{ verb }} \
{% for word in arguments %}
  {{ word | sh }} \
{% endfor %}
  "$@"
rc=$?
[ ! -s "$first" ] || rc=$(< "$first")
rm -f "$first"

case $rc in
{{ restarted | join(" | ") }})
  # A job that is cancelled, or that Slurm requeues itself, is not RUNNING any more.
  if [ "$(squeue --noheader --jobs="$job" --format=%T)" != RUNNING ]; then
    echo "Exit code $rc. Slurm ends the job, so the script does not requeue it."
  elif ((restarts >= {{ max_restarts }})); then
    echo "Exit code $rc after $restarts restarts, the limit of --max_restarts. Submit it again."
  else
    echo "Exit code $rc. The job is requeued: restart $((restarts + 1)) of at most {{ max_restarts }}."
    scontrol requeue "$job"
  fi
  ;;
esac
exit "$rc"
