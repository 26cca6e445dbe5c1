"""What a run begins with: weights of another run, and which parameters stay as they are."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from models.positions import POSITIONS, resizing
from train.checkpoint.weights import Weights, about, open_weights
from train.loop import Task

ALL_BUT_HEAD = "all-but-head"
# What a model's logits come from, by the first part of its name in every family.
_HEADS = ("head", "aux_head")
# Rows of tokens, in a model of text.
_OF_TOKENS = ("token_embed", "embed")


def frozen_names(freeze: str | None, names: Iterable[str]) -> set[str]:
    """Return the parameters that ``--freeze`` keeps as they are.

    Args:
        freeze: prefixes of their names with commas between, "all-but-head", or None.
        names: of all parameters.

    Raises:
        ValueError: a prefix of none, or all are frozen.
    """
    names = list(names)
    if freeze is None:
        return set()
    if freeze == ALL_BUT_HEAD:
        frozen = {name for name in names if not _of_head(name)}
    else:
        frozen = set()
        for prefix in freeze.split(","):
            whole = prefix.rstrip(".")
            # "blocks.1" is not "blocks.10".
            found = {name for name in names if name == whole or name.startswith(f"{whole}.")}
            if not found or not whole:
                begins = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
                raise ValueError(
                    f"--freeze takes {ALL_BUT_HEAD} or names of parameters up to a dot, which "
                    f"begin with {begins}; got {prefix!r}"
                )
            frozen |= found
    if len(frozen) == len(names):
        raise ValueError(f"--freeze {freeze} leaves nothing to train")
    return frozen


def freeze(model: nn.Module, frozen: set[str]) -> None:
    """Take parameters out of training, before the optimizer is made."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)


def _of_head(name: str) -> bool:
    return name.partition(".")[0] in _HEADS


@dataclass(frozen=True)
class Initial:
    """Which weights of another run a model takes.

    Attributes:
        weights: of that run.
        changes: of the tensors that are taken, by name, as ``Weights.copy_into`` wants it.
        fresh: why each other tensor of the model keeps its initial value, by name.
        unused: tensors of the run that the model has not.
    """

    weights: Weights
    changes: Mapping[str, Callable[[Tensor], Tensor] | None]
    fresh: Mapping[str, str]
    unused: list[str]

    def lines(self) -> list[str]:
        """Return what is taken and what is not, for people."""
        resized = [name for name, change in self.changes.items() if change is not None]
        lines = [
            f"initial weights from {self.weights.path}, step {self.weights.step}: "
            f"{len(self.changes)} of {len(self.changes) + len(self.fresh)} tensors"
        ]
        if resized:
            lines.append(f"resized: {', '.join(resized)}")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.fresh.items():
            reasons.setdefault(reason, []).append(name)
        lines += [f"new, {reason}: {_few(names)}" for reason, names in reasons.items()]
        if self.unused:
            lines.append(f"not used: {_few(self.unused)}")
        return lines


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def initial(source: str, task: Task, model: nn.Module) -> Initial:
    """Match the weights of another run with a model.

    The head is new where the classes differ in number or name, embeddings of tokens where the
    tokeniser differs. Positions of pictures are interpolated where their size differs; of text
    those that both have are taken, and more are zero.

    Args:
        source: path of a run, a checkpoint or a file of weights.
        task: that is to be trained.
        model: of it, on any device.

    Raises:
        ValueError: no weights, those of another family, or none that fits.
    """
    weights = open_weights(source, "--init-from")
    now, then = about(task), weights.about
    families = now.get("family"), then.get("family")
    if _differ(*families):
        ours, theirs = families
        raise ValueError(f"--init-from {weights.path} is of the family {theirs}, not of {ours}")
    other_classes = _differ(now.get("classes"), then.get("classes"))
    other_tokens = _differ(task.files.get("tokenizer.json"), weights.tokenizer)
    changes: dict[str, Callable[[Tensor], Tensor] | None] = {}
    fresh: dict[str, str] = {}
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in own.items():
        kept = weights.shapes.get(name)
        if kept is None:
            fresh[name] = "not there"
        elif _of_head(name) and other_classes:
            fresh[name] = "of other classes"
        elif other_tokens and (_of_tokens(name) or (_of_head(name) and "classes" not in now)):
            fresh[name] = "of another tokeniser"
        elif kept == shape:
            changes[name] = None
        elif name in POSITIONS and (resize := resizing(kept, shape)) is not None:
            changes[name] = resize
        else:
            kind = "classes" if _of_head(name) else f"shape {_times(kept)}, not {_times(shape)}"
            fresh[name] = f"of other {kind}"
    if not changes:
        raise ValueError(f"--init-from {weights.path} has no weight that fits the model")
    return Initial(weights, changes, fresh, sorted(weights.shapes.keys() - own.keys()))


def _differ(now: object, then: object) -> bool:
    """Whether two are known and are not alike."""
    if isinstance(now, list | tuple) and isinstance(then, list | tuple):
        return list(now) != list(then)
    return now is not None and then is not None and now != then


def _of_tokens(name: str) -> bool:
    return name.partition(".")[0] in _OF_TOKENS


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
