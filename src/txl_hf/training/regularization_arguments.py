"""What can be regularised, as options: without torch, so that a command line is read before torch comes."""

from dataclasses import dataclass, field

__all__ = ["RegularizationArguments"]

_RATES = ("word_dropout", "input_dropout", "attention_dropout", "mlp_dropout", "output_dropout")


@dataclass
class RegularizationArguments:
    """What to regularise and how much; 0 leaves a place as the model's configuration has it.

    Raises:
        ValueError: a rate is outside [0, 1), or a coefficient is negative.
    """

    # The title of these options where HfArgumentParser reads them.
    _argument_group_name = "regularisation"

    word_dropout: float = field(
        default=0.0, metadata={"help": "Rate at which whole words of the embedding are dropped in a forward."}
    )
    input_dropout: float = field(
        default=0.0, metadata={"help": "Rate of locked dropout of the embedded input, in place of config.dropout."}
    )
    attention_dropout: float = field(
        default=0.0, metadata={"help": "Rate of locked dropout of attention's outputs, in place of config.dropout."}
    )
    mlp_dropout: float = field(
        default=0.0,
        metadata={"help": "Rate of locked dropout in and after the feed-forward, in place of config.dropout."},
    )
    output_dropout: float = field(
        default=0.0, metadata={"help": "Rate of locked dropout of the final output, in place of config.dropout."}
    )
    ar: float = field(
        default=0.0, metadata={"help": "Coefficient of the mean square of the dropped final output (AR)."}
    )
    tar: float = field(
        default=0.0, metadata={"help": "Coefficient of the mean square of the final output's steps in time (TAR)."}
    )

    def __post_init__(self):
        for name in _RATES:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and less than 1")
        for name in ("ar", "tar"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be a number of at least 0")
