"""Registers Transformer-XL with the Auto classes of `transformers`, and its card with Trainer, once they come.

The Auto classes take real classes alone, and to import these takes seconds: torch, and transformers' modelling code.
Whoever asks for `txl-train --help`, or needs a tokenizer alone, should not wait for them. So a finder, first among
Python's own, notices the imports of transformers and of this package. When the outermost of them has ended, so that no
module is there by half, the classes are registered with those Auto classes that have come, before anybody can ask for
them. Auto classes that were there before this package are served at once.

`Trainer` has no place to register a card, so its `create_model_card` asks this package first, whose card says how to
load the model. Whatever else it trains, adapters of PEFT too, has the card that it always had.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["register_when_imported"]

_PACKAGE = __name__.partition(".")[0]
_TRAINER = "transformers.trainer"
# The modules of this package, where their Auto classes are, and which of these is for which class.
_AUTO_CLASSES = {
    f"{_PACKAGE}.configuration_transfo_xl": (
        "transformers.models.auto.configuration_auto",
        {"AutoConfig": "TransfoXLConfig"},
    ),
    f"{_PACKAGE}.tokenization_transfo_xl": (
        "transformers.models.auto.tokenization_auto",
        {"AutoTokenizer": "TransfoXLTokenizer"},
    ),
    f"{_PACKAGE}.modeling_transfo_xl": (
        "transformers.models.auto.modeling_auto",
        {
            "AutoModel": "TransfoXLModel",
            "AutoModelForCausalLM": "TransfoXLForCausalLM",
            "AutoModelForSequenceClassification": "TransfoXLForSequenceClassification",
            "AutoModelForTokenClassification": "TransfoXLForTokenClassification",
        },
    ),
}


def register_when_imported() -> None:
    """See to it that Transformer-XL is known to every Auto class that is there, and that will be there."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    with finder.importing():
        pass


class _Finder(MetaPathFinder):
    """Leaves the search to the finders that follow, and watches the imports."""

    def __init__(self) -> None:
        self.named: set[str] = set()
        self.registered: set[str] = set()
        self.here = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in (_PACKAGE, "transformers"):
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self.watch(spec.loader)
        return spec

    def watch(self, loader) -> None:
        """Know when this loader executes a module. It stays the module's own, which is read by inspect and others."""

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            with self.importing():
                loader.exec_module(module)

        loader.exec_module = exec_module

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Register what can be registered when the outermost of these blocks ends."""
        depth = getattr(self.here, "depth", 0)
        self.here.depth = depth + 1
        try:
            yield
            # One thing may bring another.
            while depth == 0 and self.register_next():
                pass
        finally:
            self.here.depth = depth

    def register_next(self) -> bool:
        """Whether there was something to do for a module."""
        for name, (auto, classes) in _AUTO_CLASSES.items():
            if auto in sys.modules and name not in self.registered:
                self.registered.add(name)
                # Each may be under way in another thread, which is waited for.
                _register(import_module(name), import_module(auto), classes)
                return True
            if name in sys.modules and name not in self.named:
                self.named.add(name)
                module = import_module(name)
                for auto_class, own in classes.items():
                    # So that `save_pretrained` writes the code beside the weights, and which Auto class loads it.
                    # `register_for_auto_class` sets no more, but imports the Auto classes, and with them torch.
                    getattr(module, own)._auto_class = auto_class
                return True
        if _TRAINER in sys.modules and _TRAINER not in self.registered:
            self.registered.add(_TRAINER)
            _give_cards(import_module(_TRAINER).Trainer)
            return True
        return False


def _register(module: ModuleType, auto: ModuleType, classes: dict[str, str]) -> None:
    from .configuration_transfo_xl import TransfoXLConfig

    for auto_class, own in classes.items():
        register, found = getattr(auto, auto_class).register, getattr(module, own)
        if auto_class == "AutoConfig":
            register(TransfoXLConfig.model_type, found)
        elif auto_class == "AutoTokenizer":
            register(TransfoXLConfig, fast_tokenizer_class=found)
        else:
            register(TransfoXLConfig, found)


def _give_cards(trainer_class) -> None:
    theirs = trainer_class.create_model_card

    @wraps(theirs)
    def create_model_card(self, *args, **kwargs):
        # Without this module nobody has a model of ours.
        layout = sys.modules.get(f"{_PACKAGE}.layout_transfo_xl")
        if layout is not None:
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            if isinstance(model, layout.TransfoXLLayoutMixin):
                from . import trainer_cards

                return trainer_cards.create_model_card(self, model, *args, **kwargs)
        return theirs(self, *args, **kwargs)

    trainer_class.create_model_card = create_model_card
