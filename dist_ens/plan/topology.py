"""The devices of a plan: a TPU topology, some CPU devices, or the devices of this machine."""

import dataclasses
import importlib.util
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Self

import jax
import psutil
from jax.experimental import topologies

from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import RunError, UserError, did_you_mean, first_line
from dist_ens.ground.paths import shortened

HERE = "here"
# This variable marks a process that has the environment of a topology.
_MARK = "DIST_ENS_PLANS_FOR"
_NUMBER = r"[1-9]\d{0,3}"
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU.

    Attributes:
        kind: Name of the chip in JAX.
        axes: Number of axes of the interconnect.
        accelerator: Name in Cloud TPU, and the number of cores that it counts for each chip.
        hbm_bytes: Bytes of memory that XLA:TPU reports as available, a little less than published.
        peak_flops: Peak of dense bfloat16 operations per second.

    Source: https://cloud.google.com/tpu/docs/v4, …/v5e, …/v5p, …/v6e; memory: libtpu 0.0.42.
    """

    kind: str
    axes: int
    accelerator: tuple[str, int]
    hbm_bytes: int
    peak_flops: float


CHIPS = {
    "v4": Chip("TPU v4", 3, ("v4", 2), int(30.75 * _GIB), 275e12),
    "v5e": Chip("TPU v5 lite", 2, ("v5litepod", 1), int(15.75 * _GIB), 197e12),
    "v5p": Chip("TPU v5", 3, ("v5p", 2), int(95.74 * _GIB), 459e12),
    "v6e": Chip("TPU v6 lite", 2, ("v6e", 1), int(31.25 * _GIB), 918e12),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that a program can be compiled for, attached to this machine or not.

    Attributes:
        text: Text that the user wrote.
        kind: Kind of the devices: a key of `CHIPS`, `cpu` or `here`.
        shape: Numbers of chips along each axis of a slice, or the number of CPU devices.
        num_slices: Number of slices, which the network of the data centre joins.
    """

    text: str
    kind: str
    shape: tuple[int, ...] = ()
    num_slices: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the topology of a text: `here`, `cpu:N` or `CHIP:AxB[xC][*SLICES]`.

        >>> Topology.parse("v5e:4x4*2").num_slices
        2
        """
        if text == HERE:
            return cls(text, HERE)
        kind, _, size = text.partition(":")
        chip = CHIPS.get(kind)
        lengths = _NUMBER + f"x{_NUMBER}" * (chip.axes - 1 if chip else 0)
        match = re.fullmatch(f"({lengths})" + (rf"(?:\*({_NUMBER}))?" if chip else "()"), size)
        if match is None or (chip is None and kind != "cpu"):
            hint = "" if chip else did_you_mean(kind, CHIPS)
            tpus = [f"{name}:{'x'.join(['4'] * each.axes)}" for name, each in CHIPS.items()]
            raise UserError(
                f"--topology={shortened(text)} is not a topology.{hint} Use cpu:N, a slice of TPUs "
                f"such as {', '.join(tpus)} (*2 for two slices), or {HERE}, which plans for the "
                "GPUs of this machine, too."
            )
        shape = tuple(int(n) for n in match[1].split("x"))
        return cls(text, kind, shape, int(match[2] or 1))

    def is_at_hand(self) -> bool:
        """Returns whether this process has the devices: those of `here`, or of `run_module`."""
        return self.kind == HERE or os.environ.get(_MARK) == self.text

    def run_module(self, module: str, arguments: Sequence[str]) -> int:
        """Runs a module with this topology's devices alone, and returns its exit code."""
        if self.kind in CHIPS and importlib.util.find_spec("libtpu") is None:
            raise UserError(
                f"--topology={quoted(self.text)} needs libtpu, the compiler for TPUs, which is not "
                "installed. Install it: pip install 'dist-ens[tpu-plan]'."
            )
        code = subprocess.run(
            [sys.executable, "-m", module, *arguments], env=os.environ | self._environment()
        ).returncode
        if code < 0:
            raise RunError(
                f"XLA ended with signal {-code} while it compiled for {self.text}; it says why "
                "above. Try a topology of another size."
            )
        return code

    def devices(self) -> list[jax.Device]:
        """Returns the devices, in the order of a run."""
        if self.kind not in CHIPS:
            return jax.devices()
        options: dict[str, object] = {"num_slices": self.num_slices} if self.num_slices > 1 else {}
        if self.kind == "v4":
            options |= {"chip_config_name": "megacore"}  # On Cloud TPU, a device is a chip.
        if math.prod(self.shape) == 1:
            options |= {"chips_per_host_bounds": (1, 1, 1)}
        name = f"{self.kind}:{'x'.join(map(str, self.shape))}"
        try:
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=name, **options
            )
        except jax.errors.JaxRuntimeError as error:
            raise UserError(
                f"--topology={quoted(self.text)} does not exist: {first_line(error)} Try sizes "
                "that are powers of two."
            ) from error
        return list(description.devices)

    def _environment(self) -> dict[str, str]:
        variables = {_MARK: self.text, "JAX_PLATFORMS": "cpu"}
        if self.kind == "cpu":
            flag = f"--xla_force_host_platform_device_count={self.shape[0]}"
            return variables | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()}
        name, cores = CHIPS[self.kind].accelerator
        return variables | {
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # No TPU is used, so several plans may run at once.
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": f"{name}-{math.prod(self.shape) * cores}",
            # The cache cannot read programs for devices that are not attached (jax 0.10.2).
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }


def chip_of(device: jax.Device) -> Chip | None:
    """Returns the kind of TPU of a device; None for another device, or an unknown TPU."""
    return next((chip for chip in CHIPS.values() if chip.kind == device.device_kind), None)


def memory_bytes(device: jax.Device) -> float:
    """Returns the bytes of memory that a program can use on a device; infinity if not known."""
    if chip := chip_of(device):
        return chip.hbm_bytes
    if device.platform == "cpu":
        return psutil.virtual_memory().total // jax.local_device_count()
    # Only a device's own host knows its memory, so a device of this host stands for it.
    stats = jax.local_devices()[0].memory_stats()
    return stats["bytes_limit"] if stats else math.inf
