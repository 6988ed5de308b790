"""Which modules train: those of a frozen backbone may be in evaluation mode all the time."""

from torch import nn


class TrainingModes:
    """Each module's mode as the user has left it; evaluations change it, and :meth:`restore` puts
    it back.

    A model that is in evaluation mode as a whole, as Hugging Face's ``from_pretrained`` returns it,
    is meant to be trained as a whole.
    """

    def __init__(self, root: nn.Module) -> None:
        """Note the modes of a module and of all in it."""
        for child in root.children():
            if not child.training:
                child.train()
        for module in root.modules():
            if type(module).train is not nn.Module.train and module.training:
                module.train()  # it may keep parts of itself in evaluation mode
        self._modes = [(module, module.training) for module in root.modules()]

    def restore(self) -> None:
        """Put all modules back into their modes."""
        for module, training in self._modes:
            module.training = training
