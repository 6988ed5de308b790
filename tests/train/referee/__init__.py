"""Programs of many kinds, trained by the Trainer on any number of ranks and by a plain loop."""
