"""Compares trials: which setting is faster, how certain that is, and which of equally fast ones costs least."""

from __future__ import annotations

import math

from penstock.tune.trial_result import SettingTrial

SAME_SPEED = 0.02
"""Loops whose speeds differ by a smaller fraction are equally fast."""


_NOISE = 0.1
"""Two speeds whose difference has a larger error are not known to be equal."""


def speed(trial: SettingTrial) -> float:
    """Return samples per second."""
    return trial.samples_per_s


def cheapest_of_fastest(trials: list[SettingTrial]) -> SettingTrial:
    """Return the cheapest of the trials that are as fast as the fastest."""
    fastest = max(trials, key=speed)
    return min((trial for trial in trials if trial.samples_per_s >= (1 - SAME_SPEED) * fastest.samples_per_s), key=cost)


def without_doubtful_threads(trials: list[SettingTrial]) -> SettingTrial:
    """Return the cheapest of the fastest; threads only where they are known to be as fast as the best other setting.

    Threads need a dataset that they may share, so noise alone must not choose them.
    """
    choice = cheapest_of_fastest(trials)
    others = [trial for trial in trials if trial.setting.worker_type != "thread"]
    if choice.setting.worker_type != "thread" or not others:
        return choice
    best = max(others, key=speed)
    gain, error = lag(best, choice), error_of_lag(best, choice)
    is_known = error <= _NOISE or gain > error
    return choice if is_known else cheapest_of_fastest(others)


def lag(one: SettingTrial, other: SettingTrial) -> float:
    """Return by which fraction `one` is slower than `other`."""
    return 1 - one.samples_per_s / other.samples_per_s


def error_of_lag(one: SettingTrial, other: SettingTrial) -> float:
    """Return the error of `lag`."""
    return math.hypot(one.error, other.error)


def cost(trial: SettingTrial) -> tuple[float, ...]:
    """Return what a setting takes, as a sort key: workers (a thread costs less than a process), prefetch, memory."""
    setting = trial.setting
    is_special = setting.pin_memory + (setting.device is not None)
    return (
        setting.workers + 0.5 * (setting.worker_type == "process"),
        setting.prefetch_factor,
        is_special,
        trial.ram_nbytes,
    )
