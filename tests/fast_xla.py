"""Flags with which XLA compiles soon rather than well: tests run their programs a few times."""

import importlib.metadata


def devices(num_devices: int) -> str:
    """For `XLA_FLAGS`, of a process with so many CPU devices that compiles as a user's does."""
    return f"--xla_force_host_platform_device_count={num_devices}"


def flags(num_devices: int) -> str:
    """For `XLA_FLAGS`, of a process with so many CPU devices."""
    words = [
        devices(num_devices),
        "--xla_backend_optimization_level=0",
    ]
    # The older emitters take half the time; jaxlib 0.12 has them no more, nor the flag.
    if importlib.metadata.version("jaxlib").split(".")[:2] <= ["0", "10"]:
        words.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(words)
