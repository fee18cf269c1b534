"""Saved identity, and nested objects in configurations.

The registered name `keras_transformer>ClassName` is the contract of saved
files; modules may move.
"""

import weakref

import keras

register = keras.saving.register_keras_serializable(package="keras_transformer")


def serialize(value):
    """The JSON form of a nested layer or mask; None and strings stay."""
    if value is None or isinstance(value, str):
        return value
    return keras.saving.serialize_keras_object(value)


def dtype_config(layer) -> dict:
    """The `dtype` of a configuration, which names quantised sub-layers."""
    policy = layer.dtype_policy
    if not isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        quantized = {
            part.path: part.dtype_policy
            for part in layer._flatten_layers(include_self=False)
            if getattr(part, "quantization_mode", None)
        }
        if quantized:
            policy = keras.dtype_policies.DTypePolicyMap(
                default_policy=policy.name, policy_map=quantized
            )
    return {"dtype": keras.dtype_policies.serialize(policy)}


def part_policy(parent, name: str):
    """The dtype policy of the sub-layer called `name`, while `parent` is built.

    Keras's quantised layers do not save again when they hold a whole map.
    """
    policy = parent.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[f"{parent.path}/{name}"]
    return policy


def deserialize(value):
    """The object behind a JSON form; objects and strings pass unchanged."""
    if isinstance(value, dict) and "class_name" in value:
        return keras.saving.deserialize_keras_object(value)
    return value


# Keras resolves objects that several layers hold only inside `load_model`.
# `clone_model` and `Model.from_config` rebuild layer by layer, so the parts
# they share are kept here while the copies live. An entry remembers which
# layers took it: when one of them comes again, another copy has begun.
_shared_parts = {}


def deserialize_shared(value, taker: str):
    """Like `deserialize`, but keeps one part that several layers share.

    Args:
        value: A serialised layer, or an object that passes unchanged.
        taker: Name of the layer that will hold the part.
    """
    if not isinstance(value, dict) or "shared_part" not in value:
        return deserialize(value)
    key = value["shared_part"]
    reference, takers = _shared_parts.get(key, (lambda: None, set()))
    part = reference()
    if part is None or taker in takers:
        part, takers = deserialize(value), set()
    takers.add(taker)
    _shared_parts[key] = (weakref.ref(part), takers)
    return part


def serialize_shared(part):
    """Like `serialize`; a part with weights is marked, so that copies share it.

    The mark is the part's name and identity in this process.
    """
    config = serialize(part)
    if isinstance(part, keras.layers.Layer) and part.weights:
        config["shared_part"] = f"{part.name}/{id(part)}"
        # The layer that holds it builds it, so that paths stay what they were.
        config.pop("build_config", None)
    return config
