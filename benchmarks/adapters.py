"""Cost of many low-rank adapters on one transformer, from compiled programs.

    python -m benchmarks.adapters

The update of `configs/charlm.py` with a transformer of about 100 million parameters is compiled for
one CPU device: as one network that is trained with Adam, and as adapters of rank 1 on the arrays of
the attention, or on all arrays that a matrix product takes. `bytes` are those of the arguments of
the update, without the batch, and FLOPs those of a step, both by `dist-ens plan`. Nothing is run.
"""

import dataclasses

import jax

import dist_ens as de
from dist_ens.experiment import Experiment, describe_source
from dist_ens.experiment.config_file import ConfigFile, OwnParts
from dist_ens.experiment.record import Run
from dist_ens.plan.fitting import planner_of
from launch import cli

_SIZES = {"num_blocks": 14, "width": 768, "num_heads": 12, "mlp_size": 3072}
_CONFIG, _MEMBERS = "configs/charlm.py", (16, 1000)
_TARGETS = {"attention": "*Attention*/kernel", "all products": "*"}


def main() -> None:
    """Prints a line for one network, and for each number of adapters."""
    print("| members | bytes of the arguments | over one network | FLOPs of a step |")
    print("| --- | --- | --- | --- |")
    bytes_of_one, flops = _planned(1, OwnParts())
    print(f"| one network | {bytes_of_one:,} | 1 | {flops:,.0f} |")
    for name, targets in _TARGETS.items():
        for num_members in _MEMBERS:
            of_adapters, flops = _planned(num_members, _adapters(targets))
            line = f"{of_adapters:,} | {of_adapters / bytes_of_one:.3f} | {flops:,.0f} |"
            print(f"| {num_members:,} adapters, {name} | {line}")


def _adapters(targets: str) -> OwnParts:
    spec, _ = describe_source(_experiment().data)
    transformer = de.models.transformer(spec.input_shape, spec.num_classes or 0, **_SIZES)
    tokens = jax.ShapeDtypeStruct((1, *spec.input_shape), spec.input_dtype)
    base = jax.eval_shape(transformer.init, jax.eval_shape(lambda: jax.random.key(0)), tokens)
    return OwnParts(member=de.models.lora(transformer, rank=1, targets=targets), shared=base)


def _planned(num_members: int, parts: OwnParts) -> tuple[int, float]:
    experiment = _experiment().with_members(range(num_members))
    model = dataclasses.replace(experiment.model, options=_SIZES)
    if parts.member is None:
        experiment = dataclasses.replace(experiment, model=model)
    experiment = dataclasses.replace(experiment, execution="vmap")
    spec, count = describe_source(experiment.data)
    run = Run(experiment, spec, count or 0, _CONFIG)
    planner = planner_of(
        run, parts, jax.devices()[:1], in_memory=True, are_cores=False, say=lambda line: None
    )
    planned = planner.plan_mesh(num_members, 1)
    of_state = ("parameters", "model_state", "optimizer", "shared")
    held = sum(planned.bytes_per_device.get(name, 0) for name in of_state)
    return held, planned.flops_per_device or 0.0


def _experiment() -> Experiment:
    return ConfigFile(_CONFIG).experiment()


if __name__ == "__main__":
    cli.run(main)
