"""What device memory was used for at its peak, as parts that add up: for the terminal's report and for the page."""

from __future__ import annotations

from penstock.core.units import size_text
from penstock.observe.meters.device_meter import DeviceMemory
from penstock.observe.record.time_parts import Bar, parts_of


def device_memory_bar(memory: DeviceMemory) -> Bar:
    """Return what the memory of the accelerators in use held at its peak; what was not used is a part too."""
    peak, reserved = memory.peak_nbytes, max(memory.peak_nbytes, memory.peak_reserved_nbytes)
    total = max(reserved, memory.total_nbytes or 0)
    known = memory.weights_nbytes is not None
    roles = (memory.weights_nbytes or 0, memory.gradients_nbytes, memory.optimizer_nbytes) if known else (0, 0, 0)
    others = "what autograd saved, batches, temporary tensors" if known else "weights, activations, all of them"
    amounts = {
        "weights": ("weights", roles[0], "parameters and buffers"),
        "gradients": ("gradients", roles[1], "of the parameters"),
        "optimizer": ("optimizer", roles[2], "the optimizer's state"),
        "activations and others" if known else "tensors": ("device", max(0, peak - sum(roles)), others),
        "cached": ("reserved", reserved - peak, "reserved by torch at its own peak, beyond tensors"),
        "not reserved": ("idle", total - reserved, "left for other programs, and for the driver"),
    }
    note = "The most that tensors held at once, and what the rest of the memory was."
    if memory.retries:
        note += f" Memory was full {memory.retries} times: torch freed its cached blocks and tried again."
    if memory.out_of_memory:
        note += f" Out-of-memory errors: {memory.out_of_memory}."
    text = size_text(peak) + (f" of {size_text(memory.total_nbytes)}" if memory.total_nbytes else "")
    parts = parts_of(total, amounts, lambda nbytes: size_text(int(nbytes))) if total else ()
    return Bar(label="Device memory at its peak", text=text, note=note, parts=parts)
