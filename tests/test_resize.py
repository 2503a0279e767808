"""Runs that resume on other numbers of devices and hosts, through the command line.

Members lie along the ensemble axis alone, so `loop` keeps every bit. The shipped configs are made
small. Those of MNIST, CIFAR-10, the text and the table take a part of the data in DIST_ENS_DATA.
"""

import gzip
import json
import os
import pathlib

import numpy as np
import pytest

import fast_xla
from commands import start
from dist_ens.checkpoint.arrays import open_arrays
from dist_ens.checkpoint.writing import STATE
from dist_ens.data.idx import open_idx
from dist_ens.storage import Disk
from test_cluster import free_port
from test_hlo import CONFIGS

STEPS_OF_A_PART = 2
# Hosts and devices of each, for one part of a run after the other.
DEVICES = ((1, 8), (1, 4), (1, 2), (1, 8))
HOSTS = ((2, 4), (1, 8), (1, 1))
SMALL = {
    "digits": ["model.hidden_sizes=(32,)"],
    "mnist_mlp": ["model.hidden_sizes=(32,)"],
    "mnist_bn_dropout": ["model.hidden_sizes=(32,)"],
    "mnist_lenet": ["num_members=8"],
    "cifar_resnet": ["num_members=8"],
    "charlm": ["num_members=8", "data.context_length=32"]
    + [f"model.{each}" for each in ("num_blocks=1", "width=32", "num_heads=2", "mlp_size=64")],
    "uci": ["members_per_group=2"],  # 40 members, for 20 splits.
}
# Largest difference of a parameter, for an execution that compiles another program for another
# number of devices. Eight steps of Adam with the learning rate 0.001 move it by up to 0.008.
TOLERANCE = 1e-5
# One size of XLA's thread pool for every number of devices.
ENVIRON = {"NPROC": "8"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Function that returns the `data.source` of a config: a small part of the real data."""
    folder = tmp_path_factory.mktemp("data")

    def data():
        given = pathlib.Path(os.environ.get("DIST_ENS_DATA", "no folder")).absolute()
        assert given.is_dir(), f"These configs need data: DIST_ENS_DATA={given} is no folder."
        return given

    def images(name, arrays):
        np.savez(folder / name, **{key: value[:200] for key, value in arrays.items()})
        return f"npz:{folder / name}.npz"

    def source(config):
        if config.startswith("mnist"):
            mnist, arrays = open_idx(str(data() / "mnist"), None), {}
            for name, split in (("train", mnist.train), ("test", mnist.test)):
                some = split.take(np.arange(200))
                arrays |= {f"{name}_images": some["inputs"], f"{name}_labels": some["labels"]}
            return images("mnist", arrays)
        if config == "cifar_resnet":
            with np.load(data() / "cifar10_jpeg" / "cifar10_jpeg_12k.npz") as arrays:
                return images("cifar", dict(arrays))
        if config == "charlm":
            with gzip.open(data() / "tinyshakespeare" / "input.txt.gz") as text:
                (folder / "text.txt").write_bytes(text.read(20_000))
            return f"text:{folder / 'text.txt'}"
        return f"uci:{data() / 'uci' / 'bostonHousing.npz'}" if config == "uci" else "digits"

    return source


def train(folder, name, steps, place, words, *, is_fast=False):
    """Trains a run up to a step on a number of hosts with a number of devices each."""
    hosts, devices = place
    words = [
        *("train", *words, f"--workdir={folder / name}", f"--config.steps={steps}"),
        *("--config.steps_per_call=1", "--config.logging.every_steps=1"),
    ]
    each = [words]
    if hosts > 1:
        words += [f"--coordinator_address=127.0.0.1:{free_port()}", f"--num_processes={hosts}"]
        each = [[*words, f"--process_id={i}"] for i in range(hosts)]
    flags = fast_xla.flags(devices) if is_fast else fast_xla.devices(devices)
    log = f"{name}_{steps}"
    running = start(*each, folder=folder, name=log, xla_flags=flags, environ=ENVIRON)
    codes = running.codes()
    printed = "\n".join(path.read_text() for path in folder.glob(f"{log}_*"))
    assert codes == [0] * hosts, printed
    return printed


def arrays_in(workdir, step):
    opened = open_arrays(Disk(workdir / "checkpoints" / str(step) / STATE))
    return {name: array.read().result() for name, array in opened.items()}


def losses_in(workdir):
    """Losses of the batches of each step, of all members."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    found = [{k: v for k, v in line.items() if k.startswith("train/loss")} for line in lines]
    return [losses for losses in found if losses]


def words_of(config, source, execution):
    changed = [*SMALL[config], f"data.source={source}", f"execution={execution}"]
    changed += ["data.global_batch_size=16", "evaluation.global_batch_size=64"]
    return [f"--config=configs/{config}.py", *(f"--config.{each}" for each in changed)]


def resized(folder, places, words):
    """The final arrays and the losses of a run in parts, and of one on eight devices."""
    for part, (hosts, devices) in enumerate(places, 1):
        printed = train(folder, "resized", part * STEPS_OF_A_PART, (hosts, devices), words)
        assert f"mesh {hosts * devices} x 1" in " ".join(printed.split()), printed
    steps = len(places) * STEPS_OF_A_PART
    train(folder, "whole", steps, (1, 8), words)
    found = [(arrays_in(folder / n, steps), losses_in(folder / n)) for n in ("resized", "whole")]
    assert [len(losses) for _, losses in found] == [steps] * 2
    return found


BITWISE = [(config.stem, "loop") for config in CONFIGS]
BITWISE += [("digits", "map"), ("mnist_lenet", "map")]
ON_OTHERS = pytest.mark.parametrize("places", [DEVICES, HOSTS], ids=["devices", "hosts"])


@pytest.mark.faults
@ON_OTHERS
@pytest.mark.parametrize(("config", "execution"), BITWISE)
def test_a_shipped_config_keeps_its_bits_when_it_is_resized(
    config, execution, places, sources, tmp_path, record_property
):
    words = words_of(config, sources(config), execution)
    (arrays, losses), (expected, expected_losses) = resized(tmp_path, places, words)
    assert losses == expected_losses  # So every step has seen the same examples.
    bits, expected_bits = (
        {name: x.tobytes() for name, x in each.items()} for each in (arrays, expected)
    )
    assert bits == expected_bits
    record_row(record_property, config, execution, places, "the same bits")


@pytest.mark.faults
@ON_OTHERS
def test_attention_under_map_stays_within_a_tolerance(places, sources, tmp_path, record_property):
    words = words_of("charlm", sources("charlm"), "map")
    (arrays, losses), (expected, expected_losses) = resized(tmp_path, places, words)
    for own, other in zip(losses, expected_losses, strict=True):
        assert own == pytest.approx(other, rel=1e-5)
    # The bias of the keys changes no output. Its gradient is zero but for rounding errors, which
    # Adam scales up to whole steps.
    difference = max(
        np.abs(arrays[name] - expected[name]).max()
        for name in arrays
        if name.startswith("params") and not ("key" in name and "bias" in name)
    )
    assert difference < TOLERANCE
    record_row(record_property, "charlm", "map", places, f"within {difference:.1e}")


def record_row(record_property, config, execution, places, result):
    on = " -> ".join(f"{h} x {d}" for h, d in places)
    row = {"config": config, "execution": execution, "hosts x devices": on}
    for name, value in (row | {"state and losses": result}).items():
        record_property(name, value)


# A config file that notes which examples each step reads on each host.
NOTING = """
import dataclasses, json, pathlib, runpy, threading
import jax
from dist_ens.experiment import open_source
from dist_ens.sampling import Order

HERE = pathlib.Path(__file__).parent
reading = threading.local()
cursor = Order.cursor

def noted_cursor(self, seed, steps):
    reading.steps = steps
    return cursor(self, seed, steps)

Order.cursor = noted_cursor

class NotingSplit:
    in_memory = False  # So that the hosts read the examples of each step.

    def __init__(self, split):
        self.split = split

    def __len__(self):
        return len(self.split)

    def take(self, indices):
        if indices.ndim == 2:  # Not one of the checks before training.
            [step] = reading.steps
            line = json.dumps([step, indices.ravel().tolist()])
            with (HERE / f"read_{jax.process_index()}").open("a") as file:
                file.write(line + "\\n")
        return self.split.take(indices)

def make_source(data):
    digits = open_source(dataclasses.replace(data, source="digits"))
    return dataclasses.replace(digits, train=NotingSplit(digits.train))

get_config = runpy.run_path("configs/digits.py")["get_config"]
"""


@pytest.mark.faults
def test_the_same_examples_come_in_the_same_order_on_every_mesh(tmp_path, record_property):
    def examples(name, parts):
        """The examples of each step, those of hosts with different columns side by side."""
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.py").write_text(NOTING)
        words = [f"--config={folder / 'config.py'}", "--config.data.global_batch_size=16"]
        for part, (place, rows) in enumerate(parts, 1):
            mesh = [*words, f"--config.layout.ensemble_axis={rows}"]
            train(folder, "run", part * STEPS_OF_A_PART, place, mesh, is_fast=True)
        by_step = {}
        for host in range(2):
            file = folder / f"read_{host}"
            for line in file.read_text().splitlines() if file.exists() else ():
                step, indices = json.loads(line)
                if by_step.setdefault(step, []) != indices:
                    by_step[step] += indices
        return by_step

    parts = [((1, 1), 1), ((1, 8), 8), ((1, 8), 2), ((2, 4), 8), ((2, 4), 1), ((1, 1), 1)]
    expected = examples("whole", [((1, 1), 1)] * len(parts))
    found = examples("resized", parts)
    assert sorted(expected) == [*range(len(parts) * STEPS_OF_A_PART)]
    assert all(len(indices) == 16 for indices in expected.values())
    assert found == expected
    record_property("meshes", ", ".join(f"{r} x {h * d // r}" for (h, d), r in parts))
    record_property("examples of every step", "the same in the same order")
