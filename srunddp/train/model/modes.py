"""Puts models into training mode, but leaves in evaluation mode what is meant to stay in it, such
as a frozen backbone; and restores modes after an evaluation.
"""

from torch import nn


def train_if_evaluated(root: nn.Module) -> None:
    """Put each model that is itself in evaluation mode into training mode.

    Of a model that is in training mode nothing is changed: modules within it that are in evaluation
    mode, such as a frozen backbone, stay in it.

    Args:
        root: The module whose children are the user's model and the loss function.
    """
    for child in root.children():
        if not child.training:
            child.train()


def train_as_a_whole(root: nn.Module) -> None:
    """Put models into training mode as :func:`train_if_evaluated` does, and call each ``train()``
    that a module's class defines itself.

    Hugging Face's ``from_pretrained`` returns a model in evaluation mode, although all of it is
    meant to be trained.

    Args:
        root: The module whose children are the user's model and the loss function.
    """
    train_if_evaluated(root)
    for module in root.modules():
        if type(module).train is not nn.Module.train and module.training:
            # A class with its own train() may put parts of itself into evaluation mode, such as a
            # frozen BatchNorm. Call train() even if the model was in training mode before: a new
            # module is in training mode, and the user may never have called train().
            module.train()


class TrainingModes:
    """The modes that modules had before an evaluation, to restore them afterwards."""

    def __init__(self, root: nn.Module) -> None:
        """Note the present modes of a module and of all modules within it.

        Args:
            root: The module.
        """
        self._modes = [(module, module.training) for module in root.modules()]

    def restore(self) -> None:
        """Put all modules back into the modes that they had when this object was created."""
        # Set the attribute instead of calling train(), which would put all modules within a module
        # into the same mode.
        for module, training in self._modes:
            module.training = training
