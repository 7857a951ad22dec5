"""Registers Transformer-XL with the Auto classes, Trainer and pipelines of `transformers`, once they come.

The Auto classes take real classes alone, and to import these takes seconds: torch, and transformers' modelling code.
Whoever asks for `txl-train --help`, or needs a tokenizer alone, should not wait for them. So a finder, first among
Python's own, notices the imports of transformers and of this package. When the outermost of them has ended, so that no
module is there by half, the classes are registered with those Auto classes that have come, before anybody can ask for
them. Auto classes that were there before this package are served at once.

`Trainer` has no place to register a card, so its `create_model_card` asks this package first, whose card says how to
load the model. What it pushes while it trains has code and card beside it. Before it gives the tokenizer's special
tokens to a model, that is asked whether it has them. Whatever else it trains, adapters of PEFT too, is trained,
described and pushed as it always was. Pipelines leave out the memory that they know nothing of.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib._bootstrap import _DeadlockError  # type: ignore[attr-defined]  # of Python itself: no stub has it
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from .pipelines_transfo_xl import leave_out_mems

__all__ = ["own_model", "register_when_imported"]

_PACKAGE = __name__.partition(".")[0]
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
                if module.__spec__ is not None and getattr(self.here, "depth", 0) == 1:
                    # The module is executed. A thread that waits for it while this one needs that thread's modules
                    # would wait for ever. Python looks at this attribute before it waits; no stub has it.
                    module.__spec__._initializing = False  # type: ignore[attr-defined]

        loader.exec_module = exec_module

    @contextmanager
    def importing(self) -> Iterator[None]:
        """Register what can be registered when the outermost of these blocks ends."""
        depth = getattr(self.here, "depth", 0)
        self.here.depth = depth + 1
        try:
            yield
            # A registration may import modules that call for another registration.
            while depth == 0 and self.register_next():
                pass
        except _DeadlockError:
            # Another thread imports one of the modules and waits for one of this thread's: it registers at its end.
            if depth > 0:
                raise
        finally:
            self.here.depth = depth

    def register_next(self) -> bool:
        """Whether there was something to do for a module. One that is under way is left to the thread that imports it:
        a thread that waited for another's modules, which may wait for its own, would end in an error."""
        for name, (auto, classes) in _AUTO_CLASSES.items():
            if _is_whole(auto) and name not in self.registered and (_is_whole(name) or name not in sys.modules):
                module = import_module(name)
                if name not in self.registered:
                    self.registered.add(name)
                    _register(module, sys.modules[auto], classes)
                return True
            if _is_whole(name) and name not in self.named:
                module = sys.modules[name]
                self.named.add(name)
                for auto_class, own in classes.items():
                    # `save_pretrained` then writes the code beside the weights, and which Auto class loads it.
                    # `register_for_auto_class` sets no more, but imports the Auto classes, and with them torch.
                    getattr(module, own)._auto_class = auto_class
                return True
        for name, prepare in _PREPARED.items():
            if _is_whole(name) and name not in self.registered:
                self.registered.add(name)
                prepare(sys.modules[name])
                return True
        return False


def _is_whole(name: str) -> bool:
    """Whether a module has been executed to its end, in this thread or another."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


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


def own_model(trainer):
    """The model of a Trainer, unwrapped, where it is one of this package; None where it is another, or an adapter is
    saved in its place."""
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    return model if _is_own(model) and not model._is_adapted() else None


def _is_own(model) -> bool:
    # A model of ours exists only where this module has been imported.
    layout = sys.modules.get(f"{_PACKAGE}.layout_transfo_xl")
    return layout is not None and isinstance(model, layout.TransfoXLLayoutModel)


def _serve_trainer(module: ModuleType) -> None:
    trainer_class = module.Trainer
    their_card, their_push = trainer_class.create_model_card, trainer_class._push_from_checkpoint
    their_alignment = module.align_special_tokens

    @wraps(their_alignment)
    def align_special_tokens(model, processing_class):
        if _is_own(model):
            from .trainer import check_special_tokens

            check_special_tokens(model.config, processing_class)
        their_alignment(model, processing_class)

    @wraps(their_card)
    def create_model_card(self, *args, **kwargs):
        if (model := own_model(self)) is not None:
            from . import trainer_cards

            return trainer_cards.create_model_card(self, model, *args, **kwargs)
        return their_card(self, *args, **kwargs)

    @wraps(their_push)
    def _push_from_checkpoint(self, checkpoint_folder):
        if (model := own_model(self)) is not None:
            from .trainer_cards import complete_push

            complete_push(self, model, checkpoint_folder)
        their_push(self, checkpoint_folder)

    trainer_class.create_model_card, trainer_class._push_from_checkpoint = create_model_card, _push_from_checkpoint
    vars(module)["align_special_tokens"] = align_special_tokens


# What is done to modules of transformers once they are there.
_PREPARED = {"transformers.trainer": _serve_trainer, "transformers.pipelines.pt_utils": leave_out_mems}
