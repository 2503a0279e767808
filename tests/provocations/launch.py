"""How the messages of the commands in `launch` are provoked."""

import contextlib
import importlib
import io
import itertools
import os
import sys
import tempfile
import types

import jax
import numpy as np
from absl import flags

import launch
from launch import cli, environment, local
from launch.config_flags import ConfigFlags
from launch.started_command import StartedCommand

_CONFIG = (
    "from ml_collections import ConfigDict\ndef get_config(): return ConfigDict({'steps': 1})\n"
)


@contextlib.contextmanager
def _own_flags():
    """Removes the flags of other commands, and restores them after those that its body defines."""
    verbs = [f"launch.{verb}" for verb in launch.VERBS]
    of_others = {verb: list(flags.FLAGS.flags_by_module_dict().get(verb, ())) for verb in verbs}
    for flag in itertools.chain(*of_others.values()):
        delattr(flags.FLAGS, flag.name)
    before = set(flags.FLAGS)
    try:
        yield
    finally:
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)
        for verb, own in of_others.items():
            for flag in own:
                flags.FLAGS[flag.name] = flag
                flags.FLAGS.register_flag_by_module(verb, flag)


def _command(verb, *arguments, config=None, **replaced):
    """Runs the work of a command in this process.

    Args:
        verb: Name of the command.
        *arguments: Its command line.
        config: Folder for a config file, if it takes one.
        **replaced: Names of its module that stand for something else.
    """
    with _own_flags():
        sys.modules.pop(f"launch.{verb}", None)
        module = importlib.import_module(f"launch.{verb}")
        try:
            argv = ["dist-ens", *arguments]
            if config is not None:
                (config / "config.py").write_text(_CONFIG)
                argv = module._CONFIG.prepare([*argv, f"--config={config}/config.py"])
            cli.parsed(argv)
            vars(module).update(replaced)
            module.main()
        finally:
            del sys.modules[f"launch.{verb}"]


def _flag(value, name="output"):
    return types.SimpleNamespace(name=name, value=value)


def a_plot_that_is_no_picture(tmp_path):
    _command("bench", "--plot=bench.pdf", config=tmp_path)


def a_bench_of_several_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    _command("bench", config=tmp_path)


def a_file_of_flags_in_latin1(tmp_path):
    (tmp_path / "flags").write_bytes(b"--plot=K\xf6ln.png")
    cli.parsed(["dist-ens", f"--flagfile={tmp_path}/flags"])


def a_name_that_the_flag_does_not_know():
    cli.names(_flag(["vmpa"], "executions"), ["vmap", "unroll"])


def a_flag_that_is_missing():
    cli.required(_flag(None, "workdir"), "runs/digits")


def a_flag_without_names():
    cli.names(_flag([], "executions"), ["vmap", "unroll"])


def an_output_that_is_a_folder(tmp_path):
    cli.check_outputs(_flag(tmp_path))


def an_output_in_a_folder_that_is_absent(tmp_path):
    cli.check_outputs(_flag(tmp_path / "runs" / "a.npz"))


