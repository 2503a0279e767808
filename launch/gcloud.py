"""Calls of gcloud that make a TPU, reach its workers, and delete it."""

import dataclasses
import re
from collections.abc import Sequence

from dist_ens.errors import UserError
from dist_ens.paths import shortened
from launch.arguments import flag
from launch.rendered import check_name, chips_of

# An installation of JAX does not fit on the disk that an image has by default.
_BOOT_DISK_SIZE = "100GB"


@dataclasses.dataclass(frozen=True)
class QueuedResource:
    """A queued resource of Cloud TPU, and the TPU that it becomes.

    Attributes:
        name: Name of the queued resource.
        zone: Zone of Google Cloud.
        project: Project of Google Cloud; None for that of gcloud.
        num_slices: Number of slices, at least 1.
    """

    name: str
    zone: str
    project: str | None = None
    num_slices: int = 1

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.num_slices < 1:
            raise UserError(
                f"--num_slices={self.num_slices} is less than 1. Use the number of slices."
            )

    @property
    def nodes(self) -> list[str]:
        """Names of the slices."""
        if self.num_slices == 1:
            return [self.name]
        return [f"{self.name}-{number}" for number in range(self.num_slices)]

    def create_calls(
        self,
        accelerator_type: str,
        runtime_version: str,
        *,
        spot: bool,
        valid_until_duration: str | None,
    ) -> list[list[str]]:
        """Returns the calls of gcloud that ask for the TPU.

        Args:
            accelerator_type: Kind and size of a slice, such as `v5litepod-16`.
            runtime_version: Software of the TPU VMs.
            spot: Whether to use Spot VMs.
            valid_until_duration: Time after which the request expires; None for none.
        """
        if self.num_slices == 1:
            slices = [flag("node-id", self.name)]
        else:
            slices = [flag("node-count", self.num_slices), flag("node-prefix", self.name)]
        until = valid_until_duration
        return [
            [
                *self._call("create"),
                *slices,
                flag("accelerator-type", accelerator_type),
                flag("runtime-version", runtime_version),
                *(["--spot"] if spot else []),
                *([] if until is None else [flag("valid-until-duration", until)]),
            ]
        ]

    def look_call(self) -> list[str]:
        """Returns the call of gcloud that prints the state of the TPU."""
        return self._call("describe")

    def delete_calls(self) -> list[list[str]]:
        """Returns the calls of gcloud that delete the TPU."""
        # Without --force gcloud refuses to delete a queued resource whose TPU exists.
        return [[*self._call("delete"), "--force"]]

    def ssh_calls(self, worker: str) -> list[list[str]]:
        """Returns the calls of gcloud that run a command, one for each slice, without the command.

        Args:
            worker: Number of the worker of each slice; `all` for all.
        """
        start, where = ["gcloud", "compute", "tpus", "tpu-vm", "ssh"], _where(self)
        return [[*start, node, *where, flag("worker", worker)] for node in self.nodes]

    def _call(self, verb: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "queued-resources", verb, self.name, *_where(self)]


@dataclasses.dataclass(frozen=True)
class InstanceGroup:
    """A managed instance group of Compute Engine whose VMs are the workers of one TPU slice.

    Attributes:
        name: Name of the group, of its instance template and of its workload policy.
        zone: Zone of Google Cloud.
        project: Project of Google Cloud. A group names its workload policy with the project.
    """

    name: str
    zone: str
    project: str

    def __post_init__(self) -> None:
        check_name(self.name)

    def create_calls(
        self,
        machine_type: str,
        topology: str,
        image_family: str,
        image_project: str,
        *,
        spot: bool,
    ) -> list[list[str]]:
        """Returns the calls of gcloud that make the workload policy, the template and the group.

        Args:
            machine_type: Machine type of the VMs, which ends in their number of chips.
            topology: Chips of the slice along each axis, such as `4x4`.
            image_family: Family of the image of the VMs.
            image_project: Project of the image.
            spot: Whether to use Spot VMs.
        """
        kind = ["--provisioning-model=SPOT", "--instance-termination-action=STOP"] if spot else []
        policy = f"projects/{self.project}/regions/{self._region}/resourcePolicies/{self.name}"
        return [
            [
                *("gcloud", "compute", "resource-policies", "create", "workload-policy", self.name),
                *self._in_region,
                "--type=HIGH_THROUGHPUT",
                flag("accelerator-topology", topology),
            ],
            [
                *("gcloud", "compute", "instance-templates", "create", self.name, self._of_project),
                flag("machine-type", machine_type),
                "--maintenance-policy=TERMINATE",
                *kind,
                flag("image-family", image_family),
                flag("image-project", image_project),
                flag("boot-disk-size", _BOOT_DISK_SIZE),
            ],
            [
                *self._call("create"),
                flag("template", self.name),
                flag("size", num_vms(machine_type, topology)),
                flag("workload-policy", policy),
                # A slice exists as a whole or not at all.
                "--target-size-policy-mode=bulk",
                "--default-action-on-vm-failure=do-nothing",
            ],
        ]

    def look_call(self) -> list[str]:
        """Returns the call of gcloud that prints the states of the VMs."""
        return self._call("list-instances")

    def list_call(self) -> list[str]:
        """Returns the call of gcloud that prints the names of the VMs, one on each line."""
        return [*self._call("list-instances"), "--format=value(name)"]

    def delete_calls(self) -> list[list[str]]:
        """Returns the calls of gcloud that delete the group, the template and the policy."""
        compute = ["gcloud", "compute"]
        return [
            self._call("delete"),
            [*compute, "instance-templates", "delete", self.name, self._of_project],
            [*compute, "resource-policies", "delete", self.name, *self._in_region],
        ]

    def ssh_calls(self, vms: Sequence[str]) -> list[list[str]]:
        """Returns the calls of gcloud that run a command, one for each VM, without the command.

        Args:
            vms: Names of the VMs.
        """
        return [["gcloud", "compute", "ssh", vm, *_where(self)] for vm in vms]

    @property
    def _region(self) -> str:
        return self.zone.rpartition("-")[0]

    @property
    def _of_project(self) -> str:
        return flag("project", self.project)

    @property
    def _in_region(self) -> list[str]:
        return [flag("region", self._region), self._of_project]

    def _call(self, verb: str) -> list[str]:
        group = ["gcloud", "compute", "instance-groups", "managed", verb, self.name]
        return [*group, *_where(self)]


def num_vms(machine_type: str, topology: str) -> int:
    """Returns the number of VMs of a TPU slice.

    Args:
        machine_type: Machine type of the VMs, which ends in their number of chips.
        topology: Chips of the slice along each axis, such as `4x4`.

    Raises:
        UserError: If the VMs do not divide the chips.

    >>> num_vms("ct6e-standard-4t", "4x4")
    4
    """
    chips, of_vm = chips_of(topology), re.search(r"-([1-9]\d*)t$", machine_type)
    if of_vm is None or chips % int(of_vm[1]):
        raise UserError(
            f"VMs of --machine_type={shortened(machine_type)} do not divide the {chips} chips of "
            f"--tpu_topology={topology}. Use a type whose name ends in the chips of a VM, such as "
            "ct6e-standard-4t."
        )
    return chips // int(of_vm[1])


def _where(tpu: QueuedResource | InstanceGroup) -> list[str]:
    """Returns the flags of gcloud that say where a TPU is."""
    project = [] if tpu.project is None else [flag("project", tpu.project)]
    return [flag("zone", tpu.zone), *project]
