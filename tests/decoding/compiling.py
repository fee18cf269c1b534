"""Functions as the backend's compiler runs them."""

import keras


def compiled(function):
    """`function` of tensors under XLA; PyTorch runs it as it is."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Traced for every batch at once.
        return tf.function(
            function, jit_compile=True, autograph=False, reduce_retracing=True
        )
    return function


def operations(function, *tensors):
    """A text that names the operations which `function` ran, or would run."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function).lower(*tensors).compile().as_text()
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        program = tf.function(function, jit_compile=True)
        text = program.experimental_get_compiler_ir(*tensors)
        return text(stage="optimized_hlo")
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            names.append(f" {operation.overloadpacket.__name__}(")
            return operation(*args, **(kwargs or {}))

    with Recorder():
        function(*tensors)
    return "\n".join(names)
