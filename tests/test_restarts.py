"""The simulation of failing hosts, against Daly's closed form and cases solved by hand."""

import dataclasses
import math

import pytest

from benchmarks.restarts import (
    Failures,
    best_interval_secs,
    expected_useful_fraction,
    simulated_useful_fraction,
)

RUN = Failures(
    host_mtbf_secs=64_000.0, num_hosts=64, interval_secs=300.0, save_secs=30.0, restart_secs=120.0
)


@pytest.mark.parametrize("num_hosts", [1, 16, 64, 256])
@pytest.mark.parametrize("restart_secs", [0.0, 120.0, 600.0])
def test_the_simulation_agrees_with_dalys_formula(num_hosts, restart_secs):
    run = dataclasses.replace(RUN, num_hosts=num_hosts, restart_secs=restart_secs)
    fraction, error = simulated_useful_fraction(run, num_segments=20_000, seed=1)
    assert error < 0.01
    # One of 16,000 fair simulations differs by more than four standard errors.
    assert abs(fraction - expected_useful_fraction(run)) < 4 * error


def test_the_formula_is_that_of_daly():
    # 64 hosts that fail every 64,000 s fail every M = 1000 s together, and an interval with its
    # save takes 330 s. 1000 exp(0.12) (exp(0.33) - 1) = 440.8 s, for 300 s of work.
    assert RUN.mtbf_secs == 1000.0
    by_hand = 300 / (1000 * math.exp(0.12) * (math.exp(0.33) - 1))
    assert by_hand == pytest.approx(0.6805, abs=1e-4)
    assert expected_useful_fraction(RUN) == pytest.approx(by_hand)


def test_only_saving_costs_time_without_failures_and_nothing_ends_with_too_many():
    run = dataclasses.replace(RUN, host_mtbf_secs=1e15)
    assert simulated_useful_fraction(run, num_segments=100, seed=1) == (pytest.approx(300 / 330), 0)
    assert expected_useful_fraction(run) == pytest.approx(300 / 330)
    assert expected_useful_fraction(dataclasses.replace(RUN, host_mtbf_secs=1.0)) == 0.0


@pytest.mark.parametrize("save_secs", [1.0, 30.0, 1000.0])
def test_no_other_interval_is_better_than_the_best(save_secs):
    run = dataclasses.replace(RUN, save_secs=save_secs)
    best = best_interval_secs(run)

    def useful(interval_secs):
        return expected_useful_fraction(dataclasses.replace(run, interval_secs=interval_secs))

    assert useful(best) > max(useful(part * best) for part in (0.9, 0.99, 1.01, 1.1))
