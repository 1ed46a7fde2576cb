"""Numbers by which several parts of the doctor decide, each with its unit and why it is that."""

from __future__ import annotations

STALL_FRACTION = 0.15
"""Of the loop's time: a loop that waits less has little to gain: at most 1 / (1 - 0.15) = 1.18 times."""
CERTAIN_STALL_FRACTION = 0.3
"""Of the loop's time: a wait this long counts even if one round with free loading was no faster."""
WORTHWHILE_GAIN = 1.1
"""Times as fast: below it a change is not worth the user's time, and noise between rounds is as large."""
STEP_SLOWDOWN = 1.5
"""Times as long: what slows a step this much, its workers or its own growth, is worth a change."""
BUSY_WORKERS = 0.7
"""Of the workers' time: workers that make samples for less wait for the loop, or carry batches to it."""
BUSY_FRACTION = 0.3
"""Of the cores: with more of them used by others, workers get their share by number and not by need."""
HIDDEN_LOADING = 0.7
"""Times the step: workers hide loading that needs less; the rest is a margin for slow batches."""
FEW_ITERATORS = 2
"""Iterators: a program that made no more than this may have looked at one batch first."""
STARTUP_FRACTION = 0.25
"""Of an epoch's time: starting workers is worth a change if it takes more of the epoch."""
SHUFFLED_SAMPLES = 8
"""Samples per epoch: 8 have the same order twice by chance once in 40 320."""
OTHER_STARTUP_FRACTION = 0.1
"""Of the loop's time between two starts: short starts matter as well where they are frequent."""
SLOW_TIME_FRACTION = 0.25
"""Of all samples' time: slow samples that take less together do not decide the loader's speed."""
PYTHON_NUMBERS = 32
"""Numbers per sample: default_collate makes a tensor for each position; a few labels are harmless."""
PART_FRACTION = 0.2
"""Of a sample's time: what takes less is not what makes a sample slow."""
WASTED_FRACTION = 0.2
"""Of a sample's or step's time: a log, or a round trip to a Manager, can be left out whole, where real work can only be
made faster."""
MOST_FRACTION = 0.6
"""Of a sample's or batch's time: what no pattern explains is named only where it is most of the cost."""
LINE_FRACTION = 0.4
"""Of a sample's or step's time: a line that takes less is not what decides how long it takes."""
COSTLY_SAMPLE_S = 1e-4
"""Seconds per sample: cheaper samples cost what Python takes for any call, in whichever line that is."""
ESTIMATED_FRACTION = 0.9
"""Of a sample's or step's time: beyond, what is left is within the error of looking every few milliseconds."""
RUN_STALL_FRACTION = 0.1
"""Of the loop's time: a whole run is a longer measurement than a trial, so less is significant."""
WINDOW_BATCHES = 4
"""Batches of its own: beyond those that may have been made ahead; a mean of fewer says little."""
WINDOW_S = 0.12
"""Seconds: shorter timing windows measure the scheduler of the operating system."""
