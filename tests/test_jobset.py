"""The JobSet that `dist-ens k8s` writes, against the schemas and the rules of the controllers."""

import copy
import dataclasses
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
from dist_ens.errors import UserError
from launch.jobset import JobSetSettings, Nodes, SecretVariable, TpuSlices, jobset
from launch.yaml_text import yaml_text

pytestmark = pytest.mark.quick
SCHEMA = json.loads((pathlib.Path(__file__).parent / "schemas" / "jobset.json").read_text())
TRAIN = ("train", "--config=configs/digits.py", "--workdir=/runs/digits")
SMALL = JobSetSettings("digits", "example.com/dist-ens:1", TRAIN, Nodes(1, 0))
ALL_OPTIONS = dataclasses.replace(
    SMALL,
    namespace="team",
    queue="default",
    volume_claim="runs",
    secrets=(SecretVariable("WANDB_API_KEY", "wandb", "key"),),
    node_selector=(("cloud.google.com/gke-spot", "true"),),
    cpu="8",
    memory="16Gi",
)
HARDWARE = {
    "slice": TpuSlices("tpu-v6e-slice", "4x4", 4, 1),
    "multislice": TpuSlices("tpu-v5p-slice", "2x4x4", 4, 3),
    "gpus": Nodes(2, 8),
    "one gpu": Nodes(1, 1),
    "cpus": Nodes(4, 0),
    "one cpu": Nodes(1, 0),
}
KINDS = [
    pytest.param(dataclasses.replace(base, hardware=hardware), id=f"{kind}, {options}")
    for kind, hardware in HARDWARE.items()
    for options, base in (("few options", SMALL), ("all options", ALL_OPTIONS))
]


