"""Which batches of an iterable `fit` trains on: from a checkpoint, a given state, several hosts."""

import json
import sys

import pytest

from test_cluster import finish, free_port, start


@pytest.fixture(scope="module")
def said_by_two(tmp_path_factory):
    """What `fit` said on each of two hosts, of each pair of iterators."""
    folder = tmp_path_factory.mktemp("two_iterators")
    logs = [folder / f"host_{i}.log" for i in range(2)]
    script = [sys.executable, "tests/two_iterators.py", f"127.0.0.1:{free_port()}"]
    codes = finish([start([*script, str(i), str(folder)], logs[i]) for i in range(2)], logs)
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    return [json.loads((folder / f"said_{i}.json").read_text()) for i in range(2)]


def test_hosts_that_yield_different_shapes_are_both_refused(said_by_two):
    for host, of_host in enumerate(said_by_two):
        for name in ("width", "length", "keys"):
            assert of_host[name].startswith(
                "The hosts yield batches of different shapes: hosts [1] differ from host 0, and "
                f"this host ({host}) yields "
            )


def test_a_batch_has_the_examples_of_each_column_once(said_by_two):
    for of_host in said_by_two:
        # 4 examples of each host: of columns of its own, and of one column that both feed.
        assert of_host["alike"] == {"batch_size": 8}
        assert of_host["shared"] == {"batch_size": 4}


def test_hosts_that_yield_different_examples_for_one_column_are_both_refused(said_by_two):
    for of_host in said_by_two:
        assert of_host["different"].startswith(
            "Hosts [0, 1] feed column 0 of the mesh 8 x 1 (ensemble x data), and yield different "
            "examples for it, so that members would not see the same batch. Yield the same"
        )
