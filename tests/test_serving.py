"""The example that serves an exported ensemble, started as a process."""

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

import flax.linen as nn
import numpy as np
import optax
import pytest

import dist_ens as de
from commands import LIMIT_SECS, free_port
from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens.experiment import LoadedRun

INPUTS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


@contextlib.contextmanager
def serving(file):
    """The address of a service of a file."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, ROOT / "examples/serve.py", file, str(port)],
        cwd=file.parent,
        env=COMMAND_ENVIRONMENT | {"JAX_PLATFORMS": "cpu"},
    )
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + LIMIT_SECS
    try:
        while True:
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(address)
                break
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


def answer(address, value=None):
    content = None if value is None else json.dumps(value).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, content, headers)) as response:
        return json.load(response)


def test_a_service_answers_with_the_prediction_of_an_exported_file(tmp_path):
    loss = de.losses.categorical(2)
    ensemble = de.Ensemble(nn.Dense(2), optax.sgd(0.1), loss, num_members=3)
    state = ensemble.init({"inputs": INPUTS})
    LoadedRun(None, ensemble, state, 0, inputs=INPUTS).export(tmp_path / "m", members=True)
    expected = ensemble.predict(state, INPUTS)
    with serving(tmp_path / "m") as address:
        assert answer(address)["member_ids"] == [0, 1, 2]
        for size in (5, 1):
            found = answer(f"{address}/predict", {"inputs": INPUTS[:size].tolist()})
            assert {*found} == {"mean", "total", "aleatoric", "epistemic", "members"}
            np.testing.assert_allclose(found["mean"], expected.mean[:size], atol=1e-5)
            np.testing.assert_allclose(found["members"], expected.members[:, :size], atol=1e-5)
        for wrong in ([[1, 2]], [], [["a", "b", "c"]], [[1], [1, 2]]):
            with pytest.raises(urllib.error.HTTPError, match="422"):
                answer(f"{address}/predict", {"inputs": wrong})


def test_a_service_refuses_numbers_that_its_integers_do_not_hold(tmp_path):
    network = nn.Sequential([lambda x: x / 255.0, nn.Dense(2)])
    ensemble = de.Ensemble(network, optax.sgd(0.1), de.losses.categorical(2), num_members=2)
    pixels = np.array([[0, 7, 255]], np.uint8)
    state = ensemble.init({"inputs": pixels})
    LoadedRun(None, ensemble, state, 0, inputs=pixels).export(tmp_path / "m")
    with serving(tmp_path / "m") as address:
        found = answer(f"{address}/predict", {"inputs": pixels.tolist()})
        np.testing.assert_allclose(found["mean"], ensemble.predict(state, pixels).mean, atol=1e-5)
        for wrong in ([[0.5, 0, 0]], [[300, 0, 0]], [[-1, 0, 0]]):
            with pytest.raises(urllib.error.HTTPError, match="422"):
                answer(f"{address}/predict", {"inputs": wrong})