def strict(schema):
    """The schema without keys that it does not name."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(part) for name, part in schema.items()}
    if "properties" in made and "additionalProperties" not in made:
        made["additionalProperties"] = False
    return made


VALIDATOR = jsonschema.Draft202012Validator(strict(SCHEMA))


def check(document):
    """Raises if a JobSet, the Job in it or the pod in that is not as its schema demands."""
    VALIDATOR.validate(document)
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": document["metadata"],
        "spec": document["spec"]["replicatedJobs"][0]["template"]["spec"],
    }
    kubernetes_validate.validate(job, "1.35", strict=True)


REFUSALS = (jsonschema.ValidationError, kubernetes_validate.ValidationError, KeyError)


def rendered(made):
    """The JobSet as a reader of the file sees it."""
    return yaml.safe_load(yaml_text(jobset(made)))


def job_of(document):
    return document["spec"]["replicatedJobs"][0]["template"]["spec"]


def container_of(document):
    return job_of(document)["template"]["spec"]["containers"][0]


def variables_of(document):
    return {each["name"]: each for each in container_of(document).get("env", [])}


@pytest.mark.parametrize("made", KINDS)
def test_a_jobset_is_valid(made):
    check(rendered(made))


def places(value, path=()):
    """The path of every value in a document."""
    yield path
    parts = {dict: dict.items, list: enumerate}.get(type(value), lambda _: ())
    for key, part in parts(value):
        yield from places(part, (*path, key))


def changed(document, path, change):
    made = copy.deepcopy(document)
    parent = made
    for key in path[:-1]:
        parent = parent[key]
    change(parent, path[-1])
    return made


# Keys of these dicts are chosen by users, and amounts of resources may be numbers.
FREE = {"labels", "annotations", "nodeSelector", "limits", "requests"}
FULL = rendered(dataclasses.replace(ALL_OPTIONS, hardware=HARDWARE["multislice"]))


def test_a_misspelt_key_is_refused_wherever_it_stands():
    def misspell(parent, key):
        parent[f"{key}s"] = parent.pop(key)

    tried = 0
    for path in places(FULL):
        if path and isinstance(path[-1], str) and not FREE & {*path[:-1]}:
            with pytest.raises(REFUSALS):
                check(changed(FULL, path, misspell))
            tried += 1
    assert tried > 60


def test_a_number_for_a_text_and_a_text_for_a_number_are_refused():
    def swap(parent, key):
        parent[key] = 7 if isinstance(parent[key], str) else "seven"

    tried = 0
    for path in places(FULL):
        value = FULL
        for key in path:
            value = value[key]
        if isinstance(value, str | int) and not {"limits", "requests"} & {*path}:
            with pytest.raises(REFUSALS):
                check(changed(FULL, path, swap))
            tried += 1
    assert tried > 60


def reason_of_failure(job, pods):
    """Why the Job controller fails a Job, or None if the Job succeeds.

    Args:
        job: Spec of the Job.
        pods: Exit code and conditions of each pod.
    """
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


def action_of_jobset(policy, reasons):
    """What the JobSet controller does, given why Jobs failed; None if it waits for success."""
    failed = [reason for reason in reasons if reason is not None]
    if not failed:
        return None
    for rule in policy["rules"]:
        if any(reason in rule["onJobFailureReasons"] for reason in failed):
            return rule["action"]
    return "RestartJobSet" if policy["maxRestarts"] else "FailJobSet"


def action(document, *jobs):
    reasons = [reason_of_failure(job_of(document), pods) for pods in jobs]
    return action_of_jobset(document["spec"]["failurePolicy"], reasons)


RESTARTS, FAILS = "RestartJobSetAndIgnoreMaxRestarts", "FailJobSet"
# 42 preempted, 134 SIGABRT, 137 SIGKILL, 139 SIGSEGV, 143 SIGTERM.
EXPECTED = {code: FAILS for code in range(256)} | {0: None}
EXPECTED |= dict.fromkeys((42, 134, 137, 139, 143), RESTARTS)


@pytest.mark.slow
@pytest.mark.parametrize("code", range(256))
def test_the_controllers_restart_after_exactly_the_codes_of_a_preemption(code):
    document = rendered(SMALL)
    assert action(document, [(code, set())]) == EXPECTED[code]
    disrupted = None if code == 0 else RESTARTS
    assert action(document, [(code, {("DisruptionTarget", "True")})]) == disrupted
    assert action(document, [(code, {("DisruptionTarget", "False")})]) == EXPECTED[code]


def test_an_error_in_one_slice_fails_the_set_though_another_slice_was_killed():
    assert action(FULL, [(134, set())], [(1, set())]) == FAILS
    assert action(FULL, [(1, set())], [(134, set())]) == FAILS
    assert action(FULL, [(0, set())], [(42, set())]) == RESTARTS


def test_the_file_has_what_the_webhooks_of_the_controllers_demand():
    job = job_of(FULL)
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    for rule in FULL["spec"]["failurePolicy"]["rules"]:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
        # JobSet knows five reasons. These are the two that such a Job can have.
        assert {*rule["onJobFailureReasons"]} <= {"BackoffLimitExceeded", "PodFailurePolicy"}
    codes = job["podFailurePolicy"]["rules"][1]["onExitCodes"]
    assert codes["values"] == [42, 134, 137, 139, 143]  # sorted, without repetition and without 0
    assert codes["containerName"] == container_of(FULL)["name"]


def test_the_nodes_of_a_slice_follow_from_its_topology():
    for topology, chips_per_node, num_nodes in [("4x4", 4, 4), ("2x2", 4, 1), ("4x4x8", 4, 32)]:
        assert TpuSlices("tpu-v5p-slice", topology, chips_per_node, 1).num_nodes == num_nodes
    job = job_of(FULL)
    assert (job["parallelism"], job["completions"]) == (8, 8)  # 2 * 4 * 4 chips, 4 on a node
    assert FULL["spec"]["replicatedJobs"][0]["replicas"] == 3
    assert container_of(FULL)["resources"]["limits"] == {"google.com/tpu": "4"}


def test_slices_are_told_what_libtpu_needs():
    variables = variables_of(FULL)
    assert variables["MEGASCALE_COORDINATOR_ADDRESS"]["value"] == "digits-slice-0-0.digits"
    assert variables["MEGASCALE_NUM_SLICES"]["value"] == "3"
    label = "metadata.labels['jobset.sigs.k8s.io/job-index']"
    assert variables["MEGASCALE_SLICE_ID"]["valueFrom"]["fieldRef"]["fieldPath"] == label
    assert job_of(FULL)["template"]["spec"]["hostNetwork"] is True
    assert container_of(FULL)["args"] == list(TRAIN)  # JAX finds the cluster.


def test_one_slice_has_no_variables_of_several():
    document = rendered(dataclasses.replace(SMALL, hardware=HARDWARE["slice"]))
    assert not [name for name in variables_of(document) if name.startswith("MEGASCALE")]
    assert "hostNetwork" not in job_of(document)["template"]["spec"]
    annotation = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    assert document["metadata"]["annotations"] == annotation


def test_nodes_without_tpus_are_told_where_process_0_is():
    document = rendered(dataclasses.replace(SMALL, hardware=Nodes(2, 8)))
    assert container_of(document)["args"] == [
        "train",
        "--coordinator_address=digits-node-0-0.digits:55527",
        "--num_processes=2",
        "--process_id=$(JOB_COMPLETION_INDEX)",
        "--config=configs/digits.py",
        "--workdir=/runs/digits",
    ]
    assert document["spec"]["network"]["publishNotReadyAddresses"] is True
    assert job_of(document)["completionMode"] == "Indexed"
    assert container_of(document)["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_a_pod_alone_is_told_that_it_is():
    # Without the flags JAX would ask the API of Kubernetes how many pods there are.
    assert container_of(rendered(SMALL))["args"] == [
        "train",
        "--coordinator_address=digits-node-0-0.digits:55527",
        "--num_processes=1",
        "--process_id=$(JOB_COMPLETION_INDEX)",
        *TRAIN[1:],
    ]


def test_a_secret_is_given_by_name():
    source = variables_of(FULL)["WANDB_API_KEY"]["valueFrom"]
    assert source == {"secretKeyRef": {"name": "wandb", "key": "key"}}


def expanded(argument, variables):
    """An argument of a container after Kubernetes has replaced `$(NAME)` and `$$`."""

    def replace(match):
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, argument)


HOSTILE = ["$(JOB_COMPLETION_INDEX)", "$$", "$(", "a;touch x", "it's", '"', "\n", " x", "1e3", "y"]
texts = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(texts, max_size=5))
def test_a_container_gets_the_arguments_that_the_user_typed(arguments):
    made = dataclasses.replace(SMALL, arguments=("train", *arguments), hardware=Nodes(2, 1))
    got = [expanded(each, {"JOB_COMPLETION_INDEX": "1"}) for each in args_of(made)]
    assert got[0] == "train"
    assert got[3] == "--process_id=1"
    assert got[4:] == arguments


def args_of(made):
    arguments = container_of(rendered(made))["args"]
    assert all(isinstance(each, str) for each in arguments)
    return arguments


def test_what_another_parser_reads_as_a_number_or_a_bool_is_quoted():
    text = yaml_text({"args": ["1e3", "y", "no", "0x1f", "1:30", "true", ".5", "~", "null", "-1"]})
    assert all(re.fullmatch(r"""- (["']).+\1""", line) for line in text.splitlines()[1:])


