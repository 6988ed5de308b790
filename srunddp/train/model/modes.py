"""Training and evaluation modes of modules: those of a frozen backbone may always be in evaluation
mode.
"""

from torch import nn


def train_if_evaluated(root: nn.Module) -> None:
    """Put a model that is in evaluation mode as a whole into training mode.

    A module in evaluation mode whose parent is in training mode is not changed.

    Args:
        root: The parent of the models: of the user's model and the loss function.
    """
    for child in root.children():
        if not child.training:
            child.train()


def train_as_a_whole(root: nn.Module) -> None:
    """Prepare a model for training: do as :func:`train_if_evaluated`, and call modules' own
    ``train()``.

    Hugging Face's ``from_pretrained`` returns a model in evaluation mode that is meant to be
    trained completely.

    Args:
        root: The parent of the models.
    """
    train_if_evaluated(root)
    for module in root.modules():
        if type(module).train is not nn.Module.train and module.training:
            # A class with its own train() may keep parts of itself in evaluation mode, such as a
            # frozen BatchNorm. Call it even if the model was in training mode: the user may have
            # built it without calling train().
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
        # Set the attribute: train() would put the modules within into the same mode.
        for module, training in self._modes:
            module.training = training
