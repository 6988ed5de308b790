"""Programs of different kinds, trained by the Trainer on any number of ranks and by a plain loop."""
