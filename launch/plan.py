"""Plans a run without training: dist-ens plan --config=FILE [--topology=v5e:4x4] [--json=FILE]."""

import sys

from absl import flags

from dist_ens.experiment import comes_in_memory, describe_source
from dist_ens.experiment.record import Run
from dist_ens.ground.errors import counted
from dist_ens.ground.terminal import PlainConsole, print_table
from dist_ens.plan import HERE, Planner, Topology, mesh_line, plan_table, planner_of
from dist_ens.processes import cluster
from dist_ens.report.files import to_json
from launch import cli, stdio
from launch.config_flags import ConfigFlags
from launch.path_flags import define_file

_TOPOLOGY = flags.DEFINE_string(
    "topology",
    HERE,
    "Devices to compile for: here, cpu:8, or a TPU topology such as v5e:4x4, v5p:8x8x16, "
    "v5e:4x4*2.",
)
_JSON = define_file("json", None, "File to write the plan to.")
_CONFIG = ConfigFlags()


def main() -> None:
    """Compiles the update for every mesh of the topology, and prints what it needs."""
    cli.check_outputs(_JSON)
    planner = make_planner(_CONFIG, Topology.parse(_TOPOLOGY.value))
    plan = planner.plan()
    if cluster.is_main():
        print_table(PlainConsole(), plan_table(plan))
        for mesh in plan.meshes:
            print(mesh_line(mesh))
        if _JSON.value is not None:
            cli.write_file(_JSON, to_json(plan.to_dict(), indent=2) + "\n")
    plan.check_fits()
    if cluster.is_main():
        best = plan.meshes[0]
        most = "unknown" if plan.max_num_members is None else f"{plan.max_num_members:,}"
        if plan.max_num_members is not None and not plan.max_is_compiled:
            most = f"about {most}"
        print(
            f"The best mesh for {counted(best.num_members, 'member')} on {_where()} is "
            f"{best.shape}; the largest num_members that fits on it "
            f"is {most}. Next: dist-ens train with the --config flags of this command, "
            f"--config.layout.ensemble_axis={best.ensemble_axis} and a --workdir."
        )


def _where() -> str:
    return "this machine" if _TOPOLOGY.value == HERE else _TOPOLOGY.value


def make_planner(config: ConfigFlags, topology: Topology) -> Planner:
    """Returns a planner of a config's experiment, which prints a line before each compilation."""
    experiment = config.experiment()
    own = config.file.source(experiment.data)
    if own is None:
        spec, num_train_examples = describe_source(experiment.data)
    else:
        spec, num_train_examples = own.spec, own.num_train_examples
    run = Run(experiment, spec, num_train_examples or 0)  # An unknown number is not used.
    in_memory = comes_in_memory(experiment.data) if own is None else own.train.in_memory
    return planner_of(
        run,
        config.file.own_parts(spec),
        topology.devices(),
        in_memory=in_memory,
        are_cores=topology.kind == HERE and cluster.cores_are_devices(),
        say=lambda line: stdio.say(line) if cluster.is_main() else None,
    )


def _prepare(argv: list[str]) -> list[str]:
    """Returns the command line without `--config`, in a process that has the topology's devices.

    A process without these devices runs this command in one that has them, and exits.
    """
    topology = Topology.parse(_TOPOLOGY.value)
    if not topology.is_at_hand():
        sys.exit(topology.run_module("launch.plan", argv[1:]))
    return _CONFIG.prepare(argv)


run = cli.command(main, _prepare, joins_cluster=lambda: _TOPOLOGY.value == HERE)

if __name__ == "__main__":
    run()