def an_output_in_a_folder_that_is_read_only(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    cli.check_outputs(_flag(tmp_path / "a.npz"))


def an_output_that_the_disk_does_not_hold(tmp_path):
    def full(path):
        raise OSError(28, "No space left on device")

    cli.write_file(_flag(tmp_path / "a.npz"), full)


def a_value_that_a_flag_refuses():
    cli.parsed(["dist-ens", "--num_processes=two"])


def an_argument_that_is_no_flag(monkeypatch):
    """The command parses its flags, and neither starts JAX nor ends the process."""
    nothing = types.SimpleNamespace(start=lambda *_, **__: [], use_cores_as_devices=lambda: None)
    monkeypatch.setattr(cli, "cluster", nothing)
    monkeypatch.setattr(cli, "use_compile_cache", lambda: None)
    monkeypatch.setattr(cli, "check_xla_flags", lambda: None)
    monkeypatch.setattr(cli, "_told_as_sentences", contextlib.nullcontext)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    parse = types.SimpleNamespace(run=lambda _, flags_parser: flags_parser(["dist-ens", "a", "b"]))
    monkeypatch.setattr(cli, "app", parse)
    cli.run(lambda: None)


def a_flag_of_an_endless_name():
    cli.parsed(["dist-ens", "--" + 300 * "x"])


def a_flag_that_is_unknown():
    cli.parsed(["dist-ens", "--num_procesess=2"])


def _prepared(folder, *arguments, config=_CONFIG, overridable=True):
    with _own_flags():
        config_flags = ConfigFlags(overridable=overridable)
        if config is not None:
            (folder / "config.py").write_text(config)
            arguments = (f"--config={folder}/config.py", *arguments)
        config_flags.prepare(["dist-ens", *arguments])
        config_flags.experiment()


def no_config(tmp_path):
    _prepared(tmp_path, config=None)


def a_field_that_a_function_replaces(tmp_path):
    own = _CONFIG + "def make_member(spec): ...\n"
    _prepared(tmp_path, "--config.model.name=mlp", config=own)


def a_field_without_its_section(tmp_path):
    _prepared(tmp_path, "--num_members=4")


def a_field_of_a_finished_run(tmp_path):
    _prepared(tmp_path, "--config.num_members=4", overridable=False)


def a_field_without_a_config(tmp_path):
    _prepared(tmp_path, "--config.num_members=4", config=None)


def a_field_that_is_unknown(tmp_path):
    _prepared(tmp_path, "--config.num_member=4")


def a_flag_that_xla_does_not_know(monkeypatch):
    """XLA ends the process of its flags, here without a process."""
    log = b"F0101 10:00:00.000000 1 flags.cc:1] Unknown flag in XLA_FLAGS: --nope=1\n"
    monkeypatch.setitem(os.environ, "XLA_FLAGS", "--nope=1")
    monkeypatch.setattr(os, "fork", lambda: 1)
    monkeypatch.setattr(os, "waitpid", lambda *_: (1, 134))
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: io.BytesIO(log))
    environment.check_xla_flags()


def a_level_without_a_method():
    _command("evaluate", "--workdir=runs/digits", "--level=0.8")


def _finished(objective):
    experiment = types.SimpleNamespace(data=None, evaluation=types.SimpleNamespace(pooling="probs"))
    run = types.SimpleNamespace(experiment=experiment, spec=None)
    made = types.SimpleNamespace(objective=objective)
    return types.SimpleNamespace(run=run, state=None, ensemble=made, parts=None)


def _evaluated(*arguments, objective):
    """Runs `dist-ens evaluate` as far as the checks behind the opened run."""
    _command(
        "evaluate",
        *arguments,
        open_finished=lambda *_, **__: _finished(objective),
        evaluator_of_run=lambda *_: None,
        _CONFIG=types.SimpleNamespace(own_parts=None, open_source=lambda data: None),
    )


def predictions_of_a_loss_function():
    _evaluated("--workdir=runs/digits", "--ood=idx:letters", objective=None)


def a_workdir_that_is_read_only(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    _evaluated(f"--workdir={tmp_path}", objective="categorical")


def an_output_over_the_input(tmp_path):
    paths = [f"--input={tmp_path}/a.npz", f"--output={tmp_path}/a.npz"]
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, np.zeros(2))
    _command("predict", "--workdir=runs/digits", *paths)


def an_input_of_out_of_bag_predictions():
    paths = ["--workdir=runs/digits", "--input=a.npy", "--output=a.npz"]
    _command("predict", "--out_of_bag", *paths)


def _prepared_for_members(*words):
    with _own_flags():
        sys.modules.pop("launch.members", None)
        importlib.import_module("launch.members")._CommandLine().prepare(["dist-ens", *words])


def a_member_command_without_an_action():
    _prepared_for_members("runs/digits")


def an_action_on_members_that_is_unknown():
    _prepared_for_members("runs/digits", "verfy")


def no_checkpoint_to_verify(tmp_path):
    _command("members", _COMMAND_LINE=types.SimpleNamespace(workdir=tmp_path, action="verify"))


def no_run_to_report():
    _command("report")


def a_config_and_an_experiment(tmp_path):
    (tmp_path / "experiment.json").write_text("{}")
    _command("train", f"--experiment={tmp_path}/experiment.json", config=tmp_path)


def no_run_to_replay():
    _command("replay", "--member=0")


def no_member_to_replay():
    _command("replay", _RUN=["runs/digits"])


def predictions_in_a_csv_file():
    _command("predict", "--workdir=runs/digits", "--input=x.npy", "--output=p.csv")


def no_command_to_start():
    StartedCommand().prepare(["dist-ens", "--nodes=2"])


def a_command_that_is_not_started():
    StartedCommand().prepare(["dist-ens", "--", "trian"])


def fewer_gpus_than_the_processes_take():
    local.device_variables({}, ["0"], 2, None)