def k8s(*flags, command=("train", "--config=configs/digits.py", "--workdir=/runs/digits")):
    return dist_ens("k8s", "--name=digits", "--image=i:1", *flags, "--", *command)


@pytest.mark.slow
def test_the_file_alone_is_on_standard_output():
    ended = k8s("--volume_claim=runs", "--secret_env=A=s/a,B=s/b", "--node_selector=disk=ssd")
    assert ended.returncode == 0, ended.stderr
    document = yaml.safe_load(ended.stdout)
    check(document)
    assert [each["name"] for each in container_of(document)["env"]] == ["A", "B"]
    assert job_of(document)["template"]["spec"]["nodeSelector"] == {"disk": "ssd"}
    assert "kubectl apply --filename=-" in ended.stderr


@pytest.mark.slow
def test_a_written_file_is_followed_by_the_next_commands(tmp_path):
    file = tmp_path / "my jobset.yaml"
    flags = ["--volume_claim=runs", "--queue=gpus", "--namespace=team", f"--output={file}"]
    ended = k8s(*flags)
    assert ended.returncode == 0, ended.stderr
    check(yaml.safe_load(file.read_text()))
    assert f"kubectl apply --filename='{file}' --namespace=team" in ended.stdout
    assert "kubectl describe workload jobset-digits --namespace=team" in ended.stdout


def test_a_dry_run_writes_nothing(tmp_path):
    ended = k8s("--volume_claim=runs", f"--output={tmp_path}/jobset.yaml", "--dry_run")
    assert ended.returncode == 0, ended.stderr
    check(yaml.safe_load(ended.stdout))
    assert not list(tmp_path.iterdir())
    assert "kubectl apply --filename=-  # start it, with the file above as input" in ended.stderr


def test_a_workdir_that_would_be_lost_is_refused():
    ended = k8s()
    assert ended.returncode == 2
    assert "Add --volume_claim." in ended.stderr
    ended = k8s("--volume_claim=runs", "--mount_path=/data")
    assert ended.returncode == 2
    assert "is not inside /data" in ended.stderr


def test_rows_of_the_mesh_that_lie_on_two_slices_are_refused():
    two = TpuSlices("tpu-v6e-slice", "4x4", 4, 2)
    for field, good, bad in [("num_members", 8, 9), ("layout.ensemble_axis", 4, 1)]:
        make = lambda value, field=field: dataclasses.replace(  # noqa: E731
            SMALL, hardware=two, arguments=(*TRAIN, f"--config.{field}={value}")
        )
        make(good)
        with pytest.raises(UserError, match="not a multiple of --num_slices=2"):
            make(bad)


def test_a_secret_that_is_typed_is_not_repeated():
    ended = k8s("--volume_claim=runs", "--secret_env=WANDB_API_KEY=5ecret")
    assert ended.returncode == 2
    assert "5ecret" not in ended.stdout + ended.stderr
