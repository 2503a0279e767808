"""The JobSet that `dist-ens k8s` writes, against the schemas and the rules of the controllers."""

import json
import pathlib
import re

import jsonschema
import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import dist_ens
from dist_ens.ground.errors import UserError
from launch.jobset import render

pytestmark = pytest.mark.quick
SCHEMA = json.loads((pathlib.Path(__file__).parent / "schemas" / "jobset.json").read_text())
TRAIN = ("train", "--config=configs/digits.py", "--workdir=/runs/digits")
DEFAULTS = {
    "name": "digits",
    "image": "example.com/dist-ens:1",
    "mount_path": "/runs",
    "volume_claim": "runs",
    "grace_secs": 120,
    **dict.fromkeys(("num_slices", "num_nodes"), 1),
    **{"chips_per_node": 4, "gpus_per_node": 0, "node_selector": [], "secret_env": []},
    **dict.fromkeys(("tpu_accelerator", "tpu_topology", "namespace", "queue", "cpu", "memory")),
}
ALL_OPTIONS = {
    "namespace": "team",
    "queue": "default",
    "secret_env": ["WANDB_API_KEY=wandb/key"],
    "node_selector": ["cloud.google.com/gke-spot=true"],
    "cpu": "8",
    "memory": "16Gi",
}
SLICE = {"tpu_accelerator": "tpu-v6e-slice", "tpu_topology": "4x4"}
SLICES = {"tpu_accelerator": "tpu-v5p-slice", "tpu_topology": "2x4x4", "num_slices": 3}
HARDWARE = [SLICE, SLICES, {"num_nodes": 2, "gpus_per_node": 8}, {"num_nodes": 4}, {}]


def rendered(command=TRAIN, **changes):
    """The JobSet as a reader of the file sees it."""
    return yaml.safe_load(render(command, **DEFAULTS | changes))


def strict(schema):
    """The schema without keys that it does not name."""
    if isinstance(schema, list):
        return [*map(strict, schema)]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return closed | {name: strict(part) for name, part in schema.items()}


VALIDATOR = jsonschema.Draft202012Validator(strict(SCHEMA))


def check(document):
    """Raises if a JobSet, the Job in it or the pod in that is not as its schema demands."""
    VALIDATOR.validate(document)
    head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": document["metadata"]}
    kubernetes_validate.validate({**head, "spec": parts_of(document)[0]}, "1.35", strict=True)


def parts_of(document):
    """The specs of the Job and of its pod, and the container."""
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    return job, pod, pod["containers"][0]


FULL = rendered(**ALL_OPTIONS, **SLICES)


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["few options", "all options"])
@pytest.mark.parametrize("hardware", HARDWARE, ids=["slice", "slices", "gpus", "cpus", "one cpu"])
def test_a_jobset_is_valid(hardware, options):
    check(rendered(**options, **hardware))


