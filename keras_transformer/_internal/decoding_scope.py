"""The registry through which attention layers find their caches.

While `generate` runs a model, or a layer runs in `call_with_cache`, a
`DecodingScope` is active. Layers read the slots of the current tokens there,
and attention layers exchange their caches with it. Everything it holds is a
plain tensor, so the surrounding step can be compiled.
"""

import contextvars

from keras_transformer._internal.backends import backend

_active = contextvars.ContextVar("decoding_scope", default=None)


class DecodingScope:
    """Caches and slots for one forward pass over a piece of a sequence.

    Args:
        slots: int32 (batch, length), the slot of each token of the piece; -1
            marks a token that does not exist (rows have unequal lengths).
            The existing tokens of a row come first and are consecutive.
        caches: Name to cache, as an earlier scope left them in `new_caches`.
        capacity: Slots that a cache made in this scope can hold.
        ragged: Whether `slots` may contain -1.
        in_place: Whether caches may be overwritten (PyTorch only).
        lean: Whether layers may run the `call` of their sub-layers directly.
        used: An upper bound, known on the host, of the slots in use after
            this piece, or None. Attention then reads only those.
    """

    def __init__(
        self,
        slots,
        caches,
        *,
        capacity=None,
        ragged=False,
        in_place=False,
        lean=False,
        used=None,
    ):
        self.slots = slots
        self.capacity = capacity
        self.ragged = ragged
        self.in_place = in_place
        self.lean = lean
        self.used = used
        self.new_caches = {}
        # What the driver checks on the host before each call: see `watch`.
        self.watched = []
        self._caches = caches
        self._trace = backend.current_trace()
        self._calls = {}
        self._static = {}

    def __enter__(self):
        self._token = _active.set(self)
        return self

    def __exit__(self, *_):
        _active.reset(self._token)

    def name_of(self, layer) -> str:
        """The cache name of this call: the path and the call's ordinal.

        Paths repeat in nested models, and a shared layer is called often.
        """
        ordinal = self._calls.get(layer.path, 0)
        self._calls[layer.path] = ordinal + 1
        return f"{layer.path}#{ordinal}"

    def take(self, name: str):
        """The cache of an earlier scope, or None."""
        return self._caches.get(name)

    def put(self, name: str, cache):
        """Hands the new cache of a layer to the next scope."""
        if backend.current_trace() != self._trace:
            raise ValueError(
                f"Layer {name.rpartition('#')[0]!r} cannot be decoded with "
                "caches inside of `ops.cond`, `ops.scan`, a loop or a "
                "rematerialised function: its cache cannot leave it. Call the "
                "layer outside of it."
            )
        self.new_caches[name] = cache

    def watch(self, layer, mask):
        """Notes the mask of a layer that attends over generated tokens."""
        self.watched.append((layer.path, mask))

    def mark_static(self, tensor):
        """Declares that a tensor does not change from step to step."""
        # The tensor is kept, so that its id is not given to another one.
        self._static[id(tensor)] = tensor

    def is_static(self, tensor) -> bool:
        """Whether `mark_static` was called with this tensor."""
        return id(tensor) in self._static


def current_scope() -> DecodingScope | None:
    """The active scope, or None outside of decoding."""
    return _active.get()
