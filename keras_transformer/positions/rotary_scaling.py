"""Stretching rotary frequencies to lengths beyond those of training."""

import inspect

from keras_transformer._internal import checks
from keras_transformer._internal.serialization import register
from keras_transformer.positions import rotary_frequencies
from keras_transformer.positions.rotary_settings import checked_settings

_KINDS = ("linear", "ntk", "dynamic_ntk", "yarn", "llama3", "longrope")


@register
class RoPEScaling:
    """How `RoPE` changes its frequencies; immutable, equal by value.

    Make one with the constructor named after its kind. Each equals the
    formula of Hugging Face transformers for the same settings.

    References: linear, [Chen et al., 2023](https://arxiv.org/abs/2306.15595);
    YaRN, with an account of NTK and dynamic NTK,
    [Peng et al., 2023](https://arxiv.org/abs/2309.00071); Llama 3,
    [Dubey et al., 2024](https://arxiv.org/abs/2407.21783); LongRoPE,
    [Ding et al., 2024](https://arxiv.org/abs/2402.13753)

    Args:
        kind: `"linear"`, `"ntk"`, `"dynamic_ntk"`, `"yarn"`, `"llama3"` or
            `"longrope"`.
        **settings: Those of the constructor of that name.

    Raises:
        ValueError: an unknown kind or setting, a missing setting, or one
            that would have no effect.

    Example:

    ```python
    rope = RoPE(scaling=RoPEScaling.yarn(4, original_max_length=4096))
    ```
    """

    def __init__(self, kind: str, **settings):
        checks.one_of(_KINDS, kind=kind)
        settings = checked_settings(kind, settings, self._defaults(kind))
        self.__dict__.update(kind=kind, **settings)

    @classmethod
    def linear(cls, factor):
        """Divides every frequency by `factor`."""
        return cls("linear", factor=factor)

    @classmethod
    def ntk(cls, factor):
        """Raises the wavelengths' base: the slowest pair slows by `factor`."""
        return cls("ntk", factor=factor)

    @classmethod
    def dynamic_ntk(cls, factor, original_max_length):
        """NTK that grows with each row's length past the original one."""
        return cls(
            "dynamic_ntk",
            factor=factor,
            original_max_length=original_max_length,
        )

    @classmethod
    def yarn(
        cls,
        factor,
        original_max_length,
        *,
        beta_fast=32.0,
        beta_slow=1.0,
        attention_factor=None,
        mscale=None,
        mscale_all_dim=None,
        truncate=True,
    ):
        """Keeps the pairs that turn often, slows those that hardly turn.

        Args:
            factor: How much longer sequences become.
            original_max_length: Longest sequence of the training.
            beta_fast: Turns in the original length from which on a pair
                keeps its frequency.
            beta_slow: Turns below which a pair is slowed by `factor`;
                between the two a ramp blends.
            attention_factor: What multiplies sine and cosine;
                `0.1 * log(factor) + 1` when None.
            mscale: Weight of the logarithm in the numerator of
                `attention_factor`, given with `mscale_all_dim` instead of it.
            mscale_all_dim: The same in the denominator.
            truncate: Whether the ramp begins and ends at whole pairs.
        """
        return cls(
            "yarn",
            factor=factor,
            original_max_length=original_max_length,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            attention_factor=attention_factor,
            mscale=mscale,
            mscale_all_dim=mscale_all_dim,
            truncate=truncate,
        )

    @classmethod
    def llama3(
        cls,
        factor,
        *,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_max_length=8192,
    ):
        """Slows long wavelengths, keeps short ones, and blends between.

        Args:
            factor: How much longer sequences become.
            low_frequency_factor: Turns in the original length below which a
                pair is slowed by `factor`.
            high_frequency_factor: Turns above which a pair is kept.
            original_max_length: Longest sequence of the training.
        """
        return cls(
            "llama3",
            factor=factor,
            low_frequency_factor=low_frequency_factor,
            high_frequency_factor=high_frequency_factor,
            original_max_length=original_max_length,
        )

    @classmethod
    def longrope(
        cls,
        short_factor,
        long_factor,
        original_max_length,
        *,
        factor=None,
        max_length=None,
        attention_factor=None,
    ):
        """Divides each frequency by a searched factor of its own.

        Exactly one of the last three is given.

        Args:
            short_factor: One factor a pair, for rows up to the original
                length.
            long_factor: The same for longer rows.
            original_max_length: Longest sequence of the training.
            factor: Ratio of the new longest sequence to the original one,
                from which `attention_factor` follows.
            max_length: The new longest sequence, which gives that ratio.
            attention_factor: What multiplies sine and cosine.
        """
        return cls(
            "longrope",
            short_factor=short_factor,
            long_factor=long_factor,
            original_max_length=original_max_length,
            factor=factor,
            max_length=max_length,
            attention_factor=attention_factor,
        )

    @classmethod
    def _defaults(cls, kind):
        """Settings of a kind and their defaults, `...` where there is none."""
        parameters = inspect.signature(getattr(cls, kind)).parameters
        return {
            name: ...
            if parameter.default is parameter.empty
            else parameter.default
            for name, parameter in parameters.items()
        }

    def __setattr__(self, name, value):
        raise AttributeError("A RoPEScaling cannot be changed; make another.")

    def __eq__(self, other):
        return isinstance(other, RoPEScaling) and vars(self) == vars(other)

    def __hash__(self):
        return hash(tuple(vars(self).items()))

    def __repr__(self):
        shown = ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name, default in self._defaults(self.kind).items()
            if getattr(self, name) != default
        )
        return f"RoPEScaling.{self.kind}({shown})"

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies change with the length of a row."""
        return self.kind in ("dynamic_ntk", "longrope")

    @property
    def attention_multiplier(self) -> float:
        """What sine and cosine are multiplied with."""
        if self.kind == "yarn":
            return rotary_frequencies.yarn_multiplier(self)
        if self.kind == "longrope":
            return rotary_frequencies.longrope_multiplier(self)
        return 1.0

    def frequencies(
        self, max_wavelength: float, dim: int, length: int | None = None
    ):
        """Radians per step of each pair, float64 `(dim // 2,)`.

        Args:
            max_wavelength: Base of the wavelengths.
            dim: Number of rotated features.
            length: Running length of the row; the original one when None.
        """
        formula = getattr(rotary_frequencies, self.kind)
        return formula(self, float(max_wavelength), dim, length)

    def get_config(self):
        return dict(vars(self))

    @classmethod
    def from_config(cls, config):
        return cls(**config)
