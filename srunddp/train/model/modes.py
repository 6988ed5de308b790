"""Which modules train: those of a frozen backbone may be in evaluation mode all the time."""

from torch import nn


def train_if_evaluated(root: nn.Module) -> None:
    """Put a model that is in evaluation mode as a whole into training mode.

    A module that is in evaluation mode within one that is not stays so.

    Args:
        root: Of which each child counts as a model: the user's, and the loss function.
    """
    for child in root.children():
        if not child.training:
            child.train()


def train_as_a_whole(root: nn.Module) -> None:
    """Prepare a model for training: as :func:`train_if_evaluated`, and by modules' own ``train()``.

    Hugging Face's ``from_pretrained`` returns a model in evaluation mode, which is meant to be
    trained as a whole.

    Args:
        root: Of which each child counts as a model.
    """
    train_if_evaluated(root)
    for module in root.modules():
        if type(module).train is not nn.Module.train and module.training:
            # A class with a train() of its own may keep parts of itself in evaluation mode, such as
            # a frozen BatchNorm. It is called in a model that was in training mode, too: the user
            # may have built it without a call of train().
            module.train()


class TrainingModes:
    """The mode of each module at one moment, before an evaluation changes it."""

    def __init__(self, root: nn.Module) -> None:
        """Note the modes of a module and of all in it.

        Args:
            root: The module.
        """
        self._modes = [(module, module.training) for module in root.modules()]

    def restore(self) -> None:
        """Put all modules back into their modes."""
        # The attribute and not train(): that would put the modules within into the same mode.
        for module, training in self._modes:
            module.training = training
