#!/bin/bash
{% if action == "run" %}
# Starts a command on all workers of a TPU, or on none of them.
{% else %}
# Prints the log of worker 0 of a TPU, and ends with the exit code of its command.
{% endif %}

{% set where = "--zone=" ~ (zone | sh) ~ (" --project=" ~ (project | sh) if project else "") %}
{% if instance_group %}
workers=$(gcloud compute instance-groups managed list-instances {{ name | sh }} {{ where }} \
  --format='value(name)') || exit 1
if [ -z "$workers" ]; then
  echo "error: The instance group has no VM. Wait until its VMs are RUNNING." >&2
  exit 1
fi
on_worker() { gcloud compute ssh "$1" {{ where }} --command="$2"; }
{% else %}
workers={{ slices | join(" ") | sh }}
on_worker() {
  gcloud compute tpus tpu-vm ssh "$1" {{ where }} --worker={{ "all" if action == "run" else 0 }} --command="$2"
}
{% endif %}

{% if action == "run" %}
# The command is detached from the connection. A lock, which its children keep, refuses a second
# command while one of them holds the TPU. A login shell finds what pip installed for the user. JAX
# reads the slices from the metadata of the VM, but would believe variables of another run first.
IFS= read -r -d '' start << 'ON_WORKER'
mkdir -p ~/.dist_ens
exec 9> ~/.dist_ens/lock
if ! flock --nonblock 9; then
  echo "A command still runs on this worker. Wait for it, or end its processes." >&2
  exit 1
fi
rm -f ~/.dist_ens/exit_code
nohup setsid bash -l >> ~/.dist_ens/log 2>&1 << 'DETACHED' &
unset MEGASCALE_COORDINATOR_ADDRESS MEGASCALE_NUM_SLICES MEGASCALE_SLICE_ID MEGASCALE_PORT
dist-ens {{ command | map("sh") | join(" ") }} < /dev/null
echo $? > ~/.dist_ens/new_code
mv ~/.dist_ens/new_code ~/.dist_ens/exit_code
DETACHED
echo $! > ~/.dist_ens/pid
echo {{ run_id }} > ~/.dist_ens/run
ON_WORKER

# It ends this run, and no other.
IFS= read -r -d '' stop << 'ON_WORKER'
[ "$(cat ~/.dist_ens/run 2> /dev/null)" != {{ run_id }} ] ||
  kill -TERM -- "-$(cat ~/.dist_ens/pid)" 2> /dev/null || true
ON_WORKER

tried=""
for worker in $workers; do
  tried="$tried $worker"
  if ! on_worker "$worker" "$start"; then
    # The workers that have started would wait for those that have not.
    for each in $tried; do
      on_worker "$each" "$stop" || echo "The command may still run on $each." >&2
    done
    echo "error: The command did not start on $worker, for the reason above, so it was stopped on" \
      "all workers. Remove the cause, and run the same command again." >&2
    exit 1
  fi
done
{% else %}
# A command that was killed together with its shell has no exit code, and gets that of a lost host.
IFS= read -r -d '' follow << 'ON_WORKER'
{% if instance_group %}
[ "$(curl -sf -H 'Metadata-Flavor: Google' http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number)" = 0 ] || exit 100
{% endif %}
if [ ! -e ~/.dist_ens/pid ]; then
  echo "No command was started on this TPU." >&2
  exit 2
fi
tail -n 1000 --pid="$(cat ~/.dist_ens/pid)" -F ~/.dist_ens/log
exit "$(cat ~/.dist_ens/exit_code 2> /dev/null || echo 134)"
ON_WORKER

{% if instance_group %}
for worker in $workers; do
  on_worker "$worker" "$follow"
  code=$?
  [ "$code" = 100 ] || exit "$code"
done
echo "error: No VM of the instance group says that it is worker 0 of a TPU slice." >&2
exit 1
{% else %}
on_worker "${workers%% *}" "$follow"
{% endif %}
{% endif %}
