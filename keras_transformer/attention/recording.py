"""Notes of what the door to the executors chooses during one call.

While a recorder is active, `dot_product_attention` notes its choice and
leaves the computation out.
"""

import contextlib
import contextvars
import dataclasses

from keras import ops

from keras_transformer._internal.backends import backend
from keras_transformer.attention.choice import Call, Choice, choose

_active = contextvars.ContextVar("attention_recorder", default=None)


class Recorder:
    """What the door chose in one call of a layer or model.

    Args:
        device: Where the call would run.
    """

    def __init__(self, device):
        self.device = device
        self.begin()

    def begin(self):
        """Forgets everything: a call begins."""
        self.noted = []
        self.caller = None
        self.refusal = None
        # Code that is compiled inside of the call may be kept and run later,
        # so nothing is left out there.
        self.trace = backend.current_trace()

    def choose(self, call, implementation, check_data):
        """The `Choice`, noted; a refusal is kept with the layer's path."""
        caller, self.caller = self.caller, None
        self.refusal = None
        call = dataclasses.replace(call, device=self.device)
        try:
            choice = choose(call, implementation)
            check_data()
        except ValueError as error:
            place = "" if caller is None else f"Layer {caller!r}: "
            self.refusal = f"{place}{error}"
            raise
        self.noted.append((caller, implementation, call, choice))
        return choice


@contextlib.contextmanager
def recording(recorder):
    """Makes the door note its choices, and leave the computation out."""
    token = _active.set(recorder)
    try:
        yield
    finally:
        _active.reset(token)


def note_caller(layer):
    """Says, while a recorder is active, which layer calls the door next."""
    recorder = _active.get()
    if recorder is not None:
        recorder.caller = layer.path


def chosen(call: Call, implementation: str, data) -> Choice:
    """The `Choice` for a call, noted while a recorder is active.

    Args:
        call: The call.
        implementation: What was asked for.
        data: The batch's `MaskData`.
    """
    recorder = _active.get()
    if recorder is None:
        return choose(call, implementation)
    return recorder.choose(
        call, implementation, lambda: _check_data(call, data)
    )


def left_out(call: Call):
    """Outputs and weights to return uncomputed; None to compute them."""
    recorder = _active.get()
    if recorder is None or backend.current_trace() != recorder.trace:
        return None
    leading = (call.batch, call.query_length, call.num_heads)
    if None in leading or call.key_length is None:
        return None
    outputs = ops.zeros((*leading, call.value_dim), call.dtype)
    if not call.scores:
        return outputs
    batch, queries, heads = leading
    scores_shape = (batch, heads, queries, call.key_length)
    return outputs, ops.zeros(scores_shape, call.dtype)


def _check_data(call, data):
    """Raises what the mask raises for data that is missing or misshapen."""
    lengths = call.query_length, call.key_length
    if None in lengths or call.has_slots:
        return
    data.check_lengths(*lengths)
    if not call.mask.data_names:
        return
    slots = [ops.arange(length, dtype="int32") for length in lengths]
    # As tensors: in a trace this computes nothing.
    if not backend.is_concrete(slots[0]):
        call.mask.evaluate(*slots, data)