def reason_of_failure(job, pods):
    """Why the Job controller fails a Job with these exit codes and conditions of its pods."""
    failed = [pod for pod in pods if pod[0] != 0]
    for code, conditions in failed:
        for rule in job["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            patterns = rule.get("onPodConditions", [])
            is_code = codes is not None and {"In": code in codes["values"]}[codes["operator"]]
            if is_code or any((each["type"], each["status"]) in conditions for each in patterns):
                assert rule["action"] == "FailJob"
                return "PodFailurePolicy"
    return "BackoffLimitExceeded" if len(failed) > job["backoffLimit"] else None


def action(document, *jobs):
    """What the JobSet controller does after the ends of all Jobs; None if it is complete."""
    reasons = [reason_of_failure(parts_of(document)[0], pods) for pods in jobs]
    policy, failed = document["spec"]["failurePolicy"], [*filter(None, reasons)]
    for rule in policy["rules"]:
        if any(reason in rule["onJobFailureReasons"] for reason in failed):
            return rule["action"]
    return None if not failed else "RestartJobSet" if policy["maxRestarts"] else "FailJobSet"


RESTARTS, FAILS = "RestartJobSetAndIgnoreMaxRestarts", "FailJobSet"


def test_the_controllers_restart_after_exactly_the_codes_of_a_preemption():
    document = rendered()
    # 42 preempted, 134 SIGABRT, 137 SIGKILL, 139 SIGSEGV, 143 SIGTERM.
    expected = {code: FAILS for code in range(256)} | {0: None}
    expected |= dict.fromkeys((42, 134, 137, 139, 143), RESTARTS)
    for code in range(256):
        assert action(document, [(code, set())]) == expected[code]
        disrupted = None if code == 0 else RESTARTS
        assert action(document, [(code, {("DisruptionTarget", "True")})]) == disrupted
        assert action(document, [(code, {("DisruptionTarget", "False")})]) == expected[code]
    # An error in one slice fails the set though another slice was killed.
    assert action(FULL, [(134, set())], [(1, set())]) == FAILS
    assert action(FULL, [(1, set())], [(134, set())]) == FAILS
    assert action(FULL, [(0, set())], [(42, set())]) == RESTARTS


def test_the_file_has_what_the_webhooks_of_the_controllers_demand():
    job, pod, container = parts_of(FULL)
    assert pod["restartPolicy"] == "Never"
    for rule in FULL["spec"]["failurePolicy"]["rules"]:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        # JobSet knows five reasons. These are the two that such a Job can have.
        assert {*rule["onJobFailureReasons"]} <= {"BackoffLimitExceeded", "PodFailurePolicy"}
    codes = job["podFailurePolicy"]["rules"][1]["onExitCodes"]
    assert codes["values"] == [42, 134, 137, 139, 143]  # sorted, without repetition and without 0
    assert codes["containerName"] == container["name"]


def test_slices_have_the_nodes_of_their_topology_and_what_libtpu_needs():
    for topology, nodes in [("4x4", 4), ("2x2", 1), ("4x4x8", 32)]:  # 4 chips on a node
        job, *_ = parts_of(rendered(**SLICE | {"tpu_topology": topology}))
        assert job["parallelism"] == nodes
    job, pod, container = parts_of(FULL)
    assert (job["parallelism"], job["completions"]) == (8, 8)
    assert FULL["spec"]["replicatedJobs"][0]["replicas"] == 3
    assert container["resources"]["limits"] == {"google.com/tpu": "4"}
    assert container["args"] == list(TRAIN)  # JAX finds the cluster.
    variables = {each["name"]: each for each in container["env"]}
    assert variables["MEGASCALE_COORDINATOR_ADDRESS"]["value"] == "digits-slice-0-0.digits"
    assert variables["MEGASCALE_NUM_SLICES"]["value"] == "3"
    label = "metadata.labels['jobset.sigs.k8s.io/job-index']"
    assert variables["MEGASCALE_SLICE_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == label
    assert pod["hostNetwork"] is True
    secret = variables["WANDB_API_KEY"]["valueFrom"]
    assert secret == {"secretKeyRef": {"name": "wandb", "key": "key"}}
    one = rendered(**SLICE)
    _, pod, container = parts_of(one)
    assert "env" not in container
    assert "hostNetwork" not in pod
    annotation = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert one["metadata"]["annotations"] == annotation


@pytest.mark.parametrize("num_nodes", [2, 1])  # Also a single pod, or JAX would ask the API.
def test_nodes_without_tpus_get_the_address_of_process_0(num_nodes):
    document = rendered(num_nodes=num_nodes, gpus_per_node=8)
    job, _, container = parts_of(document)
    assert container["args"] == [
        *TRAIN,
        "--coordinator_address=digits-node-0-0.digits:55527",
        f"--num_processes={num_nodes}",
        "--process_id=$(JOB_COMPLETION_INDEX)",
    ]
    assert document["spec"]["network"]["publishNotReadyAddresses"] is True
    assert job["completionMode"] == "Indexed"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def expanded(argument):
    """An argument of a container after Kubernetes has replaced `$(NAME)` and `$$`."""
    variables = {"JOB_COMPLETION_INDEX": "1"}
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda match: "$" if match[0] == "$$" else variables.get(match[1], match[0]),
        argument,
    )


HOSTILE = ["$(JOB_COMPLETION_INDEX)", "$$", "$(", "a;touch x", "it's", '"', "\n", " x", "1e3", "y"]
texts = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(texts, max_size=5))
def test_a_container_gets_the_arguments_that_the_user_typed(arguments):
    made = parts_of(rendered(("train", *arguments), num_nodes=2))[2]["args"]
    assert [*map(expanded, made[:-3])] == ["train", *arguments]
    assert expanded(made[-1]) == "--process_id=1"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"volume_claim": None}, "add --volume_claim="),
        ({"mount_path": "/data"}, "use a --workdir inside /data"),
        ({**SLICE, "tpu_topology": "1x1"}, "--chips_per_node=4 does not divide"),
        ({"node_selector": ["spot"]}, "--node_selector=KEY=VALUE"),
        ({"secret_env": ["KEY=5ecret"]}, "--secret_env=NAME=SECRET/KEY"),
    ],
)
def test_what_the_cluster_would_not_say_is_said_before(changes, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)) as raised:
        rendered(**changes)
    assert "5ecret" not in str(raised.value)  # A secret that is typed is not repeated.


def test_a_run_in_a_bucket_needs_no_volume():
    command = ["train", "--config=configs/digits.py", "--workdir=gs://my-bucket/runs/a"]
    text = yaml.safe_dump(rendered(command, volume_claim=None))
    assert "--workdir=gs://my-bucket/runs/a" in text
    assert "persistentVolumeClaim" not in text
    with pytest.raises(UserError, match="would be lost with the pod. Give a bucket"):
        rendered(["train", "--workdir=runs/a"], volume_claim=None)


@pytest.mark.slow
def test_the_command_writes_the_file_and_the_next_commands(tmp_path):
    file = tmp_path / "my jobset.yaml"
    flags = ["--name=digits", "--image=i:1", "--volume_claim=runs", "--queue=gpus"]
    flags += ["--secret_env=A=s/a,B=s/b", "--namespace=team", f"--output={file}"]
    printed = dist_ens("k8s", *flags, "--dry_run", "--", *TRAIN)
    assert printed.returncode == 0, printed.stderr
    assert not file.exists()
    assert "kubectl apply --filename=- --namespace=team  # start it, with" in printed.stderr
    ended = dist_ens("k8s", *flags, "--", *TRAIN)
    assert file.read_text() == printed.stdout
    check(yaml.safe_load(printed.stdout))
    assert f"kubectl apply --filename='{file}' --namespace=team" in ended.stderr
    assert "kubectl describe workload jobset-digits --namespace=team" in ended.stderr
